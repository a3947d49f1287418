"""Parcels of tensors, whole, damaged and compressed."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.network.protocol.tensors import (
    KINDS,
    CompressionError,
    Parcel,
    WireError,
    compressed,
    decompress_into,
    decompressed,
    flatten,
    open_parcel,
    read_parcel,
    unflatten,
)

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=8)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    kind = draw(st.sampled_from(list(KINDS)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(kind)


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, tensors(), max_size=3), max_size=3))
@settings(max_examples=60)
def test_groups_come_out_of_a_parcel_as_they_went_in(groups: dict[str, dict[str, torch.Tensor]]) -> None:
    import tempfile

    parcel = Parcel({"about": "ü"}, flatten(groups))
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(parcel.whole)
        header, leaves = open_parcel(Path(file.name))
    in_memory, copies = read_parcel(parcel.whole)
    assert in_memory == header
    assert list(copies) == list(leaves)
    assert all(torch.equal(copies[name], leaf) and copies[name].dtype == leaf.dtype for name, leaf in leaves.items())
    found = unflatten(leaves)
    assert header == {"about": "ü"}
    assert len(parcel.whole) == parcel.size
    assert {g: list(t) for g, t in found.items()} == {g: list(t) for g, t in groups.items()}
    for group, leaves_in in groups.items():
        for name, leaf in leaves_in.items():
            assert found[group][name].dtype == leaf.dtype
            assert torch.equal(found[group][name], leaf)


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 400))
@settings(max_examples=300)
def test_a_damaged_parcel_raises_a_wire_error_or_can_be_read(junk: bytes, begin: int, length: int) -> None:
    import tempfile

    whole = Parcel({"ask": "a"}, {"0/update/model/w": torch.arange(6.0).reshape(1, 6)}).whole
    damaged = whole[:begin] + junk + whole[begin + length :]
    with contextlib.suppress(WireError):
        read_parcel(damaged)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(damaged)
        try:
            header, leaves = open_parcel(Path(file.name))
        except WireError:
            return
    assert isinstance(header, dict)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves.values())


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
