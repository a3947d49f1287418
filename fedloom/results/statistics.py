"""Intervals and tests over seeds. The seed is the unit of analysis, because the clients of one run are not independent.

The intervals of all pairs hold together: each is a paired t interval at level 1 − 0.05 / pairs (Bonferroni). A
difference is called clear if its interval excludes zero. Wilcoxon's signed-rank test is shown beside it where it can
decide: with few seeds it cannot reach 5 %, whatever the numbers are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from fedloom.results.sentences import say
from fedloom.results.table import show

LEVEL = 0.95
FOR_EFFECTS = 3  # with fewer seeds, a standard deviation of differences is too coarse to divide by
EXACT = 12  # with up to this many seeds, the test tries all 2^n signs


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation and t interval over seeds; one seed has only a mean."""

    count: int
    mean: float
    std: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The t interval. It is not cut: that of a share may reach beyond 0 or 1."""
        return self.low, self.high


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
    if std < 1e-12 * float(np.abs(known).max()):
        std = 0.0  # equal numbers, apart from rounding
    reach = float(t.ppf((1 + level) / 2, len(known) - 1)) * std / math.sqrt(len(known))
    return Spread(len(known), mean, std, mean - reach, mean + reach)


@dataclass(frozen=True)
class Difference:
    """First minus second, over the seeds that both have, as one of several pairs."""

    first: str
    second: str
    spread: Spread  # its interval holds together with those of the other pairs
    wins: int  # the number of seeds in which the first is higher
    effect: float  # the mean difference in its standard deviations (Cohen's d_z); NaN with few seeds or no spread
    p: float | None = None  # of the paired t test, corrected for the number of pairs; None without a spread
    rank_p: float | None = None  # of the signed-rank test, corrected; None if it cannot decide with these seeds
    pairs: int = 1

    @property
    def clear(self) -> bool:
        """Whether this may be called a difference: the interval excludes zero, and seeds do differ."""
        return self.spread.std > 0 and (self.spread.low > 0 or self.spread.high < 0)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval, which is not cut: that of two shares may reach beyond 1, or 100 points.

        It is NaN if all seeds differ by the same amount: without a width, it would look like certainty.
        """
        return self.spread.interval if self.spread.std > 0 else (math.nan, math.nan)


def seeds_for_a_rank_test(pairs: int) -> int:
    """Return how many seeds the signed-rank test needs to reach 5 %, corrected for the number of pairs.

    >>> [seeds_for_a_rank_test(pairs) for pairs in (1, 3, 15)]
    [6, 7, 10]
    """
    return math.ceil(1 + math.log2(pairs / (1 - LEVEL)))


def difference(
    first: str, second: str, one: Mapping[int, float], other: Mapping[int, float], pairs: int = 1
) -> Difference:
    """The paired difference of two algorithms, from their values by seed, as one of several pairs."""
    from scipy.stats import t

    seeds = sorted(one.keys() & other.keys())
    gaps = np.array([one[seed] - other[seed] for seed in seeds], dtype=np.float64)
    gaps = gaps[np.isfinite(gaps)]
    found = spread(gaps.tolist(), 1 - (1 - LEVEL) / pairs)
    wins = int((gaps > 0).sum())
    if not found.std > 0:
        return Difference(first, second, found, wins, math.nan, pairs=pairs)
    effect = found.mean / found.std
    p = 2 * float(t.sf(abs(effect) * math.sqrt(found.count), found.count - 1))
    decides = np.count_nonzero(gaps) >= seeds_for_a_rank_test(pairs)  # the test leaves out seeds without a difference
    rank_p = min(1.0, pairs * signed_rank(gaps)) if decides else None
    shown = effect if found.count >= FOR_EFFECTS else math.nan
    return Difference(first, second, found, wins, shown, min(1.0, pairs * p), rank_p, pairs)


def signed_rank(gaps: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test: exact if there are few seeds, even with ties."""
    from scipy.stats import PermutationMethod, wilcoxon

    nonzero = gaps[gaps != 0]
    if len(nonzero) < 2:
        return 1.0
    method = PermutationMethod(n_resamples=2 ** len(nonzero) + 1) if len(nonzero) <= EXACT else "auto"
    return float(wilcoxon(nonzero, method=method).pvalue)


def differences(values: Mapping[str, Mapping[int, float]], baseline: str | None = None) -> list[Difference]:
    """All pairs, or those with a baseline, with intervals and p-values that are corrected for the number of pairs.

    >>> found = differences({"a": {1: 1.0}, "b": {1: 2.0}, "c": {1: 3.0}}, baseline="a")
    >>> [(each.first, each.second, each.pairs) for each in found]
    [('b', 'a', 2), ('c', 'a', 2)]
    """
    pairs = list(combinations(values, 2))
    if baseline is not None:
        pairs = [(label, baseline) for label in values if label != baseline]
    return [difference(one, other, values[one], values[other], len(pairs)) for one, other in pairs]


def in_words(
    difference: Difference,
    *,
    metric: str = "accuracy",
    percent: bool = True,
    higher_is_better: bool = True,
    one_split: bool = False,
) -> str:
    """One sentence about a difference. It never says "no difference" without the interval of possible differences.

    If all seeds have `one_split`, a difference is only said to be one on these test examples.
    """
    scale, unit = (100.0, " points") if percent else (1.0, "")
    found = difference.spread
    side = "higher" if found.mean > 0 else "lower"
    values: dict[str, object] = {"first": difference.first, "second": difference.second, "metric": metric, "side": side}
    if not found.count:
        return say("difference", "nothing_in_common", **values)
    gap = f"{abs(found.mean) * scale:.3g}"
    values["gap"] = f"{gap}{unit.rstrip('s') if gap == '1' else unit}"
    if found.count == 1:
        return say("difference", "one_seed", **values)
    if difference.p is None:
        return say("difference", "no_spread" if found.mean else "same", count=found.count, **values)
    together = " with the others" if difference.pairs > 1 else ""
    low, high = (show(side, "points" if percent else "difference") for side in difference.interval)
    values["span"] = f"95 % interval{together} {low} to {high}{unit}, {found.count} seeds"
    effect = "" if math.isnan(difference.effect) else f", effect size {difference.effect:.2g}".replace("-", "−")
    values["test"] = f"corrected p = {difference.p:.3g}{effect}"
    if difference.clear:
        better = "better" if (found.mean > 0) == higher_is_better else "worse"
        return say("difference", "clear_here" if one_split else "clear", better=better, **values)
    return say("difference", "not_clear", **values)
