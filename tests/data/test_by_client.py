"""LEAF's JSON and TensorFlow Federated's HDF5, in and out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.data.build import federate
from fedloom.data.export import export
from fedloom.data.federation import Dataset, Federation, as_dataset
from fedloom.data.sources import source
from fedloom.errors import InputError

ANN = {"x": [[0.5, 1.0], [0.25, 0.0]], "y": [3, 7]}
BOB = {"x": [[0.125, 0.75]], "y": [3]}


def leaf(**users: Any) -> str:
    return json.dumps(
        {"users": list(users), "num_samples": [len(held["y"]) for held in users.values()], "user_data": users}
    )


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def tff(path: Path, **users: dict[str, Any]) -> Path:
    """A file as TensorFlow Federated's `HDF5ClientData` reads it."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for user, features in users.items():
            for name, values in features.items():
                file.create_dataset(f"examples/{user}/{name}", data=values)
    return path


def load(name: str, path: Path, **fields: Any) -> Dataset:
    return source(name)(path=path, **fields).load(Path())


def held(data: Dataset) -> dict[str, tuple[Any, Any]]:
    federation = federate(data, split=(1, 0, 0))
    return {
        federation.name(c): (federation.x[rows].tolist(), federation.y[rows].tolist())
        for c in range(federation.clients)
        for rows in [federation.indices(c, "train")]
    }


# LEAF


def test_one_file_of_leaf(tmp_path: Path) -> None:
    data = load("leaf", write(tmp_path / "all.json", leaf(bob=BOB, ann=ANN)))
    assert held(data) == {"ann": (ANN["x"], [0, 1]), "bob": (BOB["x"], [0])}
    assert (data.classes, data.test) == (("3", "7"), None)
    assert load("leaf", tmp_path, classes=10).y.tolist() == [3, 3, 7]


def test_a_pair_of_folders_is_train_and_test(tmp_path: Path) -> None:
    write(tmp_path / "train" / "all_data_0_niid_0_keep_0_train_9.json", leaf(ann=ANN))
    write(tmp_path / "train" / "all_data_1_niid_0_keep_0_train_9.json", leaf(bob=BOB))
    write(tmp_path / "test" / "all_data_0_niid_0_keep_0_test_9.json", leaf(ann={"x": [[9, 9]], "y": [5]}))
    data = load("leaf", tmp_path)
    assert data.classes == ("3", "5", "7")
    assert held(data) == {"ann": (ANN["x"], [0, 2]), "bob": (BOB["x"], [0])}
    assert data.test is not None
    assert (data.test[0].tolist(), data.test[1].tolist()) == ([[9.0, 9.0]], [1])
    joined = load("leaf", tmp_path, join=True)
    assert joined.test is None
    assert held(joined)["ann"] == ([*ANN["x"], [9.0, 9.0]], [0, 2, 1])


def test_leafs_folder_all_data(tmp_path: Path) -> None:
    write(tmp_path / "all_data" / "all_data_0.json", leaf(ann=ANN))
    assert list(held(load("leaf", tmp_path))) == ["ann"]


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        (leaf(ann=ANN)[:-20], {}, r"all\.json is not whole JSON"),
        ("[]", {}, "is not LEAF's: it must have lists 'users' and 'num_samples'"),
        (leaf(ann=ANN).replace("num_samples", "counts"), {}, "is not LEAF's"),
        (leaf(ann=ANN).replace('["ann"]', '["ann", "bob"]'), {}, "of one length"),
        (leaf(ann=ANN).replace('["ann"]', '["eve"]'), {}, "user 'eve' in .* has no lists 'x' and 'y'"),
        (leaf(ann={**ANN, "y": [1]}), {}, "has 2 examples and 1 labels, but 'num_samples' says 1"),
        (leaf(ann={**ANN, "x": [[1, 2], [3]]}), {}, r"must be lists of numbers of one length.*leaf_reddit"),
        (leaf(ann={**ANN, "x": ["some", "words"]}), {}, r"must be lists of numbers"),
        (leaf(ann=ANN, bob={"x": [[1, 2, 3]], "y": [1]}), {}, r"'bob' has examples of shape \(3,\), but client 'ann'"),
        (leaf(ann={"x": [], "y": []}), {}, "There are no clients in"),
        (leaf(ann=ANN), {"shape": [3]}, r"has 2 values, which do not fit shape = \[3\]"),
    ],
)
def test_what_is_wrong_in_leafs_files(tmp_path: Path, text: str, fields: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load("leaf", write(tmp_path / "all.json", text), **fields)


def test_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There are no JSON files in"):
        load("leaf", tmp_path)


# HDF5


def test_the_files_of_tensorflow_federated(tmp_path: Path) -> None:
    train = tff(
        tmp_path / "train.h5",
        f0001_10={"points": np.float32(ANN["x"]), "label": np.int32(ANN["y"])},
        f0000_14={"points": np.float32(BOB["x"]), "label": np.int32(BOB["y"])},
    )
    test = tff(tmp_path / "test.h5", f0001_10={"points": np.float32([[4, 5]]), "label": np.int32([7])})
    data = load("hdf5", train, test=test)
    assert held(data) == {"f0000_14": (BOB["x"], [0]), "f0001_10": (ANN["x"], [0, 1])}
    assert data.test is not None
    assert data.test[1].tolist() == [1]
    assert load("hdf5", train, shape=[1, 2]).x.shape == (3, 1, 2)


def test_what_is_wrong_in_hdf5_files(tmp_path: Path) -> None:
    two = tff(tmp_path / "two.h5", ann={"a": [1.0], "b": [2.0], "label": [0]})
    with pytest.raises(InputError, match=r"'ann' in .* has a, b besides 'label': say which are the features"):
        load("hdf5", two)
    assert load("hdf5", two, x="b").x.tolist() == [2.0]
    with pytest.raises(InputError, match=r"has no 'labels'\. It has: a, b, label\. Did you mean 'label'"):
        load("hdf5", two, x="a", y="labels")
    text = tff(tmp_path / "text.h5", ann={"tokens": [b"hello"], "label": [0]})
    with pytest.raises(InputError, match="examples of client 'ann' must be numbers"):
        load("hdf5", text)
    with pytest.raises(InputError, match="has no group 'examples'"):
        load("hdf5", tff(tmp_path / "none.h5"))
    short = tff(tmp_path / "short.h5", ann={"x": [1.0, 2.0], "label": [0]})
    with pytest.raises(InputError, match=r"'ann' has 2 examples but labels of shape \(1,\)"):
        load("hdf5", short)
    short.write_bytes(short.read_bytes()[:700])
    with pytest.raises(InputError, match=r"short\.h5 cannot be read as HDF5"):
        load("hdf5", short)


def test_without_h5py_the_way_to_get_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(InputError, match=r"need h5py: pip install 'fedloom\[hdf5\]'"):
        load("hdf5", write(tmp_path / "a.h5", ""))


# FEMNIST


def test_femnist_from_both(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).random((3, 28, 28)).astype(np.float32)
    labels = [0, 61, 10]
    users = {"f0": (slice(0, 1)), "f1": slice(1, 3)}
    write(
        tmp_path / "leaf" / "train" / "all_data_0_niid_0_keep_0_train_9.json",
        leaf(**{u: {"x": pixels[at].reshape(-1, 784).tolist(), "y": labels[at]} for u, at in users.items()}),
    )
    tff(
        tmp_path / "tff" / "fed_emnist_train.h5",
        **{u: {"pixels": pixels[at], "label": labels[at]} for u, at in users.items()},
    )
    tff(tmp_path / "tff" / "fed_emnist_test.h5", f1={"pixels": pixels[:1], "label": [61]})
    one, other = load("femnist", tmp_path / "leaf"), load("femnist", tmp_path / "tff")
    assert one.x.equal(other.x)
    assert one.x.reshape(3, 28, 28).equal(torch.from_numpy(pixels))
    assert one.y.tolist() == other.y.tolist() == labels
    assert len(one.classes) == 62
    assert [one.classes[label] for label in labels] == ["0", "z", "A"]
    assert (one.test, other.test is not None and other.test[1].tolist()) == (None, [61])
    assert load("femnist", tmp_path / "tff", join=True).y.tolist() == [*labels, 61]
    with pytest.raises(InputError, match="set 'path' to the folder that has fed_emnist_train"):
        load("femnist", tmp_path / "tff" / "fed_emnist_train.h5")


# Out, and in again


def federation(integer: bool) -> Federation:
    x = np.arange(60).reshape(10, 2, 3).astype(np.uint8 if integer else np.float32)
    data = as_dataset(x, np.arange(10) % 3, client=["a", "b"] * 5)
    return federate(Dataset(data.x, data.y, data.client, classes=data.classes, scale=0.5), seed=3)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize(("name", "suffix"), [("hdf5", ".h5"), ("leaf", ".json")])
def test_what_was_exported_comes_back(tmp_path: Path, name: str, suffix: str, integer: bool) -> None:
    if name == "hdf5":
        pytest.importorskip("h5py", reason="h5py is not installed")
    original = federation(integer)
    assert export(original, tmp_path / f"all{suffix}") == 10
    again = federate(load(name, tmp_path / f"all{suffix}", shape=[2, 3], classes=3), seed=3)
    assert again.names == original.names
    assert again.y.equal(original.y)
    assert again.x.equal(original.x.float() * (0.5 if integer else 1))


def test_one_split_only(tmp_path: Path) -> None:
    original = federation(integer=False)
    assert export(original, tmp_path / "deep" / "test.json", "test") == 2
    again = federate(load("leaf", tmp_path / "deep" / "test.json", shape=[2, 3]))
    rows = torch.cat([original.indices(client, "test") for client in range(2)])
    assert again.x.equal(original.x[rows])


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"all\.csv must end in \.h5 .* or \.json"):
        export(federation(False), tmp_path / "all.csv")
    with pytest.raises(InputError, match="need two names without '/'"):
        export(federation(False), tmp_path / "all.h5", x="label")
    pytest.importorskip("h5py", reason="h5py is not installed")
    named = federate(as_dataset(np.zeros((2, 1)), [0, 1], client=["a/b", "c"]))
    with pytest.raises(InputError, match="client 'a/b' cannot be a group"):
        export(named, tmp_path / "all.h5")


def test_the_command_writes_the_clients_of_an_experiment(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    file = write(tmp_path / "e.toml", 'rounds = 1\n[data]\npartition = { name = "iid", clients = 3 }\n')
    command = ["data", "export", str(file), "--to", str(tmp_path / "train.h5"), "--split", "train"]
    done = CliRunner().invoke(app, [*command, "--features", "points"])
    assert done.stdout == f"{tmp_path / 'train.h5'}: 1077 examples of 3 clients\n"
    with h5py.File(tmp_path / "train.h5") as written:
        assert {name: (*client, client["points"].shape) for name, client in written["examples"].items()} == {
            str(client): ("label", "points", (359, 64)) for client in range(3)
        }
