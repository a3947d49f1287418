"""Any dataset that Hugging Face's `datasets` reads: from a folder or file, or by its name on their hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt, model_validator

from fedloom.data.federation import Dataset
from fedloom.data.sources.base import Source, Task, dataset_with_test, locate, require
from fedloom.data.sources.images import pixels
from fedloom.discovery import optional
from fedloom.errors import InputError

FORMS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
SAVED = ("dataset_dict.json", "state.json")  # files that save_to_disk writes into its folder


class HuggingFace(Source):
    """The columns of a dataset: features, a label, optionally the client. Pictures are resized.

    Without `x`, the features are the only column of pictures, or all columns of numbers besides label and client, or
    the only other column.
    """

    source_name: ClassVar[str] = "huggingface"

    path: Path | None = None
    """A folder that `save_to_disk` wrote."""
    name: str | None = None
    """The dataset's name on the hub."""
    config: str | None = None
    """The dataset's configuration."""
    train: str = "train"
    """The split to use."""
    test: str = "test"
    """The split to use as the official test set, if the dataset has it."""
    x: str | tuple[str, ...] = ()
    """The columns of the features. By default, the only column of pictures, or all columns of numbers, or the only
    other column.
    """
    y: str = "label"
    """The column of the label."""
    client: str | None = None
    """The column with the client, for `partition = "natural"`."""
    task: Task = "auto"
    """Whether labels are classes or numbers. `auto` looks at them."""
    size: tuple[PositiveInt, PositiveInt] = (32, 32)
    """The height and width that pictures are resized to."""
    channels: Literal[1, 3] = 3
    """1 for grey, 3 for colour."""

    @model_validator(mode="after")
    def _path_or_name(self) -> HuggingFace:
        if (self.path is None) == (self.name is None):
            raise InputError("The source huggingface needs either 'path' (a folder or file) or 'name' (on the hub).")
        return self

    def load(self, base: Path) -> Dataset:
        """Read the dataset. Labels of both splits are numbered together; names of class labels are kept."""
        splits = self._splits(base)
        require(self.train, list(splits), "The dataset", "split")
        train, test = splits[self.train], splits.get(self.test) if self.test != self.train else None
        if not len(train):
            raise InputError(f"The split '{self.train}' of the dataset has no examples.")
        columns = self._columns(train)
        dataset = dataset_with_test(
            self._features(train, columns),
            _values(train, self.y),
            None if test is None else (self._features(test, columns), _values(test, self.y)),
            client=None if self.client is None else _values(train, self.client),
            task=self.task,
            classes=getattr(train.features[self.y], "names", None) or (),  # with names, labels are class numbers
            scale=1 / 255 if _is_picture(train, columns[0]) else 1.0,
        )
        return replace(dataset, features=() if len(columns) == 1 else columns)

    def _splits(self, base: Path) -> Any:
        """Return the dataset's splits by name."""
        datasets = optional("datasets", "Hugging Face's datasets need a package", "huggingface")
        datasets.disable_progress_bars()
        path = None if self.path is None else locate(base, self.path)
        if path is not None and path.is_file() and path.suffix not in FORMS:
            raise InputError(f"{path} must end in {', '.join(FORMS)}, or be a folder with such files.")
        try:
            if path is None:
                return datasets.load_dataset(self.name, self.config)
            if path.is_file():
                return datasets.load_dataset(FORMS[path.suffix], data_files=str(path))
            if any((path / mark).is_file() for mark in SAVED):
                saved = datasets.load_from_disk(str(path))
                return saved if isinstance(saved, dict) else {self.train: saved}
            return datasets.load_dataset(str(path), self.config)
        except Exception as error:  # the readers of many formats, and the hub, raise all kinds of errors
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            if path is not None:
                raise InputError(f"{path} cannot be read as a Hugging Face dataset ({why}).") from None
            raise InputError(
                f"The dataset '{self.name}' cannot be downloaded ({why}). Check the name and the network. Without a "
                "network, copy its files to this machine and set 'path' to their folder instead of 'name'."
            ) from None

    def _columns(self, split: Any) -> tuple[str, ...]:
        """Return the names of the feature columns."""
        known = list(split.features)
        wanted = (self.x,) if isinstance(self.x, str) else self.x
        for name in (self.y, *wanted, *([] if self.client is None else [self.client])):
            require(name, known, "The dataset", "column")
        if wanted:
            return wanted
        others = [name for name in known if name not in (self.y, self.client)]
        pictures = [name for name in others if _is_picture(split, name)]
        numbers = [name for name in others if _is_number(split, name)]
        for found in ([] if pictures else numbers, pictures, others):
            if len(found) == 1 or (found and found is numbers):
                return tuple(found)
        raise InputError(f"Set x to the columns that are the features: x = [...]. The dataset has: {', '.join(known)}.")

    def _features(self, split: Any, columns: tuple[str, ...]) -> NDArray[Any]:
        if _is_picture(split, columns[0]):
            if len(columns) > 1:
                raise InputError(f"Pictures ('{columns[0]}') must be the only features: set x to one column.")
            return np.stack([pixels(picture, self.size, self.channels) for picture in split[columns[0]]])
        arrays = [_values(split, name) for name in columns]
        for name, array in zip(columns, arrays, strict=True):
            if array.dtype.kind not in "biuf" or (len(columns) > 1 and array.ndim > 1):
                raise InputError(
                    f"The column '{name}' cannot be a feature: it must hold numbers, or lists of numbers of one length "
                    f"if it is the only one. Got {array.dtype} of shape {array.shape}."
                )
        return arrays[0] if len(columns) == 1 else np.column_stack(arrays).astype(np.float32)


def _values(split: Any, column: str) -> NDArray[Any]:
    return np.asarray(split.select_columns([column]).with_format("numpy")[:][column])


def _is_picture(split: Any, column: str) -> bool:
    return type(split.features[column]).__name__ == "Image"


def _is_number(split: Any, column: str) -> bool:
    return str(getattr(split.features[column], "dtype", "")).startswith(("int", "uint", "float", "bool"))
