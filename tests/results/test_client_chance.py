"""What guessing reaches, and how far chance takes a number on few test examples."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.results.client_chance import chance, standard_error


@pytest.mark.parametrize(
    ("metric", "counts", "expected"),
    [
        ("auroc_of_2", None, 0.5),
        ("c_index", None, 0.5),
        ("auroc_micro", None, None),  # its chance level depends on the classes
        ("accuracy", None, None),
        ("balanced_accuracy", [3.0, 3.0, 0.0, 3.0], 1 / 3),
        ("mae", [1.0, 1.0], None),
    ],
)
def test_what_guessing_reaches(metric: str, counts: list[float] | None, expected: float | None) -> None:
    assert chance(metric, None if counts is None else np.array(counts)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("positives", [5, 20])
def test_the_standard_error_of_auroc_is_that_of_random_scores(positives: int) -> None:
    from fedloom.score_metrics import auroc

    draws, truth = np.random.default_rng(0), np.arange(40) < positives
    found = np.std([auroc(draws.normal(size=40), truth) for _ in range(2000)])
    error = standard_error("auroc", 40, np.array([40.0 - positives, positives]), 0.5)
    assert error == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("metric", ["accuracy", "balanced_accuracy", "recall", "r2", "c_index"])
def test_more_test_examples_are_more_evidence(metric: str) -> None:
    few, many = (standard_error(metric, tested, None, 0.5) for tested in (10, 1000))
    assert few is not None
    assert many is not None
    assert few > 5 * many
    assert standard_error("rmse", 10, None, 0.5) is None
