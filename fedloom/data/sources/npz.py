"""Arrays saved by numpy: `np.savez("data.npz", x=x, y=y, client=names)`."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from fedloom.data.federation import Dataset
from fedloom.data.sources.base import Source, Task, dataset_with_test, locate, require
from fedloom.errors import InputError


class Npz(Source):
    """The arrays of a file: features, labels, optionally clients and an official test set.

    The distinct labels in order become the classes; if you set `classes`, labels are already class numbers from 0 to
    `classes` − 1.
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
        """Read the file. Labels of both sets are numbered together."""
        path = locate(base, self.path)
        arrays = self._read(path)
        if ("x_test" in arrays) != ("y_test" in arrays):
            raise InputError(f"The file {path} must have both '{self.x_test}' and '{self.y_test}', or neither of them.")
        return dataset_with_test(
            arrays["x"],
            arrays["y"],
            (arrays["x_test"], arrays["y_test"]) if "x_test" in arrays else None,
            client=arrays.get("client"),
            task=self.task,
            classes=range(self.classes or 0),
            scale=self.scale,
        )

    def _read(self, path: Path) -> dict[str, NDArray[Any]]:
        try:
            file = np.load(path, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise InputError(
                    f"The file {path} is one array, not an .npz file: save it by np.savez(path, x=x, y=y)."
                )
            with file:
                return {field: file[name] for field, name in self._names(file.files).items()}
        except InputError:
            raise
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(
                f"The file {path} cannot be read: {error}. Save plain arrays with np.savez: pickled objects are never "
                "loaded."
            ) from None

    def _names(self, known: list[str]) -> dict[str, str]:
        """Return the names of the arrays to read. Those besides x and y must exist only if you name them."""
        names = {field: getattr(self, field) for field in ("x", "y", "client", "x_test", "y_test")}
        for field, name in names.items():
            if field in ("x", "y") or name != type(self).model_fields[field].default:
                require(name, known, f"The file {self.path}", "array")
        return {field: name for field, name in names.items() if name in known}
