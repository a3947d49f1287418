"""Training on all data in one place, and training alone."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from fedloom import tree
from fedloom.algorithms import FedAvg, LocalOnly, Pooled
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from tests.algorithms.linear import LR, RANGES, START, X, Y, descend, linear_task, two_clients
from tests.conftest import Dense, facts, federation, last

QUIET = Evaluation(splits=())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_plain_descent_on_everything_for_rounds_times_epochs(momentum: float) -> None:
    algorithm = Pooled(lr=0.01, batch_size="full", epochs=2, momentum=momentum)
    record = last(fit(two_clients(), linear_task(), algorithm, 3, evaluation=QUIET))
    inputs, w, velocity = np.column_stack([X, np.ones(5)]), START, np.zeros(3)
    for _ in range(3 * 2):
        velocity = momentum * velocity + 2 * inputs.T @ (inputs @ w - Y) / 5
        w = w - 0.01 * velocity
    np.testing.assert_allclose(record.state["model"]["weight"].numpy().ravel(), w[:2], rtol=1e-13)
    np.testing.assert_allclose(record.state["model"]["bias"].item(), w[2], rtol=1e-13)


def test_it_uses_training_splits_only() -> None:
    task, data = Task(Dense), federation((12, 30))
    other = replace(data, x=data.x.clone())
    held_out = torch.cat([data.indices(data.everyone, split) for split in ("validation", "test")])
    other.x[held_out] = 99.0
    one, two = (last(fit(d, task, Pooled(batch_size=8), 2, evaluation=QUIET)) for d in (data, other))
    assert tree.sha256(one.state["model"]) == tree.sha256(two.state["model"])


def test_it_does_not_depend_on_the_cohort() -> None:
    task, data = Task(Dense), federation((12, 30))
    one = last(fit(data, task, Pooled(batch_size=8), 2, sampling=Sampling(count=1), evaluation=QUIET))
    assert facts(one) == facts(last(fit(data, task, Pooled(batch_size=8), 2, evaluation=QUIET)))


def test_it_has_one_optimizer_throughout_and_is_not_federated() -> None:
    assert Pooled(optimizer="adam").train.optimizer_state == "keep"
    assert Pooled.pooled
    assert not FedAvg.pooled
    assert not LocalOnly.pooled


def test_every_client_descends_on_its_own_data() -> None:
    record = last(fit(two_clients(), linear_task(), LocalOnly(lr=LR, batch_size="full"), 3, evaluation=QUIET))
    assert record.state == {}
    for client, rows in enumerate(RANGES):
        w = START
        for _ in range(3):
            w = descend(w, rows)
        np.testing.assert_allclose(record.own[client]["model"]["weight"].numpy().ravel(), w[:2], rtol=1e-14)


def test_no_client_learns_from_another() -> None:
    task, data = Task(Dense), federation((12, 30, 21))
    other = replace(data, x=data.x.clone())
    other.x[12:] += 5.0
    one = last(fit(data, task, LocalOnly(batch_size=8), 2, evaluation=QUIET))
    two = last(fit(other, task, LocalOnly(batch_size=8), 2, evaluation=QUIET))
    assert tree.sha256(one.own[0]["model"]) == tree.sha256(two.own[0]["model"])
    assert tree.sha256(one.own[1]["model"]) != tree.sha256(two.own[1]["model"])


def test_a_client_that_is_not_drawn_keeps_what_it_has() -> None:
    task, data = Task(Dense), federation((12, 30, 21))
    records = list(fit(data, task, LocalOnly(batch_size=8), 4, sampling=Sampling(count=1), seed=1))
    for record in records:
        assert tuple(record.own) == record.cohort
    pauses = [
        (before, after)
        for before, after in pairwise(records)
        for client in range(3)
        if client not in before.cohort
        and before.clients["pre_fit"][client]["test"] != after.clients["pre_fit"][client]["test"]
    ]
    assert pauses == []
