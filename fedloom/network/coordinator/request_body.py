"""The body of an answer on its way in: decompressed and measured piece by piece, in memory or in a file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from fedloom.network.protocol.compression import CompressionError, decompress_into
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.tensors import ParcelContent, open_parcel, read_parcel

SMALL = 1 << 20  # bytes: up to this, a body stays in memory


class RequestBody:
    """Bytes that arrive in pieces; a large body goes to the file `path`."""

    def __init__(self, path: Path, limit: int, encoding: str = "") -> None:
        self.path, self.limit, self.size = path, limit, 0
        self._pieces: list[bytes] = []
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._receive = decompress_into(self._take) if encoding == "zstd" else self._take

    @property
    def in_memory(self) -> bool:
        return self._file is None

    def add(self, piece: bytes) -> None:
        """Add the next bytes, as they were sent. Raise `Rejected` as soon as there are too many."""
        try:
            self._receive(piece)
        except CompressionError:
            raise Rejected("malformed", "the body is not valid zstd data") from None

    def _take(self, piece: bytes) -> None:
        self.size += len(piece)
        if self.size > self.limit:
            raise Rejected("too-large", f"An answer may have {self.limit} bytes.")
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
        """Return the SHA-256 of the whole body."""
        if self._file is not None:
            self._file.close()
        else:
            self._pieces = [b"".join(self._pieces)]
            self._digest.update(self._pieces[0])
        return self._digest.hexdigest()

    def open(self) -> ParcelContent:
        """Read the body as a parcel."""
        return read_parcel(self._pieces[0]) if self.in_memory else open_parcel(self.path)

    def keep(self, path: Path) -> None:
        """Put the body into a file that stays."""
        if self.in_memory:
            path.write_bytes(self._pieces[0])
        else:
            self.path.replace(path)

    def discard(self) -> None:
        """Delete what has not been kept."""
        if self._file is not None:
            self._file.close()
            self.path.unlink(missing_ok=True)
