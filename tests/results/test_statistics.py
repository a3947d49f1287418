"""What is said about differences between algorithms, against numbers computed elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedloom as fl
from fedloom.backends.serial import Serial
from fedloom.results.statistics import (
    LEVEL,
    Difference,
    difference,
    differences,
    in_words,
    seeds_for_a_rank_test,
    signed_rank,
    spread,
)
from tests.conftest import federation

SEEDS = range(1, 11)


def by_seed(values: Sequence[float]) -> dict[int, float]:
    return dict(enumerate(values, 1))


def test_the_interval_is_students() -> None:
    found = spread([0.91, 0.93, 0.95])
    assert found.mean == pytest.approx(0.93)
    assert found.std == pytest.approx(0.02)
    half = 4.302652729911275 * 0.02 / math.sqrt(3)  # t with 2 degrees of freedom, from a printed table
    assert (found.low, found.high) == (pytest.approx(0.93 - half), pytest.approx(0.93 + half))


def test_one_seed_has_no_interval_and_no_seed_has_nothing() -> None:
    assert spread([0.5]).count == 1
    assert math.isnan(spread([0.5]).std)
    assert not difference("a", "b", {1: 0.9}, {1: 0.1}).clear
    assert spread([]).count == spread([math.nan]).count == 0


def test_pairs_are_made_over_the_seeds_that_both_have() -> None:
    found = difference("a", "b", {1: 0.5, 2: 0.7, 3: 0.9}, {2: 0.6, 3: 0.7, 4: 0.0})
    assert found.spread.count == 2
    assert found.spread.mean == pytest.approx(0.15)
    assert found.wins == 2
    assert math.isnan(found.effect)  # two seeds


@given(st.lists(st.integers(-5, 5), min_size=6, max_size=8))
def test_the_signed_rank_test_counts_all_signs(gaps: list[int]) -> None:
    """Ties and zeros included: compared with every one of the 2^n assignments of signs."""
    from scipy.stats import rankdata

    nonzero = np.array([gap for gap in gaps if gap], dtype=float)
    if len(nonzero) < 2:
        assert signed_rank(np.array(gaps, dtype=float)) == 1.0
        return
    ranks = rankdata(abs(nonzero))
    middle = ranks.sum() / 2
    seen = abs(ranks[nonzero > 0].sum() - middle)
    signs = [
        abs(sum(r for r, s in zip(ranks, chosen, strict=True) if s) - middle)
        for chosen in product((0, 1), repeat=len(ranks))
    ]
    assert signed_rank(np.array(gaps, dtype=float)) == pytest.approx(np.mean([one >= seen - 1e-9 for one in signs]))


def test_intervals_and_p_values_are_corrected_for_all_pairs() -> None:
    """Compared with scipy's paired t test at a third of the level."""
    from scipy.stats import ttest_rel, wilcoxon

    draws = np.random.default_rng(1)
    shifts = {"a": 0.0, "b": 0.1, "c": 0.2}
    values = {name: by_seed((shift + draws.normal(0, 0.05, 10)).tolist()) for name, shift in shifts.items()}
    found = differences(values)
    assert [(d.first, d.second) for d in found] == [("a", "b"), ("a", "c"), ("b", "c")]
    for each in found:
        one, other = ([*values[name].values()] for name in (each.first, each.second))
        expected = ttest_rel(one, other)
        interval = expected.confidence_interval(1 - (1 - LEVEL) / 3)
        assert (each.spread.low, each.spread.high) == pytest.approx((interval.low, interval.high))
        assert each.p == pytest.approx(min(1.0, 3 * expected.pvalue))
        assert each.rank_p == pytest.approx(min(1.0, 3 * wilcoxon(one, other).pvalue))
        assert each.clear == (each.p <= 0.05)


@pytest.mark.parametrize("pairs", [1, 2, 3, 6, 21])
def test_a_rank_test_is_shown_only_where_it_can_decide(pairs: int) -> None:
    needed = seeds_for_a_rank_test(pairs)
    gaps = {seed: 0.1 + 0.001 * seed for seed in range(needed)}  # all on one side: the smallest p there is
    enough = difference("a", "b", gaps, dict.fromkeys(gaps, 0.0), pairs)
    assert enough.rank_p is not None
    assert enough.rank_p <= 0.05
    del gaps[0]
    assert pairs * signed_rank(np.array([*gaps.values()])) > 0.05
    assert difference("a", "b", gaps, dict.fromkeys(gaps, 0.0), pairs).rank_p is None


@pytest.mark.slow
@given(st.integers(2, 12), st.integers(1, 10), st.floats(0.01, 5.0))
def test_more_seeds_with_the_same_mean_and_spread_never_weaken_a_verdict(count: int, pairs: int, effect: float) -> None:
    def with_seeds(count: int) -> Difference:
        gaps = np.arange(count) - (count - 1) / 2
        gaps = effect + gaps / gaps.std(ddof=1)
        return difference("a", "b", by_seed(gaps.tolist()), dict.fromkeys(range(1, count + 1), 0.0), pairs)

    fewer, more = with_seeds(count), with_seeds(count + 1)
    assert more.clear >= fewer.clear
    assert more.spread.low >= fewer.spread.low - 1e-9


def test_a_rank_test_cannot_count_seeds_without_a_difference() -> None:
    gaps = dict(enumerate([0.0, 0.0, 0.0, 0.1, 0.2, 0.3, 0.4]))
    assert difference("a", "b", gaps, dict.fromkeys(gaps, 0.0)).rank_p is None


def test_equal_differences_in_all_seeds_are_no_evidence() -> None:
    same = difference("a", "b", dict.fromkeys(range(8), 0.6), dict.fromkeys(range(8), 0.5))
    assert not same.clear
    assert np.isnan([*same.interval, same.effect]).all()  # no width, which would look like certainty
    assert "in each of 8 seeds, which gives no interval" in in_words(same)
    rounded = difference("a", "b", {1: 0.8, 2: 0.83, 3: 0.79}, {1: 0.79, 2: 0.82, 3: 0.78})
    assert "a's accuracy was 1 point higher than b's in each of 3 seeds, which gives" in in_words(rounded)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 6, 10])
def test_intervals_hold_together_in_95_of_100_experiments(seeds: int) -> None:
    """10,000 experiments of three algorithms with normal results: coverage, and errors where nothing differs."""
    from scipy.stats import t

    draws = np.random.default_rng(seeds).normal(0, 1, (10_000, 3, seeds))
    gaps = np.stack([draws[:, one] - draws[:, other] for one, other in ((0, 1), (0, 2), (1, 2))], 1)
    mean, error = gaps.mean(2), gaps.std(2, ddof=1) / np.sqrt(seeds)
    outside = (abs(mean) > t.ppf(1 - (1 - LEVEL) / 6, seeds - 1) * error).any(1)
    for number in range(20):  # the same formula as in fedloom
        values = {name: by_seed(draws[number, place].tolist()) for place, name in enumerate("abc")}
        assert any(each.clear for each in differences(values)) == outside[number]
    assert outside.mean() <= 0.057


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9), st.lists(st.floats(-1, 1), min_size=2, max_size=9))
def test_no_sentence_says_no_difference_without_the_interval(one: list[float], other: list[float]) -> None:
    (found,) = differences({"a": by_seed(one), "b": by_seed(other)})
    sentence = in_words(found)
    assert "interval" in sentence
    assert f"{found.spread.count} seeds" in sentence
    assert ("clearly" in sentence) == found.clear
    assert ("p =" in sentence) == (found.spread.std > 0)


def test_sentences_say_which_side_is_better() -> None:
    gaps = {seed: 0.02 + 0.001 * seed for seed in SEEDS}
    (accuracy,) = differences({"a": gaps, "b": dict.fromkeys(SEEDS, 0.0)})
    assert "a is clearly better than b: its accuracy is 2.55 points higher" in in_words(accuracy)
    assert "a is clearly worse than b: its loss is 0.0255 higher" in in_words(
        accuracy, metric="loss", percent=False, higher_is_better=False
    )
    assert "says nothing about chance" in in_words(difference("a", "b", {1: 0.5}, {1: 0.4}))
    assert "no seed in common" in in_words(difference("a", "b", {1: 0.5}, {2: 0.4}))


@pytest.mark.slow
def test_fedavg_against_itself_is_flagged_in_about_one_of_twenty_sets_of_seeds() -> None:
    """200 disjoint sets of 6 + 6 seeds on a tiny problem: what chance alone does must not be called a difference."""
    data = federation([12, 9, 15, 10, 11], seed=1)
    task = fl.Task("logistic", args={"features": 16, "classes": 3})
    algorithm, sampling = fl.FedAvg(lr=0.3, batch_size=4), fl.Sampling(count=2)
    evaluation = fl.Evaluation(splits=(), server=("test",))
    backend = Serial(data, task)

    def loss(seed: int) -> float:
        (record,) = fl.fit(
            data, task, algorithm, 1, seed=seed, sampling=sampling, evaluation=evaluation, backend=backend
        )
        return record.server["test"].values(task)["loss"]

    losses = iter([loss(seed) for seed in range(200 * 12)])
    flagged = 0
    found: list[Difference] = []
    for _ in range(200):
        one, other = ({seed: next(losses) for seed in range(6)} for _ in range(2))
        found += differences({"fedavg": one, "again": other})
        flagged += found[-1].clear
    assert np.std([each.spread.mean for each in found]) > 0.001  # seeds do make a difference here
    assert 0 < flagged <= 18  # 5 % are 10; by chance alone, more than 18 happen in 1 of 150 such tests


def test_an_effect_size_needs_three_seeds() -> None:
    ours, theirs = {1: 0.5, 2: 0.6, 3: 0.9}, {1: 0.4, 2: 0.4, 3: 0.4}
    few = difference("one", "two", {seed: ours[seed] for seed in (1, 2)}, theirs)
    assert math.isnan(few.effect)
    assert "effect size" not in in_words(few)
    enough = difference("one", "two", ours, theirs)
    gaps = [0.1, 0.2, 0.5]
    assert enough.effect == pytest.approx(np.mean(gaps) / np.std(gaps, ddof=1))
    assert "effect size" in in_words(enough)
