"""The record of a round."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedloom import FedAvg, Task, tree
from fedloom.errors import TrainingError
from fedloom.experiment.round_rows import tabulate
from fedloom.federation.engine import fit
from fedloom.federation.round_record import public_numbers
from fedloom.results.headline import of_round
from tests.conftest import Dense, federation


def test_without_rounds_the_initial_model_is_evaluated_and_nothing_is_trained() -> None:
    data, task = federation((20, 30)), Task(Dense)
    (alone,) = fit(data, task, FedAvg(), 0)
    assert (alone.round, alone.cohort, alone.reports) == (0, (), ())
    assert tree.sha256(alone.state["model"]) == tree.sha256(task.initial())
    (trained,) = fit(data, task, FedAvg(), 1)
    assert alone.clients["final"] == trained.clients["pre_fit"]


def test_an_error_of_a_metric_names_the_round_and_the_client() -> None:
    def picky(outputs: np.ndarray, labels: np.ndarray) -> float:
        if len(labels) > 2:
            raise ValueError("too many")
        return 0.0

    task = Task(Dense, metrics=[picky])
    (record,) = fit(federation((10, 30)), task, FedAvg(), 1)
    for measure in (of_round, tabulate):
        with pytest.raises(TrainingError, match=r"^Round 1, client 'client-1': The metric 'picky' failed: ValueError"):
            measure(record, task)


def test_public_numbers_name_the_client_that_they_are_about() -> None:
    values = {"score": torch.tensor([[0.5, float("nan")], [0.25, 1.0]]), "size": torch.tensor([7.0, 9.0])}
    cohort = SimpleNamespace(public=values, publishers={"score": (3, 8), "size": (3, 8)})
    scores = [(3, "score", 3, 0.5), (8, "score", 3, 0.25), (8, "score", 8, 1.0)]
    assert public_numbers(cohort) == (*scores, (3, "size", 0, 7.0), (8, "size", 0, 9.0))  # type: ignore[arg-type]
