"""What all sources share: where files are looked for, and how label values become class numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.data.federation import Dataset
from fedloom.errors import InputError, nearest
from fedloom.record import Record

Progress = Callable[[str, int, int | None], None]  # what it is about, how much is done, of how much if that is known
Task = Literal["auto", "classification", "regression"]


class Source(Record):
    """Where examples come from. Its fields are the keys of the `[data]` table that belong to it."""

    def load(self, base: Path) -> Dataset:
        """Read the examples; relative paths start at `base`, the folder of the experiment file."""
        raise NotImplementedError(f"{type(self).__name__} must define load(base)")


def locate(base: Path, path: Path) -> Path:
    """The file or folder that a path of an experiment file means."""
    found = base / path.expanduser()
    if not found.exists():
        beside = [other.name for other in found.parent.iterdir()] if found.parent.is_dir() else []
        hint = nearest(found.name, beside)
        raise InputError(f"There is no file or folder {found}. Relative paths start at {base.resolve()}.{hint}")
    return found


def cache(name: str) -> Path:
    """The folder in which `fedloom data get` keeps a dataset."""
    root = os.environ.get("FEDLOOM_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "fedloom") / name


def locate_or_cached(base: Path, path: Path | None, name: str) -> Path:
    """The file or folder that a path means; without one, what `fedloom data get` put into the cache."""
    if path is not None:
        return locate(base, path)
    folder = cache(name)
    if not folder.exists():
        raise InputError(
            f"There is no folder {folder}. Run `fedloom data get {name}`, or set 'path' to where you have the data."
        )
    return folder


def encode(values: Iterable[Any]) -> tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...]]:
    """Class numbers and the classes' names: the distinct values in order, as numbers if all of them are.

    >>> encode(["10", "9", "10"])
    (array([1, 0, 1]), ('9', '10'))
    """
    found, codes = np.unique(np.asarray(values), return_inverse=True)
    names = [str(value) for value in found.tolist()]
    try:
        numbers, order = np.unique([float(name) for name in names], return_inverse=True)  # "1" and "1.0" are one class
        names = [f"{number:.17g}" for number in numbers]
    except ValueError:
        order = np.arange(len(names))
    return order[codes], tuple(names)


def targets(values: Iterable[Any], task: Task) -> tuple[Tensor, tuple[str, ...]]:
    """Labels and class names; left to itself, a task is a regression if some label is a number with a fraction.

    >>> targets(["0.5", "2"], "auto")
    (tensor([0.5000, 2.0000]), ())
    """
    array = np.asarray(values)
    try:
        numbers = array.astype(np.float64)
    except ValueError:
        if task == "regression":
            raise InputError(
                "The labels of a regression must be numbers, and some here are text. "
                'Use task = "classification" or another label.'
            ) from None
    else:
        wrong = ~np.isfinite(numbers)
        if wrong.any():
            row = int(np.argwhere(wrong)[0, 0])
            raise InputError(f"The label of example {row} is {array[row]}: labels must be finite numbers.")
        if task == "regression" or (task == "auto" and bool((numbers % 1 != 0).any())):
            return torch.from_numpy(numbers).float(), ()
    if array.ndim != 1:
        raise InputError(
            f"Class labels must be one list, one per example. Got an array of shape {array.shape} instead."
        )
    codes, classes = encode(array)
    return torch.from_numpy(codes), classes
