"""LEAF's files with numbers, FEMNIST, and Reddit's comments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.errors import InputError
from tests.data.sources import text_files
from tests.data.sources.client_files import ANN, BOB, held, leaf, load, tff, write


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
        (leaf(ann=ANN)[:-20], {}, r"all\.json is not complete JSON"),
        ("[]", {}, "is not in LEAF's format: it must have lists 'users' and 'num_samples'"),
        (leaf(ann=ANN).replace("num_samples", "counts"), {}, "is not in LEAF's format"),
        (leaf(ann=ANN).replace('["ann"]', '["ann", "bob"]'), {}, "of one length"),
        (leaf(ann=ANN).replace('["ann"]', '["eve"]'), {}, "user 'eve' in .* has no lists 'x' and 'y'"),
        (leaf(ann={**ANN, "y": [1]}), {}, "has 2 examples and 1 labels, but 'num_samples' is 1"),
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


def comments(**users: list[Any]) -> dict[str, Any]:
    held = {user: {"x": texts, "y": [{}] * len(texts)} for user, texts in users.items()}
    return {"users": list(users), "num_samples": [len(x) for x in users.values()], "user_data": held}


def test_leafs_two_forms_hold_the_same(tmp_path: Path) -> None:
    plain = text_files.write(tmp_path / "plain.json", comments(ann=["well , <url> now", "yes"], bob=["so what"]))
    comment = [["<BOS>", "well", ",", "<url>"], ["now", "<EOS>", "<PAD>", "<PAD>"]]
    pieces = comments(ann=[comment, [["<BOS>", "yes", "<EOS>", "<PAD>"]]], bob=[[["<BOS>", "so", "what", "<EOS>"]]])
    cut = text_files.write(tmp_path / "cut.json", pieces)
    expected = {"ann": ["well ,", "well , <url>", "well , <url> now"], "bob": ["so what"]}
    assert text_files.read(load("leaf_reddit", plain)) == text_files.read(load("leaf_reddit", cut)) == expected


def test_leafs_folders_are_put_together_in_the_order_of_time(tmp_path: Path) -> None:
    for number, part in enumerate(("train", "val", "test")):
        (tmp_path / "data" / part).mkdir(parents=True)
        text_files.write(tmp_path / "data" / part / f"reddit_0_{part}.json", comments(ann=[f"now {number}"]))
    assert text_files.read(load("leaf_reddit", tmp_path / "data")) == {"ann": ["now 0", "now 1", "now 2"]}
