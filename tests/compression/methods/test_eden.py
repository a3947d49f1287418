"""EDEN is right on average, and its error at one bit is that of the paper."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.compression.methods import eden
from fedloom.compression.methods.eden import Eden


def arrived(values: torch.Tensor, key: int) -> torch.Tensor:
    return Eden().decode(Eden().encode(values, key), len(values), values.dtype, key)


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "sparse"])
def test_the_error_is_that_of_the_paper(kind: str) -> None:
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(4))
    if kind == "heavy tails":
        values = values**5
    elif kind == "sparse":
        values[torch.arange(len(values)) % 100 != 0] = 0
    error = float((arrived(values, 7) - values).square().sum() / values.square().sum())
    assert error == pytest.approx(math.pi / 2 - 1, rel=0.05)


def test_it_is_right_on_average() -> None:
    values, draws = torch.randn(4096, generator=torch.Generator().manual_seed(5)), 400
    mean = sum(arrived(values, key) for key in range(draws)) / draws
    # the error of a mean of independent estimates shrinks with their number, and bias would not
    error = float((mean - values).square().sum() / values.square().sum())
    assert error == pytest.approx((math.pi / 2 - 1) / draws, rel=0.2)


def test_two_numbers_alone_are_right_on_average() -> None:
    """One turn of signs and transform would always lose the smaller of the two."""
    values = torch.zeros(4096)
    values[5], values[900] = 1.0, 0.3
    mean = sum(arrived(values, key) for key in range(300)) / 300
    assert float(mean[5]) == pytest.approx(1.0, abs=0.06)
    assert float(mean[900]) == pytest.approx(0.3, abs=0.06)


def test_a_rotation_keeps_lengths_and_can_be_undone() -> None:
    blocks = torch.randn(3, eden.BLOCK, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    rotated = eden._rotate(blocks, 8)
    torch.testing.assert_close(rotated.norm(dim=1), blocks.norm(dim=1))
    torch.testing.assert_close(eden._rotate_back(rotated, 8), blocks)


def test_it_takes_a_bit_a_number() -> None:
    parts = Eden().encode(torch.ones(100_000), 1)
    assert sum(part.numel() * part.element_size() for part in parts.values()) == 25 * (512 + 4)


def test_zeros_stay_zeros() -> None:
    assert not arrived(torch.zeros(10), 1).any()
