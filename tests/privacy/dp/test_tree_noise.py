"""Correlated noise: sums over rounds have the noise of a few nodes, and no pattern costs more than is accounted for."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch

from fedloom.privacy.dp.noise import derive
from fedloom.privacy.dp.tree_noise import increment, nodes, sensitivity


@pytest.mark.parametrize("rounds", range(1, 70))
def test_nodes_cover_the_first_rounds_once(rounds: int) -> None:
    covered = [round for level, number in nodes(rounds) for round in range(number << level, (number + 1) << level)]
    assert sorted(covered) == list(range(rounds))
    assert len(nodes(rounds)) <= rounds.bit_length()


@pytest.mark.parametrize(("rounds", "separation"), [(8, 1), (8, 2), (11, 3), (12, 4), (7, 7)])
def test_no_allowed_pattern_changes_the_nodes_by_more_than_the_sensitivity(rounds: int, separation: int) -> None:
    tree = {node for t in range(1, rounds + 1) for node in nodes(t)}
    for count in range(1, -(-rounds // separation) + 1):
        worst = 0
        for pattern in combinations(range(rounds), count):
            if all(later - earlier >= separation for earlier, later in pairwise(pattern)):
                inside = [sum(t >> level == number for t in pattern) for level, number in tree]
                worst = max(worst, sum(one * one for one in inside))
        assert worst <= sensitivity(rounds, separation, count) ** 2 + 1e-9


def test_one_participation_is_in_one_node_of_each_level() -> None:
    assert sensitivity(8, 8, 1) == pytest.approx(4**0.5)


def test_the_sum_over_rounds_has_the_noise_of_its_nodes_only() -> None:
    count = 50_000
    like, secret = {"model": {"w": torch.zeros(count)}}, derive(b"s", "t")
    total = torch.zeros(count, dtype=torch.float64)
    for round in range(1, 9):
        total += increment(secret, like, round, 2.0)["model"]["w"]
        wanted = 2.0 * len(nodes(round)) ** 0.5
        assert float(total.std()) == pytest.approx(wanted, rel=4 / (2 * count) ** 0.5)
