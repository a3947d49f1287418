"""Share a federation's arrays with other processes, which map one file into memory and never copy the data."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.data.federation import Federation

Array = np.ndarray[Any, Any]
MOST_NAMES = 100_000  # with more clients, workers name clients by their numbers


Rest = dict[str, Any]  # the fields of a federation that are not arrays


@dataclass(frozen=True)
class Handle:
    """Where the arrays are, and the rest of the federation."""

    path: str
    arrays: dict[str, tuple[int, str, tuple[int, ...]]]  # name → offset, dtype, shape
    rest: Rest


def dismantle(federation: Federation) -> tuple[dict[str, Array], Rest]:
    """Take a federation apart: its arrays by name, and the rest."""
    arrays = {"x": federation.x.numpy(), "y": federation.y.numpy(), "offsets": federation.offsets}
    for split, (x, y) in federation.server.items():
        arrays[f"server/{split}/x"], arrays[f"server/{split}/y"] = x.numpy(), y.numpy()
    rest = {name: getattr(federation, name) for name in ("split", "seed", "names", "classes", "scale")}
    return arrays, rest if len(rest["names"] or ()) <= MOST_NAMES else {**rest, "names": None}


def assemble(arrays: Mapping[str, Array], rest: Rest) -> Federation:
    """Build a federation from its parts. It uses the memory of the arrays."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name != "offsets"}
    held = sorted({name.split("/")[1] for name in arrays if name.startswith("server/")})
    server = {split: (tensors[f"server/{split}/x"], tensors[f"server/{split}/y"]) for split in held}
    return Federation(tensors["x"], tensors["y"], arrays["offsets"], server=server, **rest)


def share(federation: Federation) -> Handle:
    """Write the arrays to memory that other processes can map. It is freed together with the handle."""
    arrays, rest = dismantle(federation)
    needed = sum(array.nbytes + 64 for array in arrays.values())
    file, path = tempfile.mkstemp(prefix="fedloom-", suffix=".data", dir=_folder(needed))
    placed = {}
    with os.fdopen(file, "wb") as out:
        for name, array in arrays.items():
            out.write(b"\0" * (-out.tell() % 64))
            placed[name] = (out.tell(), array.dtype.str, array.shape)
            np.ascontiguousarray(array).tofile(out)
    handle = Handle(path, placed, rest)
    weakref.finalize(handle, Path(path).unlink, missing_ok=True)
    return handle


def attach(handle: Handle) -> Federation:
    """Map a shared federation into this process."""

    def array(offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
        if 0 in shape:
            return np.zeros(shape, dtype)
        # copy-on-write: a write by mistake stays in the process that made it
        return np.memmap(handle.path, dtype=dtype, mode="c", offset=offset, shape=shape).view(np.ndarray)

    return assemble({name: array(*where) for name, where in handle.arrays.items()}, handle.rest)


def _folder(needed: int) -> str | None:
    """Return the folder in memory if it has enough room; None means the folder for temporary files."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * needed:
        return str(memory)
    return None
