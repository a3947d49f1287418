"""A column of new rows in another unit than in training is told, and healthy columns are left in peace."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedloom.data.sources.csv import Csv
from fedloom.data.unit_of_rows import other_unit

Values = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Values]
MEASURED: dict[str, Draw] = {
    "size": lambda draw, rows: draw.gamma(4.0, 7.0, rows),
    "age": lambda draw, rows: draw.normal(60.0, 10.0, rows),
    "share": lambda draw, rows: draw.random(rows),
    "below 0": lambda draw, rows: -draw.gamma(4.0, 7.0, rows),
    "around 0": lambda draw, rows: draw.normal(0.0, 3.0, rows),
}
SKEWED: dict[str, Draw] = {
    "marker": lambda draw, rows: draw.lognormal(2.0, 1.5, rows),
    "wide marker": lambda draw, rows: draw.lognormal(0.0, 2.0, rows),
    "time": lambda draw, rows: draw.exponential(3.0, rows),
    "dose": lambda draw, rows: (draw.random(rows) < 0.1) * draw.lognormal(3.0, 1.0, rows),
    "count": lambda draw, rows: draw.poisson(0.2, rows).astype(float),
    "rare": lambda draw, rows: (draw.random(rows) < 0.003).astype(float),
    "often": lambda draw, rows: (draw.random(rows) < 0.5).astype(float),
    "change": lambda draw, rows: draw.standard_t(3, rows),
}


def said(values: Any, training: Values) -> list[str]:
    return [*other_unit("tsize", np.asarray(values, dtype=float), float(training.mean()), float(training.std()))]


def test_a_column_in_another_unit_is_told_with_both_means() -> None:
    """Only mean and standard deviation are known, and each value alone is possible."""
    values = np.array([1.2, 4.1, 2.5, 3.3, 5.0, 2.2, 1.9, 3.8, 2.4, 3.0, nan])
    (text,) = other_unit("tsize", values, 29.3, 14.0)
    assert text == (
        "tsize is about 10 times smaller in these rows than in training (2.94, trained on 29.3 ± 14): another unit?"
    )
    (text,) = other_unit("tsize", values * 100, 29.3, 14.0, "rows that are predicted")
    assert text.startswith("tsize is about 10 times larger in these rows that are predicted than in training (294, ")
    assert [*other_unit("tsize", values * 10, 29.3, 14.0)] == []
    assert [*other_unit("tsize", values[1:], 29.3, 14.0)] == []  # nine known values may be chance


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("factor", [0.001, 0.1, 1000.0])
def test_another_unit_is_told_whatever_the_distribution(name: str, factor: float) -> None:
    draw = np.random.default_rng(0)
    way = "smaller" if factor < 1 else "larger"
    for rows in (40, 200):
        for _ in range(20):
            (text,) = said(MEASURED[name](draw, rows) * factor, MEASURED[name](draw, 500))
            assert way in text


@pytest.mark.parametrize("name", [*MEASURED, *SKEWED])
def test_healthy_columns_are_left_in_peace(name: str) -> None:
    draw, column = np.random.default_rng(1), {**MEASURED, **SKEWED}[name]
    for rows in (1, 10, 20, 30, 100, 300):
        for _ in range(100):
            assert said(column(draw, rows), column(draw, 1000)) == []


def test_patients_who_differ_have_no_other_unit() -> None:
    """Nearly all of them have one node, or none has the finding: sizes differ, but not as a unit changes them."""
    assert [*other_unit("nodes", np.array([1.0] * 39 + [2.0]), 5.0, 5.5)] == []
    assert [*other_unit("finding", np.array([0.0] * 199 + [1.0]), 0.5, 0.5)] == []
    assert [*other_unit("young", np.linspace(8, 12, 30), 60.0, 15.0)] == []


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.0), (nan, nan), (3.0, float("inf"))])
def test_a_column_that_training_never_had_is_not_compared(mean: float, std: float) -> None:
    assert [*other_unit("tsize", np.arange(20.0), mean, std)] == []
    assert [*other_unit("tsize", np.full(20, 7.0), 700.0, 100.0)] == []  # nor one value everywhere


@pytest.mark.data
def test_real_hospitals_are_healthy_to_each_other(real: Path) -> None:
    source = Csv(path="heart_disease/heart_disease_4sites.csv", label="num", client="site", fill="mean")  # type: ignore[arg-type]
    patients = source.load(real)
    x, sites = patients.x.double().numpy(), np.asarray(patients.client)
    assert len(np.unique(sites)) == 4
    for site in np.unique(sites):
        for name, here, everywhere in zip(patients.features, x[sites == site].T, x.T, strict=True):
            assert [*other_unit(name, here, np.nanmean(everywhere), np.nanstd(everywhere))] == []
