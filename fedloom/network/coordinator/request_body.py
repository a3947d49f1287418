"""A body on its way in: decompressed and measured piece by piece; small ones stay in memory, large ones in a file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from fedloom.network.protocol.compression import unpacking
from fedloom.network.protocol.tensors import Opened, open_parcel, read_parcel

SMALL = 1 << 20  # bytes


class TooLarge(Exception):
    """A body has more bytes than it may have, perhaps only after it was decompressed."""


class Body:
    """Bytes that arrive in pieces; `path` is where they go when they are too many for memory."""

    def __init__(self, path: Path, limit: int, encoding: str = "") -> None:
        self.path, self.limit, self.size = path, limit, 0
        self._pieces: list[bytes] = []
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._unpack = unpacking(self._take) if encoding == "zstd" else None

    @property
    def in_memory(self) -> bool:
        return self._file is None

    def add(self, piece: bytes) -> None:
        """The next bytes, as they were sent."""
        if self._unpack is None:
            self._take(piece)
        else:
            self._unpack(piece)

    def _take(self, piece: bytes) -> None:
        self.size += len(piece)
        if self.size > self.limit:
            raise TooLarge
        if self._file is None and self.size > SMALL:
            self._file = open(self.path, "wb")  # noqa: SIM115 (closed by finish or discard)
            for earlier in self._pieces:
                self._write(earlier)
            self._pieces = []
        if self._file is None:
            self._pieces.append(bytes(piece))
        else:
            self._write(piece)

    def _write(self, piece: bytes) -> None:
        assert self._file is not None
        self._digest.update(piece)
        self._file.write(piece)

    def finish(self) -> str:
        """No more bytes will come: their SHA-256."""
        if self._file is not None:
            self._file.close()
        else:
            self._pieces = [b"".join(self._pieces)]
            self._digest.update(self._pieces[0])
        return self._digest.hexdigest()

    def open(self) -> Opened:
        """The parcel that it is, if it is one."""
        return read_parcel(self._pieces[0]) if self.in_memory else open_parcel(self.path)

    def keep(self, path: Path) -> None:
        """Put it into a file that stays."""
        if self.in_memory:
            path.write_bytes(self._pieces[0])
        else:
            self.path.replace(path)

    def discard(self) -> None:
        """Whatever has not been kept is gone."""
        if self._file is not None:
            self._file.close()
            self.path.unlink(missing_ok=True)
