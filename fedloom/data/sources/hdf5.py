"""HDF5 files by client, as TensorFlow Federated writes them: a dataset at `examples/<client>/<feature>`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.data.federation import Dataset
from fedloom.data.sources.archive import readable
from fedloom.data.sources.base import locate, require
from fedloom.data.sources.by_client import ByClient, Client
from fedloom.discovery import optional
from fedloom.errors import InputError

GROUP = "examples"


class Hdf5(ByClient):
    """A file of all clients' examples, and optionally a file of their test examples.

    `y` names the label and `x` the features. You can leave out `x` if the label has only one other dataset beside it.
    """

    path: Path
    """The file with all clients' examples."""
    test: Path | None = None
    """The file with their test examples."""
    x: str | None = None
    """The name of the features. By default, the only one besides the label."""
    y: str = "label"
    """The name of the label."""

    def load(self, base: Path) -> Dataset:
        """Read the clients in the order of their names."""
        test = [] if self.test is None else [locate(base, self.test)]
        return self.assemble(partial(read, x=self.x, y=self.y), [locate(base, self.path)], test)


def read(file: Path, x: str | None, y: str) -> Iterator[Client]:
    """Yield the clients of a file with their examples."""
    h5py = import_h5py()
    damage = readable(f"The file {file} cannot be read as HDF5", errors=(OSError, RuntimeError, KeyError))
    with damage, h5py.File(file, "r") as opened:
        if GROUP not in opened:
            raise InputError(f"The file {file} has no group '{GROUP}' with clients: there is nothing to read.")
        for name, datasets in opened[GROUP].items():
            features = _features_name(x, y, list(datasets), f"Client '{name}' in {file}")
            yield name, datasets[features][()], datasets[y][()]


def import_h5py() -> Any:
    """Return the package h5py."""
    return optional("h5py", "HDF5 files need h5py", "hdf5")


def _features_name(x: str | None, y: str, known: Sequence[str], where: str) -> str:
    for name in (y, *([] if x is None else [x])):
        require(name, known, where, "dataset")
    others = [name for name in known if name != y]
    if x is None and len(others) != 1:
        raise InputError(f"{where} has {', '.join(others) or 'nothing'} besides '{y}': say which are the features (x).")
    return x or others[0]
