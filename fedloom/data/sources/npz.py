"""Arrays saved by numpy: `np.savez("data.npz", x=x, y=y, client=names)`."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from fedloom.data.federation import Dataset, as_dataset
from fedloom.data.sources.base import Source, Task, locate, targets
from fedloom.errors import InputError, nearest


class Npz(Source):
    """Features, labels and perhaps clients and an official test set, under these names in the file.

    The distinct labels in order become the classes; `classes` says instead that labels are already numbers below it.
    """

    path: Path
    """The file."""
    x: str = "x"
    """The array of features."""
    y: str = "y"
    """The array of labels."""
    client: str = "client"
    """The array of clients, if there is one."""
    x_test: str = "x_test"
    """The features of the official test set, if there is one."""
    y_test: str = "y_test"
    """The labels of the official test set."""
    task: Task = "auto"
    """Whether labels are classes or numbers. `auto` looks at them."""
    classes: PositiveInt | None = None
    """The number of classes, if labels are already numbers below it. By default, the distinct labels in order become
    the classes.
    """
    scale: float = 1.0
    """What integer features are multiplied by."""

    def load(self, base: Path) -> Dataset:
        """Labels of both sets are numbered together."""
        path = locate(base, self.path)
        arrays = self._read(path)
        if ("x_test" in arrays) != ("y_test" in arrays):
            raise InputError(f"The file {path} must have both '{self.x_test}' and '{self.y_test}', or neither of them.")
        count = len(arrays["y"])
        labels = np.concatenate([arrays["y"], arrays["y_test"]]) if "y_test" in arrays else arrays["y"]
        classes = tuple(str(number) for number in range(self.classes or 0))
        y, classes = (labels, classes) if classes else targets(labels, self.task)
        test = (arrays["x_test"], y[count:]) if "x_test" in arrays else None
        dataset = as_dataset(arrays["x"], y[:count], client=arrays.get("client"), test=test)
        return replace(dataset, classes=classes, scale=self.scale)

    def _read(self, path: Path) -> dict[str, NDArray[Any]]:
        try:
            file = np.load(path, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise InputError(
                    f"The file {path} is one array, not an .npz file: save it by np.savez(path, x=x, y=y)."
                )
            with file:
                return {field: file[name] for field, name in self._wanted(file.files)}
        except InputError:
            raise
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(
                f"The file {path} cannot be read: {error}. Save plain arrays with np.savez: pickled objects are never "
                "loaded."
            ) from None

    def _wanted(self, known: list[str]) -> Iterator[tuple[str, str]]:
        for field in ("x", "y", "client", "x_test", "y_test"):
            name = getattr(self, field)
            if name in known:
                yield field, name
            elif field in ("x", "y") or name != type(self).model_fields[field].default:  # others only if named
                has = ", ".join(known)
                raise InputError(f"The file {self.path} has no array '{name}'. It has: {has}.{nearest(name, known)}")
