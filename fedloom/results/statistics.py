"""Intervals and tests over seeds. The seed is the unit of analysis, because the clients of one run are not independent.

A difference is called clear only if there are at least six seeds, its interval excludes zero, and its p-value,
corrected for the number of comparisons, is at most 5 %. With fewer seeds there is an interval and no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from fedloom.results.sentences import say

LEVEL = 0.95
SEEDS_FOR_A_TEST = 6  # with five, the smallest p-value of a two-sided signed-rank test is 6.25 %
EXACT = 12  # with up to this many seeds, the test tries all 2^n signs


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation and t interval over seeds; one seed has only a mean."""

    count: int
    mean: float
    std: float = math.nan
    low: float = math.nan
    high: float = math.nan

    def interval(self, *, share: bool) -> tuple[float, float]:
        """The t interval, cut to what is possible: a share is between 0 and 1."""
        return (max(self.low, 0.0), min(self.high, 1.0)) if share else (self.low, self.high)


def known_mean(values: Sequence[float]) -> float | None:
    """The mean of the values that are not NaN, or None if there are none.

    >>> known_mean([1.0, math.nan, 3.0]), known_mean([math.nan])
    (2.0, None)
    """
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else None


def spread(values: Sequence[float], level: float = LEVEL) -> Spread:
    """Mean, sample standard deviation and t interval.

    >>> found = spread([1.0, 2.0, 3.0])
    >>> found.mean, found.std, round(found.low, 3), round(found.high, 3)
    (2.0, 1.0, -0.484, 4.484)
    """
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not len(known):
        return Spread(0, math.nan)
    mean = float(known.mean())
    if len(known) == 1:
        return Spread(1, mean)
    from scipy.stats import t

    std = float(known.std(ddof=1))
    reach = float(t.ppf((1 + level) / 2, len(known) - 1)) * std / math.sqrt(len(known))
    return Spread(len(known), mean, std, mean - reach, mean + reach)


@dataclass(frozen=True)
class Difference:
    """First minus second, over the seeds that both have."""

    first: str
    second: str
    spread: Spread
    wins: int  # the number of seeds in which the first is higher
    effect: float  # the mean difference in standard deviations of the difference (Cohen's d_z)
    p: float | None = None  # of Wilcoxon's signed-rank test; None with fewer than six seeds
    corrected: float | None = None  # p after Holm's correction for the number of comparisons

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval is on one side of zero."""
        return self.spread.low > 0 or self.spread.high < 0

    @property
    def clear(self) -> bool:
        """Whether this may be called a difference: the interval excludes zero, and the corrected p is at most 5 %."""
        return self.excludes_zero and self.corrected is not None and self.corrected <= 1 - LEVEL


def difference(first: str, second: str, one: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """The paired difference of two algorithms, from their values by seed."""
    seeds = sorted(one.keys() & other.keys())
    gaps = np.array([one[seed] - other[seed] for seed in seeds], dtype=np.float64)
    gaps = gaps[np.isfinite(gaps)]
    found = spread(gaps.tolist())
    if found.std > 0:
        effect = found.mean / found.std
    else:
        effect = math.copysign(math.inf, found.mean) if found.count > 1 and found.mean else 0.0
    p = signed_rank(gaps) if len(gaps) >= SEEDS_FOR_A_TEST else None
    return Difference(first, second, found, int((gaps > 0).sum()), effect if found.count > 1 else math.nan, p)


def signed_rank(gaps: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test: exact if there are few seeds, also with ties."""
    from scipy.stats import PermutationMethod, wilcoxon

    nonzero = gaps[gaps != 0]
    if len(nonzero) < 2:
        return 1.0
    method = PermutationMethod(n_resamples=2 ** len(nonzero) + 1) if len(nonzero) <= EXACT else "auto"
    return float(wilcoxon(nonzero, method=method).pvalue)


def differences(values: Mapping[str, Mapping[int, float]]) -> list[Difference]:
    """All pairs, with p-values corrected for the number of pairs."""
    found = [difference(one, other, values[one], values[other]) for one, other in combinations(values, 2)]
    corrected = iter(holm([each.p for each in found if each.p is not None]))
    return [replace(each, corrected=next(corrected)) if each.p is not None else each for each in found]


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values after Holm's step-down correction.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, p_values[place] * (len(p_values) - rank)))
        corrected[place] = largest
    return corrected


def in_words(
    difference: Difference, *, metric: str = "accuracy", percent: bool = True, higher_is_better: bool = True
) -> str:
    """One sentence about a difference. It never says "no difference" without the interval of possible differences."""
    scale, unit = (100.0, " points") if percent else (1.0, "")
    found = difference.spread
    side = "higher" if found.mean > 0 else "lower"
    values: dict[str, object] = {"first": difference.first, "second": difference.second, "metric": metric, "side": side}
    if not found.count:
        return say("difference", "nothing_in_common", **values)
    values["gap"] = f"{abs(found.mean) * scale:.3g}{unit}"
    if found.count == 1:
        return say("difference", "one_seed", **values)
    values["span"] = f"95 % interval {found.low * scale:+.3g} to {found.high * scale:+.3g}{unit}, {found.count} seeds"
    if difference.p is None:
        inside = "excludes" if difference.excludes_zero else "includes"
        return say("difference", "not_tested", inside=inside, needed=SEEDS_FOR_A_TEST, **values)
    values["test"] = f"corrected p = {difference.corrected:.3g}, effect size {difference.effect:.2g}"
    if difference.clear:
        better = "better" if (found.mean > 0) == higher_is_better else "worse"
        return say("difference", "clear", better=better, **values)
    return say("difference", "not_clear", **values)
