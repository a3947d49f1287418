"""Write a federation's examples by client for other systems: LEAF's JSON, TensorFlow Federated's HDF5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from fedloom.data.federation import Federation
from fedloom.data.sources.hdf5 import GROUP, import_h5py
from fedloom.errors import InputError

Which = Literal["all", "train", "validation", "test"]
Clients = dict[str, tuple[NDArray[Any], NDArray[Any]]]  # name → features and labels


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
    clients: Clients = {}
    for client in range(federation.clients):
        rows = slice(*federation.offsets[client : client + 2]) if which == "all" else federation.indices(client, which)
        features = federation.x[rows]
        if not features.is_floating_point() and federation.scale != 1:
            features = features.float() * federation.scale
        clients[federation.name(client)] = features.numpy(), federation.y[rows].numpy()
    if path.suffix == ".json":
        _write_leaf(clients, path)
    else:
        _write_hdf5(clients, path, x, y)
    return sum(len(labels) for _, labels in clients.values())


def _write_hdf5(clients: Clients, path: Path, x: str, y: str) -> None:
    with import_h5py().File(path, "w") as file:
        for name, (features, labels) in clients.items():
            if "/" in name or name in ("", "."):
                raise InputError(f"The client '{name}' cannot be a group of an HDF5 file: its name must have no '/'.")
            group = file.create_group(f"{GROUP}/{name}")
            group.create_dataset(x, data=features)
            group.create_dataset(y, data=labels)


def _write_leaf(clients: Clients, path: Path) -> None:
    users = {name: {"x": x.reshape(len(x), -1).tolist(), "y": y.tolist()} for name, (x, y) in clients.items()}
    counts = [len(labels) for _, labels in clients.values()]
    content = {"users": list(users), "num_samples": counts, "user_data": users}
    path.write_text(json.dumps(content), encoding="utf-8")
