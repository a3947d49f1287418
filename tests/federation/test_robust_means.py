"""A robust rule judges what each client changed, after clients with answers that are not finite have left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedloom.algorithm import Clients, Cohort, Groups, Task, Update
from fedloom.algorithms import FedAvg
from fedloom.backends.serial import Serial
from fedloom.errors import TrainingError
from fedloom.federation.client_state import ClientStates
from tests.conftest import Dense, federation


class Broken(FedAvg):
    """The second client answers with infinity."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, own = super().client(task, shared, own, data)
        for row, client in enumerate(data.ids):
            if client == 1:
                update.groups["model"]["out.bias"][row] = torch.inf
        return update, own


def cohort(algorithm: FedAvg) -> Cohort:
    data, task = federation((12, 9, 7, 11)), Task(Dense)
    return Cohort(Serial(data, task), algorithm, task, (0, 1, 2, 3), 4, 1, 0, ClientStates({}))


def test_a_client_whose_answer_is_not_finite_leaves_before_the_rule_judges() -> None:
    asked = cohort(Broken(lr=0.1, rule="median"))
    found = asked.algorithm.round({"model": asked.task.initial()}, asked)
    assert asked.ids == (0, 2, 3)
    assert asked.left_out == [1]
    assert asked.notes["not_finite"] == 1
    assert all(leaf.isfinite().all() for leaf in found["model"].values())


def test_a_rule_needs_to_know_what_is_a_position() -> None:
    asked = cohort(FedAvg(lr=0.1))
    shared = {"model": asked.task.initial()}
    answers = replace(asked.map(asked.algorithm.client, shared), positions=None)
    with pytest.raises(TrainingError, match="which groups of an update are positions"):
        asked.combine(answers, shared, lambda changes, *_: changes)
