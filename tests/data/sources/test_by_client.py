from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.data.sources.by_client import Client
from fedloom.data.sources.leaf import Leaf
from fedloom.errors import InputError

CLIENTS: dict[str, list[Client]] = {
    "train": [("ann", np.zeros((2, 4)), np.array([7, 3])), ("bob", np.ones((1, 4)), np.array([3]))],
    "test": [("ann", np.full((1, 4), 2.0), np.array([5]))],
    "empty": [("eve", np.zeros((0, 4)), np.zeros(0))],
    "short": [("eve", np.zeros((2, 4)), np.array([1]))],
    "text": [("eve", np.array(["a"]), np.array([1]))],
    "narrow": [("eve", np.zeros((1, 3)), np.array([1]))],
}


def read(file: Path) -> Iterator[Client]:
    yield from CLIENTS[file.name]


def assemble(train: list[str], test: list[str], **fields: Any) -> Any:
    return Leaf(path=Path(), **fields).assemble(read, [Path(name) for name in train], [Path(name) for name in test])


def test_test_examples_become_the_official_test_set_or_join() -> None:
    data = assemble(["train", "empty"], ["test"])
    assert (data.classes, data.y.tolist()) == (("3", "5", "7"), [2, 0, 0])
    assert data.client.tolist() == ["ann", "ann", "bob"]
    assert (data.test[0].tolist(), data.test[1].tolist()) == ([[2.0] * 4], [1])
    joined = assemble(["train"], ["test"], join=True)
    assert (joined.test, joined.client.tolist()) == (None, ["ann", "ann", "bob", "ann"])


def test_examples_get_a_shape_and_labels_may_be_class_numbers() -> None:
    data = assemble(["train"], [], shape=(1, 2, 2), classes=8)
    assert (data.x.shape, data.y.tolist(), len(data.classes)) == ((3, 1, 2, 2), [7, 3, 3], 8)


@pytest.mark.parametrize(
    ("files", "fields", "message"),
    [
        (["empty"], {}, "There are no clients in empty"),
        (["short"], {}, r"Client 'eve' has 2 examples but labels of shape \(1,\)"),
        (["text"], {}, "examples of client 'eve' must be numbers. Got <U1"),
        (["train", "narrow"], {}, r"'eve' has examples of shape \(3,\), but client 'ann' has examples of shape \(4,\)"),
        (["train"], {"shape": (3,)}, r"An example has 4 values, which do not fit shape = \[3\]"),
    ],
)
def test_wrong_clients_are_explained(files: list[str], fields: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        assemble(files, [], **fields)
