"""Write files by client as LEAF and TensorFlow Federated do, and load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.data.build import federate
from fedloom.data.federation import Dataset
from fedloom.data.sources import source

ANN = {"x": [[0.5, 1.0], [0.25, 0.0]], "y": [3, 7]}


BOB = {"x": [[0.125, 0.75]], "y": [3]}


def leaf(**users: Any) -> str:
    return json.dumps(
        {"users": list(users), "num_samples": [len(held["y"]) for held in users.values()], "user_data": users}
    )


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def tff(path: Path, **users: dict[str, Any]) -> Path:
    """A file as TensorFlow Federated's `HDF5ClientData` reads it."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for user, features in users.items():
            for name, values in features.items():
                file.create_dataset(f"examples/{user}/{name}", data=values)
    return path


def load(name: str, path: Path, **fields: Any) -> Dataset:
    return source(name)(path=path, **fields).load(Path())


def held(data: Dataset) -> dict[str, tuple[Any, Any]]:
    federation = federate(data, split=(1, 0, 0))
    return {
        federation.name(c): (federation.x[rows].tolist(), federation.y[rows].tolist())
        for c in range(federation.clients)
        for rows in [federation.indices(c, "train")]
    }
