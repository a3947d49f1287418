"""QSGD rounds at random to a few values, and is right on average."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.compression.methods.qsgd import QSGD, packed, unpacked
from fedloom.errors import ParameterError

VALUES = torch.randn(37, generator=torch.Generator().manual_seed(2))


@given(st.integers(1, 8), st.data())
def test_bits_are_packed_without_gaps(bits: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=40))
    found = packed(np.array(values, np.uint8), bits)
    assert len(found) == -(-len(values) * bits // 8)
    assert unpacked(found, bits, len(values)).tolist() == values


def test_many_numbers_are_packed_in_pieces() -> None:
    values = np.random.default_rng(0).integers(0, 8, (1 << 21) + 5).astype(np.uint8)
    assert np.array_equal(unpacked(packed(values, 3), 3, len(values)), values)


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_numbers_are_rounded_to_a_neighbour_and_right_on_average(bits: int) -> None:
    method, draws = QSGD(bits=bits, bucket=16), 800
    found = torch.stack([method.decode(method.encode(VALUES, key), 37, torch.float32, key) for key in range(draws)])
    scale = torch.cat([torch.full((len(part),), float(part.abs().max())) for part in VALUES.split(16)])
    step = 2 * scale / (2**bits - 1)
    assert ((found - VALUES).abs() <= step * 1.0001).all()
    low = ((VALUES + scale) / step).floor()
    share = (VALUES + scale) / step - low  # with which it is rounded up
    deviation = step * (share * (1 - share) / draws).sqrt()
    assert ((found.mean(0) - VALUES).abs() <= 4.5 * deviation + 1e-5 * scale).all()


def test_zeros_stay_zeros() -> None:
    assert torch.equal(QSGD(bits=1).decode(QSGD(bits=1).encode(torch.zeros(5), 1), 5, torch.float32, 1), torch.zeros(5))


@pytest.mark.parametrize("bits", [0, 9, 2.5])
def test_bits_are_one_to_eight(bits: int) -> None:
    with pytest.raises(ParameterError, match="The 'bits' parameter of QSGD must be"):
        QSGD(bits=bits)
