"""Numbers from curves, in small cases that you can check by hand."""

from __future__ import annotations

import math

import pytest

from fedloom.results import curve_numbers


def test_a_target_is_reached_in_the_first_round_at_or_beyond_it() -> None:
    assert curve_numbers.reached([1, 2], [0.1, 0.2], target=0.3) is None
    assert curve_numbers.reached([1, 2], [0.9, 0.2], target=0.3) == curve_numbers.Reached(1, 1.0)
    assert curve_numbers.reached([0, 4], [2.0, 1.0], target=1.25, higher_is_better=False) == curve_numbers.Reached(
        4, 3.0
    )


def test_rounds_without_a_value_do_not_count() -> None:
    found = curve_numbers.reached([1, 2, 3], [0.1, math.nan, 0.5], target=0.3)
    assert found is not None
    assert found.round == 3
    assert curve_numbers.monotone([2.0, math.nan, 1.0], higher_is_better=False).tolist() == [2.0, 2.0, 1.0]
    assert math.isnan(curve_numbers.last_mean([math.nan], 2))
    assert math.isnan(curve_numbers.peak([1], [math.nan])[0])


def test_the_last_rounds_and_the_peak() -> None:
    assert curve_numbers.last_mean([1.0, 2.0, 4.0], 2) == 3.0
    assert curve_numbers.last_mean([1.0, 2.0], 9) == 1.5
    assert curve_numbers.peak([1, 2, 3], [3.0, 1.0, 1.0], higher_is_better=False) == (1.0, 2)


def test_fairness_is_about_the_worst_tenth() -> None:
    assert curve_numbers.fairness([0.5] * 19 + [0.1, 0.3]).worst == pytest.approx(0.2)  # two of twenty-one
    assert curve_numbers.fairness([1.0, 2.0], higher_is_better=False).worst == 2.0
    assert curve_numbers.fairness([3.0] * 5).jain == pytest.approx(1.0)
    assert math.isnan(curve_numbers.fairness([math.nan]).worst)
