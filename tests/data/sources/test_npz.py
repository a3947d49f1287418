from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.data.build import federate
from fedloom.errors import InputError
from tests.data.sources.loading import load


def test_arrays_with_clients_and_a_test_set(tmp_path: Path) -> None:
    arrays = {"x": np.arange(8).reshape(4, 2), "y": np.array([5, 7, 5, 9]), "client": np.array(["a", "b", "a", "b"])}
    np.savez(tmp_path / "data.npz", **arrays, x_test=np.zeros((1, 2), int), y_test=np.array([8]))  # type: ignore[arg-type]
    data = load("npz", tmp_path, path="data.npz", scale=0.5)
    assert (data.x.tolist(), data.scale) == (arrays["x"].tolist(), 0.5)
    assert (data.y.tolist(), data.classes) == ([0, 1, 0, 3], ("5", "7", "8", "9"))
    assert data.test is not None
    assert data.test[1].tolist() == [2]
    assert data.client is not None
    assert federate(data, server="test").names == ["a", "b"]


def test_arrays_under_other_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", q=np.zeros((3, 2), ">f8"), t=np.array([0.5, 1.5, 2.0]), user=np.array([3, 3, 1]))
    data = load("npz", tmp_path, path="d.npz", x="q", y="t", client="user")
    assert (data.x.dtype, data.classes, data.test) == (torch.float32, (), None)
    assert load("npz", tmp_path, path="d.npz", x="q", y="t", task="classification").classes == ("0.5", "1.5", "2")
    assert load("npz", tmp_path, path="d.npz", x="q", y="t").client is None
    spelt_out = load("npz", tmp_path, path="d.npz", x="q", y="t", client="client")  # as a run's own record does
    assert spelt_out.client is None


def test_labels_that_are_class_numbers_already(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 1)), y=np.array([2, 7], np.int8))
    data = load("npz", tmp_path, path="d.npz", classes=10)
    assert (data.y.tolist(), len(data.classes)) == ([2, 7], 10)
    with pytest.raises(InputError, match="label of example 1 is 7: with 5 classes"):
        federate(load("npz", tmp_path, path="d.npz", classes=5), clients=1)


def test_text_labels_in_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 1)), y=np.array(["dog", "cat"]))
    assert load("npz", tmp_path, path="d.npz").classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("arrays", "fields", "message"),
    [
        ({"x": np.zeros((2, 1)), "z": np.zeros(2)}, {}, "has no array 'y'. It has: x, z"),
        ({"x": np.zeros((2, 1)), "y": np.zeros(2)}, {"client": "user"}, "has no array 'user'"),
        ({"x": np.zeros((2, 1)), "y": np.zeros(2), "x_test": np.zeros((1, 1))}, {}, "both 'x_test' and 'y_test'"),
        ({"x": np.zeros((2, 1)), "y": np.zeros(3)}, {}, "There are 2 examples but 3 labels"),
        ({"x": np.zeros((2, 1)), "y": np.zeros(2), "client": np.zeros(3)}, {}, "2 examples but 3 client names"),
        ({"x": np.array(["a", "b"]), "y": np.zeros(2)}, {}, "Features must be numbers"),
        ({"x": np.array([{}, {}]), "y": np.zeros(2)}, {}, "pickled objects are never loaded"),
    ],
)
def test_wrong_arrays_are_explained(tmp_path: Path, arrays: Any, fields: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(InputError, match=message):
        load("npz", tmp_path, path="d.npz", **fields)


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(InputError, match=r"one\.npy is one array, not an \.npz file"):
        load("npz", tmp_path, path="one.npy")
    with pytest.raises(InputError, match=r"text\.npz cannot be read"):
        load("npz", tmp_path, path="text.npz")


@pytest.mark.data
def test_real_activities(real: Path) -> None:
    data = load("npz", real, path="har_hapt/hapt_features30.npz", client="user")
    assert federate(data).names == [str(person) for person in range(1, 31)]
    assert data.classes == tuple("123456")
