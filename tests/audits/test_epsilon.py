"""The bound and the estimate, as functions of scores and coins."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, norm

from fedloom.audits.epsilon import chance, estimate, lower_bound, refuted

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
