"""Half precision rounds as torch does."""

from __future__ import annotations

import pytest
import torch

from fedloom.compression.methods import METHODS


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_numbers_are_rounded_to_sixteen_bits(name: str) -> None:
    values, method = torch.randn(100, generator=torch.Generator().manual_seed(7)), METHODS[name]()
    parts = method.encode(values, 0)
    assert parts["numbers"].element_size() == 2
    assert torch.equal(method.decode(parts, 100, torch.float32, 0), values.to(getattr(torch, name)).float())
