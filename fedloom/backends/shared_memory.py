"""Share a federation's tensors with other processes, which map one file into memory and never copy the data."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedloom.backends import worker_messages
from fedloom.data.federation import Federation

fcntl: Any = None
with contextlib.suppress(ImportError):  # not on Windows
    import fcntl

PREFIX, SUFFIX = "fedloom-data-", ".shared"
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
    sweep()
    file, path = _claimed_file(_folder(needed))
    placed = []
    out = os.fdopen(file, "wb")  # it stays open, because that holds the lock
    for tensor in tensors:
        out.write(b"\0" * (-out.tell() % 64))
        placed.append(slice(out.tell(), out.tell() + tensor.nbytes))
        out.write(tensor)
    out.flush()
    handle = Handle(path, pickled, tuple(placed))
    weakref.finalize(handle, _free, out, Path(path))
    return handle


def _free(file: BinaryIO, path: Path) -> None:
    path.unlink(missing_ok=True)
    file.close()


def _claimed_file(folder: str | None) -> tuple[int, str]:
    """Make a file that this process holds locked for as long as it lives, so that `sweep` leaves it alone."""
    while True:
        file, path = tempfile.mkstemp(prefix=PREFIX, suffix=SUFFIX, dir=folder)
        if fcntl is None:
            return file, path
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:  # not swept before it was locked
            return file, path
        os.close(file)


def sweep() -> None:
    """Delete the files of processes that were killed: nobody holds their locks."""
    folders = {tempfile.gettempdir(), "/dev/shm"} if fcntl is not None else ()
    for path in (path for folder in folders for path in Path(folder).glob(f"{PREFIX}*{SUFFIX}")):
        with contextlib.suppress(OSError), open(path, "rb") as file:  # another user's cannot be opened
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


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
