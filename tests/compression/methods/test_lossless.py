"""Lossless compression brings back every bit, and less is sent of what hardly changed."""

from __future__ import annotations

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fedloom.compression.method import Damaged, Draws, form_of
from fedloom.compression.methods.lossless import Lossless, bits, from_bits

DRAWS = Draws(0, 0)
KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
KINDS += [torch.complex64]


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_arrives(kind: torch.dtype) -> None:
    leaf = (torch.randn(5, 3, generator=torch.Generator().manual_seed(8)) * 100).to(kind)
    leaves = {"w": leaf, "none": torch.empty(0, dtype=kind), "one": leaf[0, 0]}
    parts, _ = Lossless().pack({name: bits(one) for name, one in leaves.items()}, DRAWS, {})
    found = Lossless().unpack(parts, form_of(leaves), DRAWS)
    for name, one in leaves.items():
        assert torch.equal(from_bits(found[name], kind), one), name


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1))
def test_any_difference_of_bits_arrives(values: list[int]) -> None:
    whole = torch.tensor(values, dtype=torch.int32)
    parts, _ = Lossless().pack({"w": whole}, DRAWS, {})
    assert torch.equal(Lossless().unpack(parts, {"w": ((len(values),), torch.float32)}, DRAWS)["w"], whole)


def test_small_changes_take_less() -> None:
    start = torch.randn(100_000, generator=torch.Generator().manual_seed(9))
    moved = start + 1e-4 * torch.randn(100_000, generator=torch.Generator().manual_seed(10))
    parts, _ = Lossless().pack({"w": bits(moved) - bits(start)}, DRAWS, {})
    assert parts["bytes"].numel() < 0.75 * 400_000


@pytest.mark.parametrize("body", [b"", b"no zstd", zstandard.compress(b"x" * 39), zstandard.compress(b"x" * 10**8)])
def test_other_bytes_are_refused_before_they_fill_the_memory(body: bytes) -> None:
    parts = {
        "bytes": torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
    }
    with pytest.raises(Damaged):
        Lossless().unpack(parts, {"w": ((10,), torch.float32)}, DRAWS)
