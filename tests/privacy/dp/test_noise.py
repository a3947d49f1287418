"""Noise and cohorts from a secret: the right distribution, repeated for the same purpose and for no other."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from fedloom.privacy.dp.noise import (
    cohort,
    derive,
    gaussian,
    noise_like,
    tree_increment,
    tree_nodes,
    tree_sensitivity,
    uniform,
)

KEY = derive(b"a secret", "test")


def test_the_noise_has_the_claimed_deviation_within_sampling_error() -> None:
    groups = {"model": {"w": torch.zeros(300, 1000), "b": torch.zeros(100_000, dtype=torch.float64)}}
    noise = noise_like(groups, 2.5, KEY)
    drawn = torch.cat([leaf.flatten() for leaf in noise["model"].values()]).numpy()
    count = len(drawn)
    assert abs(drawn.mean()) < 4 * 2.5 / count**0.5
    # the variance of the sample variance of a normal distribution is 2 σ⁴ / n
    assert abs(drawn.var() - 2.5**2) < 4 * (2 / count) ** 0.5 * 2.5**2


def test_the_noise_is_gaussian_in_its_tails_too() -> None:
    drawn = gaussian(KEY, 200_001)
    assert stats.kstest(drawn, "norm").pvalue > 0.001
    assert (np.abs(drawn) > 3).mean() == pytest.approx(0.0027, abs=0.0005)
    assert abs(np.corrcoef(drawn[:100_000], drawn[100_001:])[0, 1]) < 0.015


def test_leaves_and_groups_get_independent_noise() -> None:
    groups = {"a": {"w": torch.zeros(10_000)}, "b": {"w": torch.zeros(10_000)}}
    noise = noise_like(groups, 1.0, KEY)
    assert abs(torch.corrcoef(torch.stack([noise["a"]["w"], noise["b"]["w"]]))[0, 1]) < 0.05


def test_whole_numbers_get_no_noise() -> None:
    noise = noise_like({"model": {"w": torch.zeros(2), "counter": torch.tensor(3)}}, 1.0, KEY)
    assert noise["model"].keys() == {"w"}


def test_the_same_purpose_repeats_the_noise_and_any_other_does_not() -> None:
    groups = {"model": {"w": torch.zeros(4)}}
    secret = b"s" * 32
    purposes = [
        ("noise", 1, 0, "digest"),
        ("noise", 2, 0, "digest"),
        ("noise", 1, 1, "digest"),
        ("noise", 1, 0, "other"),
    ]
    found = [noise_like(groups, 1.0, derive(secret, *purpose))["model"]["w"] for purpose in purposes]
    again = noise_like(groups, 1.0, derive(secret, *purposes[0]))["model"]["w"]
    assert torch.equal(found[0], again)
    assert len({tuple(draw.tolist()) for draw in found}) == 4
    assert not torch.equal(found[0], noise_like(groups, 1.0, derive(b"t" * 32, *purposes[0]))["model"]["w"])


def test_uniform_numbers_stay_below_one() -> None:
    drawn = uniform(KEY, 100_000)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert stats.kstest(drawn, "uniform").pvalue > 0.001


def test_poisson_cohorts_draw_each_client_independently() -> None:
    sizes = [len(cohort(b"s", round, 1000, 0.1)) for round in range(1, 401)]
    assert np.mean(sizes) == pytest.approx(100, abs=4 * (90 / 400) ** 0.5)
    assert np.var(sizes) == pytest.approx(90, rel=0.3)
    assert len({cohort(b"s", round, 1000, 0.1) for round in range(1, 20)}) == 19


def test_fixed_cohorts_have_their_size_and_reach_everybody() -> None:
    drawn = [cohort(b"s", round, 20, 0.25, size=5) for round in range(1, 200)]
    assert {len(set(ids)) for ids in drawn} == {5}
    assert all(list(ids) == sorted(ids) for ids in drawn)
    counts = np.bincount([client for ids in drawn for client in ids], minlength=20)
    assert stats.chisquare(counts).pvalue > 0.001


def test_another_secret_draws_other_cohorts() -> None:
    assert cohort(b"s", 1, 1000, 0.1) == cohort(b"s", 1, 1000, 0.1) != cohort(b"t", 1, 1000, 0.1)


@pytest.mark.parametrize("rounds", range(1, 70))
def test_nodes_cover_the_first_rounds_once(rounds: int) -> None:
    covered = [round for level, number in tree_nodes(rounds) for round in range(number << level, (number + 1) << level)]
    assert sorted(covered) == list(range(rounds))
    assert len(tree_nodes(rounds)) <= rounds.bit_length()


@pytest.mark.parametrize(("rounds", "separation"), [(8, 1), (8, 2), (11, 3), (12, 4), (7, 7)])
def test_no_allowed_pattern_changes_the_nodes_by_more_than_the_sensitivity(rounds: int, separation: int) -> None:
    tree = {node for t in range(1, rounds + 1) for node in tree_nodes(t)}
    for count in range(1, -(-rounds // separation) + 1):
        worst = 0
        for pattern in combinations(range(rounds), count):
            if all(later - earlier >= separation for earlier, later in pairwise(pattern)):
                inside = [sum(t >> level == number for t in pattern) for level, number in tree]
                worst = max(worst, sum(one * one for one in inside))
        assert worst <= tree_sensitivity(rounds, separation, count) ** 2 + 1e-9


def test_one_participation_is_in_one_node_of_each_level() -> None:
    assert tree_sensitivity(8, 8, 1) == pytest.approx(4**0.5)


def test_the_sum_over_rounds_has_the_noise_of_its_nodes_only() -> None:
    count = 50_000
    like, secret = {"model": {"w": torch.zeros(count)}}, derive(b"s", "t")
    total = torch.zeros(count, dtype=torch.float64)
    for round in range(1, 9):
        total += tree_increment(secret, like, round, 2.0)["model"]["w"]
        wanted = 2.0 * len(tree_nodes(round)) ** 0.5
        assert float(total.std()) == pytest.approx(wanted, rel=4 / (2 * count) ** 0.5)
