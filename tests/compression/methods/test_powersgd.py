"""PowerSGD sends a low-rank matrix exactly, starts from what it had, and refuses ranks that no matrix has."""

from __future__ import annotations

import pytest
import torch

from fedloom.compression.method import Damaged, Draws, form_of
from fedloom.compression.methods.powersgd import PowerSGD
from fedloom.errors import InputError

DRAWS = Draws(3, 4)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_matrix_of_that_rank_arrives_whole() -> None:
    leaves = {
        "w": random(30, 2) @ random(2, 20, seed=1),
        "conv": (random(8, 2) @ random(2, 27, seed=2)).reshape(8, 3, 9),
    }
    parts, _ = PowerSGD(rank=2).pack(leaves, DRAWS, {})
    found = PowerSGD(rank=2).unpack(parts, form_of(leaves), DRAWS)
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-4, atol=1e-4)
    assert sum(part.numel() for part in parts.values()) == 2 * (30 + 20 + 8 + 27)


def test_it_comes_closer_from_what_it_kept() -> None:
    leaves, memory, errors = {"w": random(40, 30)}, {}, []
    for _ in range(4):
        parts, memory = PowerSGD(rank=3).pack(leaves, DRAWS, memory)
        errors.append(float((PowerSGD(rank=3).unpack(parts, form_of(leaves), DRAWS)["w"] - leaves["w"]).norm()))
    best = float(torch.linalg.svdvals(leaves["w"])[3:].norm())
    assert errors[0] > errors[1] > errors[3] > best * 0.999
    assert errors[3] < 1.05 * best


def test_vectors_and_small_matrices_are_sent_as_they_are() -> None:
    method = PowerSGD(rank=4)
    assert [method.takes(shape) for shape in [(100,), (), (10, 5), (100, 50), (16, 3, 3)]] == [
        False,
        False,
        False,
        True,
        True,
    ]


def test_a_rank_that_no_matrix_has_is_refused() -> None:
    form = form_of({"w": random(10, 7), "b": random(10)})
    PowerSGD(rank=7).check(form)
    with pytest.raises(InputError, match=r"'rank' of PowerSGD must be at most 7, .* Got 8 instead"):
        PowerSGD(rank=8).check(form)
    with pytest.raises(InputError, match="the model has none"):
        PowerSGD().check(form_of({"b": random(10)}))


def test_other_matrices_are_refused() -> None:
    leaves = {"w": random(30, 20)}
    parts, _ = PowerSGD().pack(leaves, DRAWS, {})
    for wrong in ({}, {**parts, "left/w": parts["left/w"][:, :1]}, {**parts, "right/w": parts["right/w"].double()}):
        with pytest.raises(Damaged):
            PowerSGD().unpack(wrong, form_of(leaves), DRAWS)
