"""What canaries tell about ε: a lower bound that holds with a stated confidence, and an estimate without one.

A canary is a made-up client. A coin decides whether it takes part in the audited run. Each canary has a score that
grows with the evidence that it did. Differential privacy limits how often you can guess the coins from the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import trapezoid
from scipy.optimize import brentq
from scipy.special import bdtrc, expit
from scipy.stats import norm

Floats = NDArray[np.float64]
Coins = NDArray[np.bool_]
GUESSED = (0.02, 0.06, 0.2, 0.6, 1.0)  # the shares of canaries to guess: chosen before anybody sees a score
PRECISION = 1e-6
LARGEST = 500.0  # an estimate beyond this is infinite


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
