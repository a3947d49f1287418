"""Random models with random losses: all ways to compute them give what the plain torch loop gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings

from fedloom.task import Task
from fedloom.testing.comparison import Comparison
from fedloom.training.settings import Training
from tests.odd.grammar import Drawn, DrawnLoss, Sentence, losses, models, needs_two_rows, trainings
from tests.odd.harness import FEW_WAYS, federation, problems

PATIENT = {"suppress_health_check": [HealthCheck.too_slow], "print_blob": False}
QUICK = {**PATIENT, "phases": [Phase.generate]}  # the simplest task that fails takes minutes to find: `make slow` does
THOROUGH = {**PATIENT, "phases": [Phase.generate, Phase.shrink]}


def check(model: Sentence, loss: Sentence, training: dict[str, Any], ways: Sequence[str] = ()) -> None:
    # with batches of 5 no client has a last batch of one example, which batch normalisation refuses
    batch = 5 if needs_two_rows(model) else 4
    task = Task(Drawn, loss=DrawnLoss(loss), args={"model": model}, dtype="float64")
    settings = Training(**{"epochs": 2, "batch_size": batch, **training})
    comparison = Comparison(task, federation("features"), settings, evaluation_batch=6)
    try:
        _ = comparison.reference
    except RuntimeError:  # plain torch cannot train it either, such as a gradient that needs what was changed in place
        reject()
    assert problems(comparison, ways) == []


@pytest.mark.slow
@settings(max_examples=12, **QUICK)
@given(models, losses, trainings)
def test_a_dozen_random_tasks(model: Sentence, loss: Sentence, training: dict[str, Any]) -> None:
    check(model, loss, training, FEW_WAYS)


@pytest.mark.slow
@settings(max_examples=150, **THOROUGH)
@given(models, losses, trainings)
def test_many_random_tasks(model: Sentence, loss: Sentence, training: dict[str, Any]) -> None:
    check(model, loss, training)
