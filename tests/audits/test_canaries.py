"""The bound on the Gaussian mechanism, white box: all aggregates are seen, and canaries are random directions.

The mechanism is written out here: canaries send ten times the clip, are drawn with probability `rate`, clipped, summed,
and noise is added. `Bug` says what is wrong with it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from fedloom.audits.canaries import Canaries, evidence
from fedloom.audits.epsilon import estimate, lower_bound

DELTA, CLIP, LENGTH, SIZE, COUNT = 1e-5, 0.5, 5.0, 5000, 1000
CANARIES = Canaries.draw(COUNT, key=1)
DIRECTIONS = CANARIES.directions(np.arange(COUNT), SIZE)


@dataclass(frozen=True)
class Bug:
    noise: float = 1.0  # the noise as a multiple of what it should be
    clips_after_summing: bool = False


def released(canaries: Canaries, z: float, rate: float, rounds: int, seed: int, bug: Bug) -> np.ndarray:
    """What the mechanism releases, projected on the canaries: one row per round."""
    draw, rows = np.random.default_rng([seed, 2]), []
    for _ in range(rounds):
        taking_part = canaries.included & (draw.random(COUNT) < rate)
        length = LENGTH if bug.clips_after_summing else CLIP
        total = length * DIRECTIONS[taking_part].sum(axis=0)
        if bug.clips_after_summing:
            total *= min(1.0, COUNT * CLIP / np.linalg.norm(total))
        rows.append(canaries.project(total + bug.noise * z * CLIP * draw.normal(size=SIZE)))
    return np.stack(rows)


def bounds(z: float, rate: float = 1.0, rounds: int = 1, bug: Bug = Bug(), runs: int = 100) -> np.ndarray:
    found = []
    for seed in range(runs):
        coins = np.random.default_rng([seed, 1]).random(COUNT) < 0.5
        canaries = dataclasses.replace(CANARIES, included=coins)
        scores = evidence(released(canaries, z, rate, rounds, seed, bug), rate, np.full(rounds, CLIP))
        found.append(lower_bound(scores, coins, DELTA).epsilon)
    return np.array(found)


# ε at δ = 1e-5, by Google's dp-accounting (PLD)
WITH_Z_1, WITH_Z_2 = 4.3772, 1.9931
SAMPLED = 7.0466  # z = 1, 100 rounds, each client with probability 0.1
COUNTED_TWICE = 0.7180  # the same, if the accountant multiplies the probability by itself


@pytest.mark.slow
def test_the_bound_is_a_quarter_of_the_true_epsilon_and_stays_below_it() -> None:
    """1,000 canaries in one release with z = 1, whose ε at δ = 1e-5 is 4.38."""
    found = bounds(1.0)
    assert sum(found > WITH_Z_1) <= 10
    assert sum(found >= 0.25 * WITH_Z_1) >= 90


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    [Bug(noise=0.0), Bug(noise=0.25), Bug(clips_after_summing=True)],
    ids=["no noise", "noise for a quarter of the sensitivity", "clipping after the sum, of changes of 10 × the clip"],
)
def test_a_planted_bug_is_caught(bug: Bug) -> None:
    """With z = 2, the mechanism claims ε = 1.99."""
    assert sum(bounds(2.0, bug=bug) > WITH_Z_2) >= 90


@pytest.mark.slow
def test_sampling_is_audited_over_all_rounds_and_caught_if_it_is_counted_twice() -> None:
    found = bounds(1.0, rate=0.1, rounds=100)
    assert sum(found > SAMPLED) <= 10
    assert sum(found > COUNTED_TWICE) >= 90


def test_a_mechanism_without_a_bug_is_not_accused() -> None:
    assert sum(bounds(2.0, runs=5) > WITH_Z_2) == 0


def test_directions_have_length_one_and_differ() -> None:
    np.testing.assert_allclose(DIRECTIONS[:9] @ DIRECTIONS[:9].T, np.eye(9), atol=0.2)
    np.testing.assert_allclose(np.linalg.norm(DIRECTIONS, axis=1), 1.0)


def test_a_projection_finds_each_canary_in_what_was_released() -> None:
    along = CANARIES.project(7.0 * DIRECTIONS[4])
    np.testing.assert_allclose(along, 7.0 * DIRECTIONS @ DIRECTIONS[4], atol=1e-9)
    assert along[4] == pytest.approx(7.0)


def test_a_short_update_has_directions_without_zeros() -> None:
    np.testing.assert_allclose(np.abs(CANARIES.directions(np.arange(3), 8)), 8**-0.5)


def test_about_half_of_the_canaries_take_part_and_the_key_decides() -> None:
    again, other = Canaries.draw(COUNT, key=1), Canaries.draw(COUNT, key=2)
    assert 400 < CANARIES.included.sum() < 600
    assert (again.included == CANARIES.included).all()
    assert (other.included != CANARIES.included).any()
    assert (other.directions(np.arange(9), SIZE) != DIRECTIONS[:9]).any()


def test_without_sampling_the_evidence_ranks_canaries_by_their_sum() -> None:
    projections = np.random.default_rng(3).normal(size=(1, 50))
    ranked = evidence(projections, 1.0, np.ones(1))
    assert (np.argsort(ranked) == np.argsort(projections[0])).all()


def test_with_sampling_one_release_that_shows_a_canary_counts_more_than_many_that_hint_at_it() -> None:
    projections = np.random.default_rng(3).normal(size=(8, 50)) * 0.25
    projections[:, 0] = [1, *[0] * 7]
    projections[:, 1] = 1 / 8
    found = evidence(projections, 0.1, np.ones(8))
    assert found[0] > found[1]


def test_the_estimate_is_near_the_true_epsilon() -> None:
    coins = np.random.default_rng(5).random(COUNT) < 0.5
    canaries = dataclasses.replace(CANARIES, included=coins)
    along = released(canaries, 4.0, 1.0, 16, 5, Bug())  # as private as one release with z = 1
    assert estimate(along.sum(axis=0), coins, DELTA) == pytest.approx(WITH_Z_1, rel=0.5)
