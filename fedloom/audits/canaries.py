"""Canaries, and what they tell about ε: a lower bound that holds with a stated confidence, and an estimate without one.

A canary is a made-up client whose updates point in a random direction. A coin decides whether it takes part in the
audited run. Each canary has a score that grows with the evidence that it did. Differential privacy limits how often you
can guess the coins from the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import trapezoid
from scipy.optimize import brentq
from scipy.special import bdtrc, expit
from scipy.stats import norm

from fedloom import keys

Floats = NDArray[np.float64]
Coins = NDArray[np.bool_]
COORDINATES = 500  # of a direction; all others are zero, which saves memory and hides no better
NORMAL = 1.4826  # the standard deviation of normal numbers is this many times their median distance from the median
GUESSED = (0.02, 0.06, 0.2, 0.6, 1.0)  # the shares of canaries to guess: chosen before anybody sees a score
PRECISION = 1e-6
LARGEST = 500.0  # an estimate beyond this is infinite


@dataclass(frozen=True)
class Canaries:
    """The coins that decide which canaries take part, and the key of their directions."""

    included: Coins
    key: int

    @staticmethod
    def draw(count: int, key: int) -> Canaries:
        """Toss the coins."""
        return Canaries(keys.generator(keys.key(key, "coins")).random(count) < 0.5, key)

    def directions(self, numbers: NDArray[np.int64], size: int) -> Floats:
        """Return the directions of some canaries as rows of length 1, for updates with `size` numbers."""
        places, signs = _directions(len(self.included), size, self.key)
        rows = np.zeros((len(numbers), size))
        np.put_along_axis(rows, places[numbers], signs[numbers], axis=1)
        return rows

    def project(self, released: Floats) -> Floats:
        """Return how far what the server released goes into the direction of each canary."""
        places, signs = _directions(len(self.included), len(released), self.key)
        along: Floats = (released[places] * signs).sum(axis=1)
        return along


@lru_cache(maxsize=2)
def _directions(count: int, size: int, key: int) -> tuple[NDArray[np.int64], Floats]:
    """Draw the places where each direction is not zero, and its numbers there."""
    draw, width = keys.generator(keys.key(key, "directions")), min(size, COORDINATES)
    places = np.stack([draw.choice(size, width, replace=False, shuffle=False) for _ in range(count)])
    return places, draw.choice([-1.0, 1.0], places.shape) / np.sqrt(width)


def evidence(projections: Floats, rate: float, clips: Floats) -> Floats:
    """Return the logarithm of the likelihood ratio of each canary: it took part, against it did not.

    `projections` has a row for each release. An included canary adds its clip to a release with probability `rate`. The
    rest is noise, whose size is measured, so a mechanism with a bug is judged by the noise it has.
    """
    centre = np.median(projections, axis=1, keepdims=True)
    noise = NORMAL * np.median(np.abs(projections - centre), axis=1, keepdims=True).clip(min=1e-12)
    clip = clips[:, None]
    with_it = clip * (projections - clip / 2) / noise**2
    total: Floats = np.logaddexp(np.log1p(-rate) if rate < 1 else -np.inf, np.log(rate) + with_it).sum(axis=0)
    return total


@dataclass(frozen=True)
class LowerBound:
    """The largest ε that the guesses refute. With this confidence, the true ε is not smaller."""

    epsilon: float
    guesses: int
    correct: int
    confidence: float


def lower_bound(scores: Floats, included: Coins, delta: float, confidence: float = 0.95) -> LowerBound:
    """Bound ε from below by one run (Steinke, Nasr and Jagielski 2023).

    The canaries with the highest scores are guessed to be included, as many with the lowest ones to be left out, and
    the others are not guessed. Several numbers of guesses are tried, and the best one counts. Each gets an equal part
    of the error that the confidence allows, so the bound holds for all of them together.
    """
    order, canaries = np.argsort(scores, kind="stable"), len(scores)
    found = []
    for share in GUESSED:
        half = max(int(share * canaries) // 2, 1)
        correct = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
        epsilon = refuted(correct, 2 * half, canaries, delta, (1 - confidence) / len(GUESSED))
        found.append(LowerBound(epsilon, 2 * half, correct, confidence))
    return max(found, key=lambda bound: bound.epsilon)


def refuted(correct: int, guesses: int, canaries: int, delta: float, error: float) -> float:
    """Return the largest ε under which this many correct guesses have a probability below `error`."""

    def excess(epsilon: float) -> float:
        return chance(correct, guesses, canaries, epsilon, delta) - error

    if excess(0.0) >= 0:
        return 0.0
    above = 1.0
    while excess(above) < 0:
        above *= 2
    return float(brentq(excess, 0.0, above, xtol=PRECISION)) - PRECISION  # on the safe side of the root


def chance(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Bound the probability of at least this many correct guesses under (ε, δ)-differential privacy.

    Theorem 5.2 of the paper: with W binomial over the guesses, each correct with probability e^ε / (1 + e^ε), it is
    P[W ≥ correct] + 2 m δ max_i P[correct > W ≥ correct − i] / i for m canaries.
    """
    at_least = bdtrc(np.arange(correct - 1, -2, -1, dtype=np.float64), guesses, expit(epsilon))  # P[W ≥ correct − i]
    slope = ((at_least[1:] - at_least[0]) / np.arange(1, correct + 1)).max(initial=0.0)
    return float(min(at_least[0] + 2 * canaries * delta * slope, 1.0))


def estimate(scores: Floats, included: Coins, delta: float) -> float:
    """Estimate ε as that of two normal distributions, fitted to the scores of either side (Andrew et al. 2023).

    It is not a bound: it trusts that scores are normal, and it ignores how few canaries there are.
    """
    inside, outside = scores[included], scores[~included]
    here, there = (inside.mean(), inside.std(ddof=1)), (outside.mean(), outside.std(ddof=1))
    if min(here[1], there[1]) == 0:
        return 0.0 if here == there else math.inf
    return max(_normal_epsilon(*here, *there, delta), _normal_epsilon(*there, *here, delta))


def _normal_epsilon(mean: float, std: float, other_mean: float, other_std: float, delta: float) -> float:
    """Return the smallest ε with ∫ max(p − e^ε q, 0) ≤ δ, for normal densities p and q."""
    x = mean + std * np.linspace(-12, 12, 20_001)
    p = norm.pdf(x, mean, std)
    ratio = norm.logpdf(x, mean, std) - norm.logpdf(x, other_mean, other_std)

    def excess(epsilon: float) -> float:
        return float(trapezoid(p * -np.expm1(np.minimum(epsilon - ratio, 0.0)), x)) - delta

    if excess(0.0) <= 0:
        return 0.0
    return math.inf if excess(LARGEST) > 0 else float(brentq(excess, 0.0, LARGEST))
