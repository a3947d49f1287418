"""The bound on the Gaussian mechanism, white box: all aggregates are seen, and canaries are random directions.

The mechanism is written out here: canaries send ten times the clip, are drawn with probability `rate`, clipped, summed,
and noise is added. `Bug` says what is wrong with it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, norm

from fedloom.audits.canaries import Canaries, chance, estimate, evidence, lower_bound, refuted

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


DELTA = 1e-5


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
def test_one_guess_is_right_with_the_probability_that_epsilon_allows(epsilon: float) -> None:
    assert chance(1, 1, 1, epsilon, 0.0) == pytest.approx(math.exp(epsilon) / (1 + math.exp(epsilon)))


@pytest.mark.parametrize("guesses", [1, 10, 600])
def test_guesses_that_are_all_right_refute_what_the_inverse_formula_says(guesses: int) -> None:
    accuracy = 0.01 ** (1 / guesses)
    expected = max(math.log(accuracy / (1 - accuracy)), 0.0)
    assert refuted(guesses, guesses, 1000, 0.0, 0.01) == pytest.approx(expected, abs=1e-5)


def test_as_many_right_as_wrong_guesses_refute_nothing() -> None:
    assert refuted(50, 100, 1000, DELTA, 0.01) == 0.0


@pytest.mark.parametrize("correct", [12, 15, 18, 20])
@pytest.mark.parametrize("epsilon", [0.1, 1.0])
@pytest.mark.parametrize("delta", [1e-5, 0.01])
def test_a_mechanism_that_uses_all_of_epsilon_and_delta_stays_within_the_chance(
    correct: int, epsilon: float, delta: float
) -> None:
    """It shows all coins with probability δ, and otherwise each one with the accuracy that ε allows."""
    honest = binom.sf(correct - 1, 20, 1 / (1 + math.exp(-epsilon)))
    assert delta + (1 - delta) * honest <= chance(correct, 20, 20, epsilon, delta)
    if correct == 20:
        assert delta + (1 - delta) * honest > chance(correct, 20, 20, epsilon, 0.0)


def randomised_response(epsilon: float, seed: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores whose signs tell each coin as well as ε allows: the bound can be no looser than its confidence."""
    draw = np.random.default_rng(seed)
    included = draw.random(1000) < 0.5
    true = draw.random(1000) < 1 / (1 + math.exp(-epsilon))
    return np.where(true == included, 1.0, -1.0) * draw.random(1000), included


@pytest.mark.slow
def test_the_bound_fails_no_more_often_than_its_confidence_says() -> None:
    bounds = [lower_bound(*randomised_response(1.0, seed), DELTA, 0.9).epsilon for seed in range(100)]
    careless = [lower_bound(*randomised_response(1.0, seed), DELTA, 0.01).epsilon for seed in range(100)]
    assert sum(bound > 1.0 for bound in bounds) <= 10
    assert sum(bound > 1.0 for bound in careless) > 20  # the mechanism is one that a wrong bound exceeds


def test_the_bound_grows_with_what_the_scores_tell_and_is_zero_for_noise() -> None:
    draw = np.random.default_rng(1)
    included, noise = draw.random(1000) < 0.5, draw.normal(size=1000)
    bounds = [lower_bound(noise + shift * included, included, DELTA).epsilon for shift in (0.0, 1.0, 2.0, 4.0)]
    assert bounds[0] == 0.0
    assert bounds == sorted(bounds)
    assert bounds[3] > 4.0


def test_a_bound_reports_its_guesses() -> None:
    included = np.arange(100) >= 40
    found = lower_bound(np.arange(100.0), included, 0.0, 0.95)
    assert (found.guesses, found.correct, found.confidence) == (60, 60, 0.95)
    assert found.epsilon == pytest.approx(refuted(60, 60, 100, 0.0, 0.01))


def exactly_normal(count: int, mean: float, std: float) -> NDArray[np.float64]:
    found = norm.ppf((np.arange(count) + 0.5) / count)
    return mean + std * (found - found.mean()) / found.std(ddof=1)


@pytest.mark.parametrize(("z", "epsilon"), [(1.0, 4.3772), (0.1, 91.817)])
def test_the_estimate_of_the_gaussian_mechanism_is_the_reference(z: float, epsilon: float) -> None:
    """One release with z = 0.1 is as private as a hundred with z = 1."""
    scores = np.concatenate([exactly_normal(500, 1.0, z), exactly_normal(500, 0.0, z)])
    assert estimate(scores, np.arange(1000) < 500, DELTA) == pytest.approx(epsilon, abs=1e-3)


def test_the_estimate_is_the_worse_of_the_two_directions() -> None:
    scores = np.concatenate([exactly_normal(500, 0.0, 1.5), exactly_normal(500, 0.0, 1.0)])
    wide = np.arange(1000) < 500
    assert estimate(scores, wide, DELTA) == estimate(scores, ~wide, DELTA) > 5


def test_scores_without_noise_have_no_finite_estimate_unless_they_are_all_equal() -> None:
    included = np.arange(10) < 5
    assert estimate(included.astype(float), included, DELTA) == math.inf
    assert estimate(np.ones(10), included, DELTA) == 0.0
    assert (
        estimate(
            np.concatenate([exactly_normal(500, 1e4, 1.0), exactly_normal(500, 0.0, 1.0)]), np.arange(1000) < 500, DELTA
        )
        == math.inf
    )
