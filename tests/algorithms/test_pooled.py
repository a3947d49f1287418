"""Training on all data in one place."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom import tree
from fedloom.algorithms import FedAvg, LocalOnly, Pooled
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from tests.algorithms.linear import START, X, Y, linear_task, two_clients
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
