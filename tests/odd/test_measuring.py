"""Measuring a model gives what plain torch gives, and changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedloom import tree
from fedloom.algorithms.fedavg import FedAvg
from fedloom.backends.serial import Serial
from fedloom.data.federation import Federation
from fedloom.data.split import Split
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from fedloom.testing.plain_loop import evaluate
from fedloom.training.probe import probe
from tests.odd.nets.layers import batch_norm_without_running_statistics
from tests.odd.nets.shapes import StandardisesInEvaluation, SubtractsTheBatchMean
from tests.odd.nets.state import AssignsInEvaluation, CountsItsCalls, WritesInEvaluation
from tests.odd.nets.values import BranchesOnSum, ReadsNumpy
from tests.odd.table import CLASSES, FEATURES

LOOKING_ACROSS = [
    SubtractsTheBatchMean,
    StandardisesInEvaluation,
    batch_norm_without_running_statistics,
    BranchesOnSum,
    ReadsNumpy,
]


def crowd(clients: int) -> Federation:
    """Clients with six test examples each, of which several are measured in one pass."""
    draws = np.random.default_rng(3)
    y = draws.integers(0, CLASSES, 12 * clients)
    x = draws.normal(size=(12 * clients, FEATURES)) + y[:, None] + np.repeat(draws.normal(size=clients), 12)[:, None]
    offsets = np.arange(0, 12 * clients + 1, 12)
    split = Split(train=0.5, validation=0.0, test=0.5)
    return Federation(torch.from_numpy(x), torch.from_numpy(y), offsets, split=split, classes=("a", "b", "c"))


@pytest.mark.parametrize("clients", [3, 40])
@pytest.mark.parametrize("model", LOOKING_ACROSS, ids=lambda model: model.__name__)
def test_a_client_is_measured_on_its_own_examples_however_many_there_are(model: Any, clients: int) -> None:
    data, task = crowd(clients), Task(model, dtype="float64")
    (record,) = fit(data, task, FedAvg(lr=0.1, batch_size=3), 1)
    weights = task.initial()
    for client in range(clients):
        expected = evaluate(task, weights, data, client, "test")
        assert record.clients["pre_fit"][client]["test"].values(task) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("model", [WritesInEvaluation, AssignsInEvaluation, CountsItsCalls])
def test_what_is_learnt_does_not_depend_on_what_is_measured(model: Any) -> None:
    data = crowd(3)
    found = []
    for measured in (Evaluation(splits=()), Evaluation(splits=("test",)), Evaluation(splits=("train", "test"))):
        records = fit(data, Task(model, dtype="float64"), FedAvg(lr=0.1, batch_size=3), 2, evaluation=measured)
        found.append([tree.sha256(record.state["model"]) for record in records])
    assert found[0] == found[1] == found[2]


def test_a_split_in_several_batches_is_their_mean_by_rows() -> None:
    data, task = crowd(2), Task(SubtractsTheBatchMean, dtype="float64")
    setup = probe(data, task).setup(group=1, evaluation_batch=4)
    (record,) = fit(data, task, FedAvg(lr=0.1), 1, backend=Serial(data, task, setup))
    measured = record.clients["pre_fit"][0]["test"].values(task)
    weights = task.initial()
    assert measured == pytest.approx(evaluate(task, weights, data, 0, "test", 4), rel=1e-9)
    assert measured["loss"] != pytest.approx(evaluate(task, weights, data, 0, "test", 6)["loss"], rel=1e-3)
