"""Reads the body of a reply in pieces, so that the agent holds it as a whole only if it is small."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx

from fedloom.errors import StoreError
from fedloom.network.agent.connection import Unreachable
from fedloom.network.protocol.compression import CompressionError, Readable, decompressed
from fedloom.network.protocol.tensors import CHUNK


class _RawStream:
    """The bytes as they were sent."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._left = chunks, b""

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes; none at the end."""
        piece = self._left or next(self._chunks, b"")
        self._left = piece[size:]
        return piece[:size]


class ReplyReader:
    """The bytes of a reply. A compressed one is decompressed only as far as it is read."""

    def __init__(self, response: httpx.Response) -> None:
        raw = _RawStream(response.iter_raw())
        self._source: Readable = decompressed(raw) if response.headers.get("content-encoding") == "zstd" else raw

    def some(self, most: int) -> bytes:
        """Return between 1 and `most` bytes."""
        try:
            piece = self._source.read(most)
        except CompressionError:
            raise Unreachable("The coordinator's message is not valid zstd data.") from None
        if not piece:
            raise Unreachable("The coordinator's message ended too early.")
        return piece

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        pieces: list[bytes] = []
        while size > 0:
            pieces.append(self.some(min(size, CHUNK)))
            size -= len(pieces[-1])
        return b"".join(pieces)

    def into(self, path: Path, size: int, sha256: str) -> None:
        """Write the next `size` bytes to a file if they have this SHA-256."""
        temporary = path.with_name(f"{path.name}.part")
        digest = hashlib.sha256()
        try:
            file = open(temporary, "wb")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise _write_error(path, error) from error
        with file:
            while size > 0:
                piece = self.some(min(size, CHUNK))
                size -= len(piece)
                digest.update(piece)
                try:
                    file.write(piece)
                except OSError as error:  # must not pass for a broken connection
                    raise _write_error(path, error) from error
        if digest.hexdigest() != sha256:
            temporary.unlink()
            raise Unreachable("The coordinator's tensors were damaged on the way.")
        temporary.replace(path)


def _write_error(path: Path, error: OSError) -> StoreError:
    return StoreError(f"Tensors cannot be written to {path.parent}: {error}.")
