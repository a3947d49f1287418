"""HDF5 files by client, as TensorFlow Federated writes them: a dataset at `examples/<client>/<feature>`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.data.federation import Dataset
from fedloom.data.sources.base import locate
from fedloom.data.sources.by_client import ByClient, Examples
from fedloom.errors import InputError, nearest

GROUP = "examples"


class Hdf5(ByClient):
    """A file of all clients' examples, and perhaps one of their test examples.

    `y` is the name of the label; `x` that of the features, which may be left out where there are no others.
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
        """Clients in the order of their names."""
        test = [] if self.test is None else [locate(base, self.test)]
        return self.assemble(partial(read, x=self.x, y=self.y), [locate(base, self.path)], test)


def read(file: Path, x: str | None, y: str) -> Iterator[tuple[str, Examples]]:
    """The clients of a file with their examples."""
    h5py = library()
    try:
        with h5py.File(file, "r") as opened:
            if GROUP not in opened:
                raise InputError(f"The file {file} has no group '{GROUP}' with clients: there is nothing to read.")
            for client in opened[GROUP]:
                held = opened[GROUP][client]
                features = _name(x, y, list(held), f"Client '{client}' in {file}")
                yield client, (held[features][()], held[y][()])
    except InputError:
        raise
    except (OSError, RuntimeError, KeyError) as error:
        raise InputError(f"The file {file} cannot be read as HDF5 ({error}): fetch it again.") from None


def library() -> Any:
    """The package h5py, or a word about how to get it."""
    try:
        import h5py
    except ImportError as error:
        raise InputError("HDF5 files need h5py: pip install 'fedloom[hdf5]'.") from error
    return h5py


def _name(x: str | None, y: str, known: Sequence[str], where: str) -> str:
    """The name of the features."""
    for name in (y, *([] if x is None else [x])):
        if name not in known:
            raise InputError(f"{where} has no '{name}'. It has: {', '.join(known)}.{nearest(name, known)}")
    others = [name for name in known if name != y]
    if x is None and len(others) != 1:
        raise InputError(f"{where} has {', '.join(others) or 'nothing'} besides '{y}': say which are the features (x).")
    return x or others[0]
