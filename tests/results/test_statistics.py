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
from fedloom.results.statistics import Difference, difference, differences, holm, in_words, signed_rank, spread
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
    assert not difference("a", "b", {1: 0.9}, {1: 0.1}).excludes_zero
    assert spread([]).count == spread([math.nan]).count == 0


def test_pairs_are_made_over_the_seeds_that_both_have() -> None:
    found = difference("a", "b", {1: 0.5, 2: 0.7, 3: 0.9}, {2: 0.6, 3: 0.7, 4: 0.0})
    assert found.spread.count == 2
    assert found.spread.mean == pytest.approx(0.15)
    assert found.wins == 2
    assert found.effect == pytest.approx(0.15 / np.std([0.1, 0.2], ddof=1))


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


def test_p_values_come_from_six_seeds_on_and_are_corrected() -> None:
    values = {
        name: by_seed([0.5 + shift + 0.01 * seed for seed in SEEDS])
        for name, shift in (("a", 0.0), ("b", 0.1), ("c", 0.2))
    }
    values["b"][3] += 0.003
    values["c"][4] += 0.004
    found = differences(values)
    assert [(d.first, d.second) for d in found] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert all(d.p == pytest.approx(2 / 2**10) for d in found)  # all ten on one side
    assert all(d.corrected == pytest.approx(3 * 2 / 2**10) for d in found)
    assert all(d.clear for d in found)
    few = differences({name: {seed: one[seed] for seed in (1, 2, 3, 4, 5)} for name, one in values.items()})
    assert all(d.p is None and d.corrected is None and not d.clear for d in few)


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(p_values: list[float]) -> None:
    corrected = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, corrected, strict=True))
    ordered = [q for _, q in sorted(zip(p_values, corrected, strict=True))]
    assert ordered == sorted(ordered)
    if p_values:
        assert min(corrected) == pytest.approx(min(1.0, min(p_values) * len(p_values)))


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9), st.lists(st.floats(-1, 1), min_size=2, max_size=9))
def test_no_sentence_says_no_difference_without_the_interval(one: list[float], other: list[float]) -> None:
    (found,) = differences({"a": by_seed(one), "b": by_seed(other)})
    sentence = in_words(found)
    assert "interval" in sentence
    assert f"{found.spread.count} seeds" in sentence
    assert ("clearly" in sentence) == found.clear
    assert ("p =" in sentence) == (found.spread.count >= 6)


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
def test_fedavg_against_itself_is_flagged_in_at_most_one_of_twenty_sets_of_seeds() -> None:
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
    assert 0 < flagged <= 10
