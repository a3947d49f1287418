"""Numbers computed from a curve (targets, peaks, last rounds) or from the clients of one round (fairness)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]


def monotone(values: ArrayLike, higher_is_better: bool = True) -> Numbers:
    """The best value so far, for each place of a curve.

    >>> monotone([0.1, 0.5, 0.3, 0.6]).tolist()
    [0.1, 0.5, 0.5, 0.6]
    """
    best: Any = np.fmax if higher_is_better else np.fmin  # which ignore rounds without a value
    return np.asarray(best.accumulate(np.asarray(values, dtype=np.float64)))


@dataclass(frozen=True)
class Reached:
    """When a curve reached a target."""

    round: int  # the first measured round at or beyond the target
    crossing: float  # where the line from the round measured before crosses the target


def reached(rounds: ArrayLike, values: ArrayLike, target: float, higher_is_better: bool = True) -> Reached | None:
    """The first round in which the best value so far is at or beyond the target; None if it never is.

    >>> reached([10, 20, 30], [0.5, 0.4, 0.9], target=0.7)
    Reached(round=30, crossing=25.0)
    """
    at, best = np.asarray(rounds), monotone(values, higher_is_better)
    there = np.flatnonzero(best >= target if higher_is_better else best <= target)
    if not len(there):
        return None
    place = int(there[0])
    if place == 0 or not np.isfinite(best[place - 1]):
        return Reached(int(at[place]), float(at[place]))
    share = (target - best[place - 1]) / (best[place] - best[place - 1])
    return Reached(int(at[place]), float(at[place - 1] + share * (at[place] - at[place - 1])))


def last_mean(values: ArrayLike, k: int) -> float:
    """The mean of the last k measured rounds, or of all if there are fewer."""
    known = np.asarray(values, dtype=np.float64)[-k:]
    return float(np.nanmean(known)) if np.isfinite(known).any() else float("nan")


def peak(rounds: ArrayLike, values: ArrayLike, higher_is_better: bool = True) -> tuple[float, int]:
    """The best value and the first round that had it: optimistic, because it is chosen on the data it is measured on.

    >>> peak([1, 2, 3], [0.1, 0.9, 0.9])
    (0.9, 2)
    """
    known = np.asarray(values, dtype=np.float64)
    if not np.isfinite(known).any():
        return float("nan"), 0
    place = int(np.nanargmax(known) if higher_is_better else np.nanargmin(known))
    return float(known[place]), int(np.asarray(rounds)[place])


@dataclass(frozen=True)
class Fairness:
    """How evenly clients fare."""

    worst: float  # the mean of the worst tenth of the clients, at least one
    std: float
    jain: float  # (Σx)² / (n Σx²): 1 when all are equal, 1/n when one has everything


def fairness(values: ArrayLike, higher_is_better: bool = True) -> Fairness:
    """The mean of the worst tenth, the standard deviation (the population's) and Jain's index of clients' values.

    >>> fairness([1.0, 1.0, 0.0, 0.0])
    Fairness(worst=0.0, std=0.5, jain=0.5)
    """
    known = np.asarray(values, dtype=np.float64)
    known = np.sort(known[np.isfinite(known)])
    if not len(known):
        return Fairness(float("nan"), float("nan"), float("nan"))
    tenth = max(1, round(len(known) / 10))
    worst = known[:tenth] if higher_is_better else known[-tenth:]
    squares = float((known**2).sum())
    jain = float(known.sum()) ** 2 / (len(known) * squares) if squares else 1.0
    return Fairness(float(worst.mean()), float(known.std()), jain)
