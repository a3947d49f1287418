"""Random-k draws one number of every run, is right on average, and commutes with sums if all clients draw alike."""

from __future__ import annotations

import torch

from fedloom.compression.method import Draws, form_of
from fedloom.compression.methods.randomk import RandomK

LEAVES = {"w": torch.randn(7, 9, generator=torch.Generator().manual_seed(1)), "b": torch.tensor([2.0])}


def arrived(method: RandomK, leaves: dict, draws: Draws) -> dict:
    return method.unpack(method.pack(leaves, draws, {})[0], form_of(leaves), draws)


def test_one_number_of_every_run_is_sent() -> None:
    found = arrived(RandomK(keep=0.1), LEAVES, Draws(5, 6))
    runs = [found["w"].flatten()[begin : begin + 9] for begin in range(0, 63, 9)]
    assert [int(run.count_nonzero()) for run in runs] == [1] * 7
    sent = found["w"] != 0
    assert torch.equal(found["w"][sent], LEAVES["w"][sent])
    assert float(found["b"]) == 2


def test_without_feedback_it_is_right_on_average() -> None:
    method, draws = RandomK(keep=0.1, error_feedback=False), 1500
    total = sum(arrived(method, LEAVES, Draws(key, 0))["w"] for key in range(draws))
    # a number is sent with probability 1/9, nine times as large: the deviation of a mean is |x| √(8 / draws)
    deviation = LEAVES["w"].abs() * (8 / draws) ** 0.5
    assert ((total / draws - LEAVES["w"]).abs() / deviation).max() < 4.5


def test_with_a_common_mask_the_sum_of_parts_is_the_part_of_the_sum() -> None:
    method = RandomK(keep=0.2, mask="round")
    other = {name: leaf * 3 + 1 for name, leaf in LEAVES.items()}
    first, second = (method.pack(leaves, Draws(own, 9), {})[0]["values"] for own, leaves in ((1, LEAVES), (2, other)))
    both = method.pack({name: LEAVES[name] + other[name] for name in LEAVES}, Draws(3, 9), {})[0]["values"]
    torch.testing.assert_close(first + second, both)
    assert method.commutes
    assert not method.scatters
    assert not RandomK().commutes
    assert RandomK().scatters
