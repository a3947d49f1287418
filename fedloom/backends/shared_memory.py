"""Share a federation's tensors with other processes, which map one file into memory and never copy the data."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedloom.backends import worker_messages
from fedloom.data.federation import Federation

MOST_NAMES = 100_000  # with more clients, workers name clients by their numbers


@dataclass(frozen=True)
class Handle:
    """A message whose tensors are in a file."""

    path: str
    pickle: bytes
    tensors: tuple[slice, ...]  # the bytes of each in the file


def for_workers(federation: Federation) -> Federation:
    """Return a federation as workers get it."""
    return replace(federation, names=None) if len(federation.names or ()) > MOST_NAMES else federation


def share(federation: Federation) -> Handle:
    """Write the tensors to memory that other processes can map. It is freed together with the handle."""
    pickled, *tensors = worker_messages.pack(for_workers(federation))
    needed = sum(tensor.nbytes + 64 for tensor in tensors)
    file, path = tempfile.mkstemp(prefix="fedloom-", suffix=".data", dir=_folder(needed))
    placed = []
    with os.fdopen(file, "wb") as out:
        for tensor in tensors:
            out.write(b"\0" * (-out.tell() % 64))
            placed.append(slice(out.tell(), out.tell() + tensor.nbytes))
            out.write(tensor)
    handle = Handle(path, pickled, tuple(placed))
    weakref.finalize(handle, Path(path).unlink, missing_ok=True)
    return handle


def attach(handle: Handle) -> Federation:
    """Map a shared federation into this process."""
    memory = np.memmap(handle.path, mode="c")  # copy-on-write: a write by mistake stays in the process that made it
    federation: Federation = worker_messages.unpack([handle.pickle, *(memory[place] for place in handle.tensors)])
    return federation


def _folder(needed: int) -> str | None:
    """Return the folder in memory if it has enough room; None means the folder for temporary files."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * needed:
        return str(memory)
    return None
