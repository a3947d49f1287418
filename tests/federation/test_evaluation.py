"""Evaluation of clients and of the global model, as work for a backend."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedloom.algorithms import FedAvg, LocalOnly
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from tests.conftest import Dense, Logit, federation, last, two_classes
from tests.federation.helpers import LIGHT, SIZES, PersonalHead, by_hand, values, with_server_data


@pytest.mark.parametrize("examples", [7, 1000, 2345])
def test_the_new_global_model_is_measured_on_what_the_server_holds(examples: int) -> None:
    task, data = Task(Dense, dtype="float64"), with_server_data(examples)
    for record in fit(data, task, FedAvg(**LIGHT), 2):
        assert record.server["test"].count == examples
        held = replace(data, x=data.server["test"][0], y=data.server["test"][1])
        expected = by_hand(task, record.state["model"], held, torch.arange(examples))
        assert values(record.server, task) == pytest.approx(expected)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("sizes", [SIZES, (12, 1, 30)], ids=["all have some", "one has none"])
def test_the_global_model_may_be_measured_on_the_union_of_the_clients(split: Any, sizes: tuple[int, ...]) -> None:
    task, data = Task(Dense, dtype="float64"), federation(sizes)
    record = last(fit(data, task, FedAvg(**LIGHT), 2, evaluation=Evaluation(server=(split,))))
    expected = by_hand(task, record.state["model"], data, data.indices(data.everyone, split))
    assert values(record.server, task, split) == pytest.approx(expected)


def test_the_global_model_of_a_personal_algorithm_is_measured_without_a_client() -> None:
    task, data = Task(Dense, dtype="float64"), federation(SIZES)
    record = last(fit(data, task, PersonalHead(**LIGHT), 2, evaluation=Evaluation(server=("train",))))
    expected = by_hand(task, record.state["model"], data, data.indices(data.everyone, "train"))
    assert values(record.server, task, "train") == pytest.approx(expected)
    own = {**record.state["model"], **record.own[2]["head"]}
    assert values(record.clients["final"][2], task) == pytest.approx(by_hand(task, own, data, data.indices(2, "test")))


def test_without_a_global_model_the_server_measures_nothing() -> None:
    record = last(
        fit(with_server_data(7), Task(Dense), LocalOnly(**LIGHT), 1, evaluation=Evaluation(server=("train",)))
    )
    assert record.server == {}


def test_auroc_of_the_union_comes_from_all_scores() -> None:
    data = two_classes(federation((40, 25, 60)))
    task = Task(Logit, loss="bce", metrics=["auroc"])
    record = last(fit(data, task, FedAvg(**LIGHT), 2, evaluation=Evaluation(server=("test",))))
    rows = data.indices(data.everyone, "test")
    scores = torch.func.functional_call(task.build(), record.state["model"], (data.x[rows],)).detach()
    assert values(record.server, task)["auroc"] == pytest.approx(roc_auc_score(data.y[rows], scores))
    parts = [record.clients["final"][client]["test"] for client in range(3)]
    mean = np.mean([part.values(task)["auroc"] for part in parts])
    assert mean != pytest.approx(values(record.server, task)["auroc"], abs=1e-6)
