"""Compression with zstd. The receiver decides how much it decompresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import zstandard

LEVEL = 1  # weights are nearly noise: higher levels take longer and gain nothing
WINDOW = 8 << 20  # bytes of memory that a received stream may request

CompressionError = zstandard.ZstdError


class Readable(Protocol):
    """Something that returns up to `size` bytes at a time."""

    def read(self, size: int = -1, /) -> bytes: ...


def compressed(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Compress a stream of bytes."""
    compressor = zstandard.ZstdCompressor(level=LEVEL).compressobj()
    for piece in pieces:
        if output := compressor.compress(piece):
            yield output
    yield compressor.flush()


def decompress_into(receive: Callable[[bytes], None]) -> Callable[[bytes], Any]:
    """Return a function that decompresses bytes and passes them on in small pieces, until `receive` raises."""

    class _Sink:
        def write(self, piece: bytes) -> int:
            receive(piece)
            return len(piece)

    sink: Any = _Sink()
    return zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_writer(sink, closefd=False).write


def decompressed(source: Readable) -> Readable:
    """Return a stream that decompresses no more than you read."""
    raw: Any = source
    return zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(
        raw, read_size=1 << 16, read_across_frames=True, closefd=False
    )
