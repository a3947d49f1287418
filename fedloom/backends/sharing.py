"""A federation's arrays in one file that all processes map into memory: no worker ever copies the data."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data.federation import Federation
from fedloom.data.split import Split

MOST_NAMES = 100_000  # beyond this, workers call clients by their numbers


@dataclass(frozen=True)
class Handle:
    """Where the arrays are, and the small things beside them."""

    path: str
    arrays: dict[str, tuple[int, str, tuple[int, ...]]]  # name → offset, dtype, shape
    split: Split
    seed: int
    names: Sequence[str] | None
    classes: tuple[str, ...]
    scale: float


def share(federation: Federation) -> Handle:
    """Write the arrays to memory that other processes can map; it is given back when the handle is."""
    arrays = {"x": federation.x.numpy(), "y": federation.y.numpy(), "offsets": federation.offsets}
    for split, (x, y) in federation.server.items():
        arrays[f"server/{split}/x"], arrays[f"server/{split}/y"] = x.numpy(), y.numpy()
    needed = sum(array.nbytes + 64 for array in arrays.values())
    file, path = tempfile.mkstemp(prefix="fedloom-", suffix=".data", dir=_folder(needed))
    placed = {}
    with os.fdopen(file, "wb") as out:
        for name, array in arrays.items():
            out.write(b"\0" * (-out.tell() % 64))
            placed[name] = (out.tell(), array.dtype.str, array.shape)
            np.ascontiguousarray(array).tofile(out)
    names = federation.names if federation.names is not None and len(federation.names) <= MOST_NAMES else None
    handle = Handle(path, placed, federation.split, federation.seed, names, federation.classes, federation.scale)
    weakref.finalize(handle, Path(path).unlink, missing_ok=True)
    return handle


def attach(handle: Handle) -> Federation:
    """The federation again, in another process."""

    def array(name: str) -> np.ndarray[Any, Any]:
        offset, dtype, shape = handle.arrays[name]
        if 0 in shape:
            return np.zeros(shape, dtype)
        # copy-on-write: a stray write stays in the process that made it
        return np.memmap(handle.path, dtype=dtype, mode="c", offset=offset, shape=shape).view(np.ndarray)

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(array(name))

    held = sorted({name.split("/")[1] for name in handle.arrays if name.startswith("server/")})
    return Federation(
        tensor("x"),
        tensor("y"),
        array("offsets"),
        split=handle.split,
        seed=handle.seed,
        names=handle.names,
        classes=handle.classes,
        scale=handle.scale,
        server={split: (tensor(f"server/{split}/x"), tensor(f"server/{split}/y")) for split in held},
    )


def _folder(needed: int) -> str | None:
    """Memory itself where the system offers it as a folder with enough room; otherwise wherever temporary files go."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * needed:
        return str(memory)
    return None
