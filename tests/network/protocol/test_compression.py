"""Compression: the receiver decides how much comes out."""

from __future__ import annotations

import io

import pytest

from fedloom.network.protocol.compression import CompressionError, compressed, decompress_into, decompressed

DATA = bytes(range(256)) * 1000


def test_what_is_compressed_comes_back() -> None:
    packed = b"".join(compressed([DATA[:100], DATA[100:]]))
    assert len(packed) < len(DATA)
    pieces: list[bytes] = []
    receive = decompress_into(lambda piece: pieces.append(bytes(piece)))
    receive(packed[:50])
    receive(packed[50:])
    assert b"".join(pieces) == DATA
    assert decompressed(io.BytesIO(packed)).read(1000) == DATA[:1000]


def test_a_receiver_may_stop_and_nonsense_is_noticed() -> None:
    def stop(piece: bytes) -> None:
        raise OverflowError

    with pytest.raises(OverflowError):
        decompress_into(stop)(b"".join(compressed([DATA])))
    with pytest.raises(CompressionError):
        decompress_into(lambda piece: None)(b"nonsense")
