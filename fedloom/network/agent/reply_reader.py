"""The body of a reply at the agent, taken in pieces of wanted lengths and never held as a whole unless it is small."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx

from fedloom.errors import StoreError
from fedloom.network.agent.connection import Unreachable
from fedloom.network.protocol.compression import PackingError, Readable, unpacked
from fedloom.network.protocol.tensors import CHUNK


class _Raw:
    """Bytes as they were sent."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._left = chunks, b""

    def read(self, size: int = -1, /) -> bytes:
        """Up to so many; none at the end."""
        piece = self._left or next(self._chunks, b"")
        self._left = piece[size:]
        return piece[:size]


class Reader:
    """A reply's bytes; what is compressed is unpacked only as far as it is read."""

    def __init__(self, response: httpx.Response) -> None:
        raw = _Raw(response.iter_raw())
        self._source: Readable = unpacked(raw) if response.headers.get("content-encoding") == "zstd" else raw

    def some(self, most: int) -> bytes:
        try:
            piece = self._source.read(most)
        except PackingError:
            raise Unreachable("The coordinator's message is not what zstd makes.") from None
        if not piece:
            raise Unreachable("The coordinator's message broke off.")
        return piece

    def take(self, size: int) -> bytes:
        pieces: list[bytes] = []
        while size > 0:
            pieces.append(self.some(min(size, CHUNK)))
            size -= len(pieces[-1])
        return b"".join(pieces)

    def into(self, path: Path, size: int, sha256: str) -> None:
        """The next bytes as a file, if they have this fingerprint."""
        temporary = path.with_name(f"{path.name}.part")
        digest = hashlib.sha256()
        try:
            file = open(temporary, "wb")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise _full(path, error) from error
        with file:
            while size > 0:
                piece = self.some(min(size, CHUNK))
                size -= len(piece)
                digest.update(piece)
                try:
                    file.write(piece)
                except OSError as error:  # not to be taken for a connection that broke
                    raise _full(path, error) from error
        if digest.hexdigest() != sha256:
            temporary.unlink()
            raise Unreachable("The coordinator's tensors were damaged on their way.")
        temporary.replace(path)


def _full(path: Path, error: OSError) -> StoreError:
    return StoreError(f"Tensors cannot be written to {path.parent}: {error}.")
