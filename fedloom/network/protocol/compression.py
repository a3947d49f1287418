"""Compression of what crosses the wire, with zstd. Whoever unpacks decides how much may come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import zstandard

LEVEL = 1  # weights are nearly noise: higher levels take longer and gain nothing
WINDOW = 8 << 20  # bytes of memory that a stranger's stream may ask for

PackingError = zstandard.ZstdError


class Readable(Protocol):
    """Something that gives up to so many bytes at a time."""

    def read(self, size: int = -1, /) -> bytes: ...


def packed(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """The same bytes, compressed."""
    packer = zstandard.ZstdCompressor(level=LEVEL).compressobj()
    for piece in pieces:
        if made := packer.compress(piece):
            yield made
    yield packer.flush()


def unpacking(take: Callable[[bytes], None]) -> Callable[[bytes], Any]:
    """A function that is given compressed bytes and hands out the others in small pieces, until `take` objects."""

    class _Sink:
        def write(self, piece: bytes) -> int:
            take(piece)
            return len(piece)

    sink: Any = _Sink()
    return zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_writer(sink, closefd=False).write


def unpacked(source: Readable) -> Readable:
    """A stream from which no more is unpacked than is read."""
    given: Any = source
    return zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(
        given, read_size=1 << 16, read_across_frames=True, closefd=False
    )
