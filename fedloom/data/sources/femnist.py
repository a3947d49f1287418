"""FEMNIST: handwritten digits and letters by writer, in LEAF's JSON or in TensorFlow Federated's HDF5."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from fedloom.data.federation import Dataset
from fedloom.data.sources import hdf5, leaf
from fedloom.data.sources.base import Source, locate_or_cached
from fedloom.errors import InputError

CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
TRAIN, TEST = "fed_emnist_train.h5", "fed_emnist_test.h5"


class Femnist(Source):
    """Images of 28 × 28, dark on white, in 62 classes (Caldas et al. 2018); a client is a writer.

    `path` is a folder with LEAF's files or TensorFlow Federated's files, or one of LEAF's files. Separate test examples
    become the official test set, or with `join` they join the others.
    """

    path: Path | None = None
    """A folder with LEAF's or TensorFlow Federated's files, or one of LEAF's files. By default, what `fedloom data get
    femnist` downloaded.
    """
    join: bool = False
    """Add the test examples to the others instead of keeping them as the official test set."""

    def load(self, base: Path) -> Dataset:
        """Read the writers with their names."""
        path = locate_or_cached(base, self.path, "femnist")
        images = leaf.Leaf(path=path, shape=(1, 28, 28), classes=len(CLASSES), join=self.join)
        if (path / TRAIN).is_file():
            test = [path / TEST] if (path / TEST).is_file() else []
            loaded = images.assemble(partial(hdf5.read, x="pixels", y="label"), [path / TRAIN], test)
        elif path.suffix in (".h5", ".hdf5"):
            raise InputError(f"{path} is one file: set 'path' to the folder that has {TRAIN} and {TEST}.")
        else:
            loaded = images.assemble(leaf.read, *leaf.train_and_test(path))
        return replace(loaded, classes=CLASSES)
