"""What all sources share: how they find their files, and how label values become class numbers."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedloom.data.csv_text import as_float
from fedloom.data.federation import Dataset, as_dataset
from fedloom.errors import InputError, about_path, nearest
from fedloom.record import Record

Task = Literal["auto", "classification", "regression"]


class Source(Record):
    """Where examples come from. Its fields are keys of the `[data]` table.

    Every concrete public subclass in this folder is a source. Its name in experiment files is its `source_name`, or
    without one the class name in snake case: `HeartDisease` is `heart_disease`.
    """

    source_name: ClassVar[str] = ""

    @abstractmethod
    def load(self, base: Path) -> Dataset:
        """Read the examples. Relative paths start at `base`, the folder of the experiment file."""


def expanded(path: Path) -> Path:
    """Return a path in which ~ is somebody's home folder."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise InputError(f"There is no home folder of {path.parts[0]} in {path}. Write the whole path.") from None


def locate(base: Path, path: Path) -> Path:
    """Return the file or folder that a path in an experiment file refers to."""
    found = base / expanded(path)
    if not found.exists():
        beside = [other.name for other in found.parent.iterdir()] if found.parent.is_dir() else []
        hint = about_path(path) or nearest(found.name, beside)
        if (base / "run.db").exists() and not path.is_absolute():
            hint = " This is a run's copy of its experiment file: move it to the folder of the original first."
        raise InputError(f"There is no file or folder {found}. Relative paths start at {base.resolve()}.{hint}")
    return found


def require(name: str, known: Sequence[str], where: str, what: str, advice: str = "") -> None:
    """Raise an error that lists the known names if a name is not among them."""
    if name not in known:
        listed = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
        raise InputError(f"{where} has no {what} '{name}'. It has: {listed}.{nearest(name, known) or advice}")


def cache_folder(name: str) -> Path:
    """Return the folder where `fedloom data get` stores a dataset."""
    root = os.environ.get("FEDLOOM_CACHE")
    return (expanded(Path(root)) if root else Path.home() / ".cache" / "fedloom") / name


def locate_or_cached(base: Path, path: Path | None, name: str) -> Path:
    """Return the file or folder of a path, or without a path the folder of `fedloom data get`."""
    if path is not None:
        return locate(base, path)
    folder = cache_folder(name)
    if not folder.exists():
        raise InputError(
            f"There is no folder {folder}. Run `fedloom data get {name}`, or set 'path' to where you have the data."
        )
    return folder


def spellings(file: str) -> Iterator[str]:
    """Return the names that copies of a file have: compressed or not, MNIST's also with another dot.

    >>> list(spellings("labels-idx1"))
    ['labels-idx1', 'labels-idx1.gz', 'labels.idx1', 'labels.idx1.gz']
    """
    for name in dict.fromkeys((file, file.replace("-idx", ".idx"))):
        yield from (name, f"{name}.gz")


def find(folder: Path, file: str) -> Path | None:
    """Return a file of a folder under any of its spellings, or None."""
    return next((folder / name for name in spellings(file) if (folder / name).is_file()), None)


def encode(values: Iterable[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return class numbers and class names. Classes are the distinct values, sorted as numbers if all are numbers.

    >>> encode(["10", "9", "10"])
    (array([1, 0, 1]), ('9', '10'))
    """
    found, codes = np.unique(np.asarray(values), return_inverse=True)
    names = [str(value) for value in found.tolist()]
    try:
        numbers, order = np.unique([as_float(name) for name in names], return_inverse=True)  # "1" is "1.0"
        names = [f"{number:.17g}" for number in numbers]
    except ValueError:
        order = np.arange(len(names))
    return order[codes], tuple(names)


def targets(values: Iterable[Any], task: Task) -> tuple[Tensor, tuple[str, ...]]:
    """Return labels and class names. With "auto", labels with a fraction mean a regression, which has no classes.

    >>> targets(["0.5", "2"], "auto")
    (tensor([0.5000, 2.0000]), ())
    """
    array = np.asarray(values)
    try:
        if array.dtype.kind == "U" and np.char.find(array, "_").max(initial=-1) >= 0:
            raise ValueError("1_000 is a text")
        numbers = array.astype(np.float64)
    except ValueError:
        if task == "regression":
            raise InputError(
                "The labels of a regression must be numbers, but some labels are text. "
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


def dataset_with_test(
    x: ArrayLike,
    y: NDArray[Any],
    test: tuple[NDArray[Any], NDArray[Any]] | None,
    *,
    client: ArrayLike | None = None,
    task: Task = "auto",
    classes: Iterable[Any] = (),
    scale: float = 1.0,
) -> Dataset:
    """Make a dataset whose training and test labels are numbered together.

    The distinct labels become the classes. If you give `classes`, labels are already class numbers.
    """
    labels = y if test is None else np.concatenate([y, test[1]])
    names = tuple(str(name) for name in classes)
    numbers, names = (labels, names) if names else targets(labels, task)
    official = None if test is None else (test[0], numbers[len(y) :])
    return replace(as_dataset(x, numbers[: len(y)], client=client, test=official), classes=names, scale=scale)
