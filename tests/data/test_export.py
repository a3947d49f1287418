from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.data.build import federate
from fedloom.data.export import Which, export
from fedloom.data.federation import Dataset, Federation, as_dataset
from fedloom.errors import InputError
from tests.data.sources.client_files import load, write


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


@pytest.mark.parametrize("which", ["all", "train"])
def test_the_json_file_is_written_client_by_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: Which
) -> None:
    original = federation(integer=True)
    dumped: list[object] = []

    def dumps(content: object) -> str:
        dumped.append(content)
        return json.dumps(content)

    monkeypatch.setattr("fedloom.data.export.json", SimpleNamespace(dumps=dumps))
    total = export(original, tmp_path / "all.json", which)
    text = (tmp_path / "all.json").read_text()
    content = json.loads(text)
    assert text == json.dumps(content)  # the same bytes as if it had been written at once
    assert (content["users"], sum(content["num_samples"])) == (["a", "b"], total)
    assert content["num_samples"] == [len(content["user_data"][name]["y"]) for name in "ab"]
    assert [len(part["y"]) for part in dumped if isinstance(part, dict) and "y" in part] == content["num_samples"]


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
