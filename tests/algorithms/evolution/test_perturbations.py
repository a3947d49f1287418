"""Directions, populations and ranks against their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.algorithms.evolution.perturbations import (
    around,
    centred_ranks,
    directions,
    natural_utilities,
    weighted_sum,
)


def test_a_direction_depends_on_the_seed_and_its_number_alone() -> None:
    few, many = directions(7, 2, 10, torch.float32).clone(), directions(7, 5, 10, torch.float32)
    assert torch.equal(few, many[:2])
    assert len({tuple(row) for row in many.tolist()}) == 5
    assert not torch.equal(many, directions(8, 5, 10, torch.float32))


def test_directions_are_standard_normal() -> None:
    drawn = directions(1, 50, 2000, torch.float64)
    assert abs(float(drawn.mean())) < 0.01
    assert float(drawn.var()) == pytest.approx(1, rel=0.02)


def test_a_population_is_around_its_centre() -> None:
    centre = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])}
    found = around(centre, torch.tensor([1.0, 10.0, 100.0]), torch.tensor([[1.0, 1.0, 1.0], [0.0, -1.0, 0.5]]))
    assert found["w"].tolist() == [[[2.0, 12.0]], [[1.0, -8.0]]]
    assert found["b"].tolist() == [[103.0], [53.0]]


def test_weighted_sums_are_sums() -> None:
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).double()
    weights = torch.arange(5.0).double()
    torch.testing.assert_close(weighted_sum(weights, rows), weights @ rows)


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=12))
def test_ranks_add_up_to_nothing_and_equals_are_equal(values: list[int]) -> None:
    fitness = torch.tensor(values, dtype=torch.float64)
    for utilities in (centred_ranks(fitness), natural_utilities(fitness)):
        assert abs(float(utilities.sum())) < 1e-9
        for a in range(len(values)):
            for b in range(len(values)):
                if values[a] == values[b]:
                    assert float(utilities[a]) == pytest.approx(float(utilities[b]))
                if values[a] > values[b]:
                    assert float(utilities[a]) >= float(utilities[b]) - 1e-12


def test_natural_utilities_are_those_of_the_paper() -> None:
    found = natural_utilities(torch.tensor([0.1, 0.4, 0.3, 0.2]))  # λ = 4, ranks 4, 1, 2, 3
    raw = [max(0.0, math.log(3) - math.log(rank)) for rank in (4, 1, 2, 3)]
    assert found.tolist() == pytest.approx([value / sum(raw) - 0.25 for value in raw])
