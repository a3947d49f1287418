"""A federation's examples by client in files of other systems: LEAF's JSON, TensorFlow Federated's HDF5."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from fedloom.data.federation import Federation
from fedloom.data.sources import hdf5
from fedloom.errors import InputError

Part = Literal["all", "train", "validation", "test"]


def export(federation: Federation, path: Path, part: Part = "all", x: str = "x", y: str = "label") -> int:
    """Write every client's examples, or one split of them, in the form of the suffix of `path`; returns how many.

    Features are what a model would see: integers times their scale. `x` and `y` name them in an HDF5 file.
    """
    if path.suffix not in (".h5", ".hdf5", ".json"):
        raise InputError(f"{path.name} must end in .h5 (TensorFlow Federated's HDF5) or .json (LEAF's JSON).")
    if x == y or not x or not y or "/" in x + y:
        raise InputError(f"Features and labels need two names without '/'. Got '{x}' and '{y}'.")
    path.parent.mkdir(parents=True, exist_ok=True)
    clients = _clients(federation, part)
    return _leaf(clients, path) if path.suffix == ".json" else _hdf5(clients, path, x, y)


def _clients(federation: Federation, part: Part) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    scaled = not federation.x.is_floating_point() and federation.scale != 1
    for client in range(federation.clients):
        start, end = int(federation.offsets[client]), int(federation.offsets[client + 1])
        rows = slice(start, end) if part == "all" else federation.indices(client, part)
        x = federation.x[rows].float() * federation.scale if scaled else federation.x[rows]
        yield federation.name(client), x.numpy(), federation.y[rows].numpy()


def _hdf5(clients: Iterator[tuple[str, NDArray[Any], NDArray[Any]]], path: Path, x: str, y: str) -> int:
    total = 0
    with hdf5.library().File(path, "w") as file:
        for name, features, labels in clients:
            if "/" in name or name in ("", "."):
                raise InputError(f"The client '{name}' cannot be a group of an HDF5 file: its name must have no '/'.")
            held = file.create_group(f"{hdf5.GROUP}/{name}")
            held.create_dataset(x, data=features)
            held.create_dataset(y, data=labels)
            total += len(labels)
    return total


def _leaf(clients: Iterator[tuple[str, NDArray[Any], NDArray[Any]]], path: Path) -> int:
    held = {name: {"x": x.reshape(len(x), -1).tolist(), "y": y.tolist()} for name, x, y in clients}
    counts = [len(examples["y"]) for examples in held.values()]
    content = {"users": list(held), "num_samples": counts, "user_data": held}
    path.write_text(json.dumps(content), encoding="utf-8")
    return sum(counts)
