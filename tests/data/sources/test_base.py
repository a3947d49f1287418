from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedloom.data.sources.base import cache_folder, encode, locate, targets
from fedloom.errors import InputError
from tests.data.sources.loading import load, write_mnist


def test_labels_are_numbered_in_order() -> None:
    assert encode(["dog", "cat", "dog"])[1] == ("cat", "dog")
    codes, classes = encode(["10", "9.0", "9"])
    assert (codes.tolist(), classes) == ([1, 0, 0], ("9", "10"))


def test_the_task_is_guessed_from_the_labels() -> None:
    assert targets(["1", "5"], "auto")[1] == ("1", "5")
    assert targets(["1", "5.5"], "auto")[1] == ()
    assert targets(["1", "5"], "regression")[0].tolist() == [1.0, 5.0]
    assert targets(["0.5", "1.5", "0.5"], "classification")[0].tolist() == [0, 1, 0]
    with pytest.raises(InputError, match="labels of a regression must be numbers"):
        targets(["a", "b"], "regression")
    with pytest.raises(InputError, match="label of example 1 is nan"):
        targets(["1", "nan"], "classification")
    with pytest.raises(InputError, match=r"one list, one per example. Got an array of shape \(2, 2\)"):
        targets(np.zeros((2, 2)), "classification")


def test_the_home_folder_of_nobody_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no home folder of ~nobody-at-all in ~nobody-at-all/x.csv"):
        locate(tmp_path, Path("~nobody-at-all/x.csv"))


def test_without_a_path_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    with pytest.raises(
        InputError, match=r"fedloom data get mnist`, or set 'path'.*train-images-idx3-ubyte.*t10k-labels"
    ):
        load("mnist")
    write_mnist(tmp_path / "mnist")
    assert len(load("mnist").y) == 5
    monkeypatch.delenv("FEDLOOM_CACHE")
    assert cache_folder("mnist") == Path.home() / ".cache" / "fedloom" / "mnist"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    with pytest.raises(InputError, match=r"no file or folder .*mnits.*Relative paths start at .*Did you mean 'mnist'"):
        load("mnist", tmp_path, path="mnits")
    with pytest.raises(InputError, match=r"In double quotes a backslash means more than itself: write paths with /"):
        load("mnist", tmp_path, path="data\bmnist")
    (tmp_path / "run.db").touch()
    with pytest.raises(InputError, match="This is a run's copy of its experiment file: move it to the folder"):
        load("mnist", tmp_path, path="mnits")
