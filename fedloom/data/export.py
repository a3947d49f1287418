"""Write a federation's examples by client for other systems: LEAF's JSON, TensorFlow Federated's HDF5."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedloom.data.federation import Federation
from fedloom.data.sources.hdf5 import GROUP, import_h5py
from fedloom.errors import InputError

Which = Literal["all", "train", "validation", "test"]


def export(federation: Federation, path: Path, which: Which = "all", x: str = "x", y: str = "label") -> int:
    """Write every client's examples, or one split of them, and return their number. The suffix gives the format.

    Features are what a model would see: integers are multiplied by their scale. `x` and `y` name features and labels in
    an HDF5 file.
    """
    if path.suffix not in (".h5", ".hdf5", ".json"):
        raise InputError(f"{path.name} must end in .h5 (TensorFlow Federated's HDF5) or .json (LEAF's JSON).")
    if x == y or not x or not y or "/" in x + y:
        raise InputError(f"Features and labels need two names without '/'. Got '{x}' and '{y}'.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        _write_leaf(federation, path, which)
    else:
        _write_hdf5(federation, path, which, x, y)
    return int(_sizes(federation, which).sum())


def _sizes(federation: Federation, which: Which) -> NDArray[np.int64]:
    return np.diff(federation.offsets) if which == "all" else federation.sizes(which)


def _clients(federation: Federation, which: Which) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Yield the name, features and labels of one client after the other: only one client's copy is in memory."""
    for client in range(federation.clients):
        rows = slice(*federation.offsets[client : client + 2]) if which == "all" else federation.indices(client, which)
        features = federation.x[rows]
        if not features.is_floating_point() and federation.scale != 1:
            features = features.float() * federation.scale
        yield federation.name(client), features.numpy(), federation.y[rows].numpy()


def _write_hdf5(federation: Federation, path: Path, which: Which, x: str, y: str) -> None:
    with import_h5py().File(path, "w") as file:
        for name, features, labels in _clients(federation, which):
            if "/" in name or name in ("", "."):
                raise InputError(f"The client '{name}' cannot be a group of an HDF5 file: its name must have no '/'.")
            group = file.create_group(f"{GROUP}/{name}")
            group.create_dataset(x, data=features)
            group.create_dataset(y, data=labels)


def _write_leaf(federation: Federation, path: Path, which: Which) -> None:
    names = [federation.name(client) for client in range(federation.clients)]
    start = json.dumps({"users": names, "num_samples": _sizes(federation, which).tolist(), "user_data": {}})
    with path.open("w", encoding="utf-8") as file:
        file.write(start.removesuffix("}}"))
        for number, (name, x, y) in enumerate(_clients(federation, which)):
            examples = {"x": x.reshape(len(x), -1).tolist(), "y": y.tolist()}
            file.write(f"{', ' if number else ''}{json.dumps(name)}: {json.dumps(examples)}")
        file.write("}}")
