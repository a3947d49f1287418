"""Statistics of values at clients, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.results.run_values import ClientValues, MetricInfo, RoundCosts, grouped

VALUES = ClientValues(np.array([1, 1, 3]), np.array([0, 2, 0]), np.array([0.5, 0.7, 0.9]), undefined=1)


def test_values_are_grouped_by_round_or_by_client() -> None:
    assert VALUES.by_round().index.tolist() == [1, 3]
    assert VALUES.by_round().mean.tolist() == pytest.approx([0.6, 0.9])
    assert VALUES.by_round().std.tolist() == pytest.approx([0.1, 0.0])  # of the population: these are all clients
    assert VALUES.by_client().low.tolist() == [0.5, 0.7]
    assert VALUES.by_client().high.tolist() == [0.9, 0.7]
    nothing = grouped(np.empty(0, np.int64), np.empty(0))
    assert len(nothing.index) == len(nothing.mean) == 0


def test_the_last_round_is_the_last_measured_one() -> None:
    last = VALUES.last_round()
    assert (last.rounds.tolist(), last.clients.tolist(), last.values.tolist()) == ([3], [0], [0.9])
    assert len(VALUES.keep(VALUES.rounds > 3).last_round()) == 0


def test_bytes_add_up_over_rounds() -> None:
    costs = RoundCosts(np.array([1, 2]), np.array([0.5, 0.5]), np.array([3, 4]), np.array([10, 20]), np.array([2, 2]))
    assert costs.bytes_so_far.tolist() == [13, 37]


def test_shares_are_shown_in_per_cent() -> None:
    assert (
        MetricInfo("accuracy", True, True).number_format == MetricInfo("top_5", True, True).number_format == "percent"
    )
    assert MetricInfo("loss", True, False).number_format == MetricInfo("loss", True, False).deviation_format == "number"


def test_a_metric_of_one_class_is_shown_with_the_name_of_the_class() -> None:
    assert MetricInfo("f1_of_0", False, True, "Benign").title == "f1_of_0 (Benign)"
    assert MetricInfo("f1_of_0", False, True, "Benign").capital_title == "F1 of 0 (Benign)"
    assert MetricInfo("f1", False, True, "Benign") == MetricInfo("f1", False, True)  # runs that are compared may differ


@given(st.lists(st.tuples(st.integers(-3, 6), st.floats(-1e3, 1e3)), max_size=40), st.booleans())
def test_groups_are_those_of_a_plain_loop_in_any_order(pairs: list[tuple[int, float]], in_order: bool) -> None:
    pairs = sorted(pairs) if in_order else pairs
    by_index: dict[int, list[float]] = {}
    for index, value in pairs:
        by_index.setdefault(index, []).append(value)
    found = grouped(np.array([one for one, _ in pairs], np.int64), np.array([value for _, value in pairs]))
    assert found.index.tolist() == sorted(by_index)
    for place, index in enumerate(sorted(by_index)):
        values = np.array(by_index[index])
        expected = (values.mean(), values.std(), values.min(), values.max())
        np.testing.assert_allclose(
            [found.mean[place], found.std[place], found.low[place], found.high[place]], expected, atol=1e-9
        )
