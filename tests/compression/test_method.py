"""A change is one vector of real numbers and back, and only the expected parts are read."""

from __future__ import annotations

import pytest
import torch

from fedloom.compression.method import Damaged, count_of, form_of, leaves_of, take, vector

LEAVES = {
    "b": torch.tensor([1.0]),
    "c": torch.tensor([[1 + 2j, 3 - 1j]], dtype=torch.complex64),
    "half": torch.tensor([0.5, 2.0], dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
}


def test_leaves_become_a_vector_and_back() -> None:
    flat = vector(LEAVES)
    assert flat.tolist() == [1.0, 1.0, 2.0, 3.0, -1.0, 0.5, 2.0]
    assert flat.dtype == torch.float32
    assert count_of(form_of(LEAVES)) == 7
    found = leaves_of(flat, form_of(LEAVES))
    assert all(torch.equal(found[name], leaf) and found[name].dtype == leaf.dtype for name, leaf in LEAVES.items())
    assert vector({**LEAVES, "d": torch.ones(1, dtype=torch.float64)}).dtype == torch.float64


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"values": torch.ones(3), "more": torch.ones(1)},
        {"values": torch.ones(2)},
        {"values": torch.ones(3, 1)},
        {"values": torch.ones(3, dtype=torch.float64)},
    ],
)
def test_other_parts_are_refused(parts: dict[str, torch.Tensor]) -> None:
    with pytest.raises(Damaged):
        take(parts, values=(torch.float32, 3))
