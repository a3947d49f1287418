"""Federated gradient descent, computed by hand and against federated averaging."""

import numpy as np
import pytest
import torch
from torch import nn

from fedloom import tree
from fedloom.algorithms import FedAvg, FedSGD
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from tests.algorithms.linear import LR, RANGES, START, X, Y, linear_task, two_clients
from tests.conftest import Dense, Normed, Pictures, federation, last


@pytest.mark.parametrize(("weights", "shares"), [("examples", (2 / 5, 3 / 5)), ("uniform", (1 / 2, 1 / 2))])
def test_the_server_steps_along_the_mean_gradient(weights: str, shares: tuple[float, float]) -> None:
    w = START
    for _ in range(3):
        gradients = []
        for rows in RANGES:
            inputs = np.column_stack([X[rows], np.ones(len(rows))])
            gradients.append(2 * inputs.T @ (inputs @ w - Y[rows]) / len(rows))
        w = w - LR * (shares[0] * gradients[0] + shares[1] * gradients[1])
    record = last(
        fit(two_clients(), linear_task(), FedSGD(lr=LR, weights=weights), 3, evaluation=Evaluation(splits=()))
    )
    np.testing.assert_allclose(record.state["model"]["weight"].numpy().ravel(), w[:2], rtol=1e-14)
    np.testing.assert_allclose(record.state["model"]["bias"].item(), w[2], rtol=1e-14)


class NormedOnly(Normed):
    """Batch normalisation without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


@pytest.mark.parametrize("weights", ["examples", "uniform"])
@pytest.mark.parametrize("model", [Dense, NormedOnly, Normed, Pictures])
def test_it_is_federated_averaging_of_one_full_batch(model: type[nn.Module], weights: str) -> None:
    # the last client's batch is too large for one pass
    task, data = Task(model, dtype="float64"), federation((12, 30, 500))
    settings = {"seed": 4, "sampling": Sampling(count=2), "evaluation": Evaluation(splits=())}
    one = last(fit(data, task, FedSGD(lr=0.2, weights=weights), 3, **settings))
    other = last(fit(data, task, FedAvg(lr=0.2, weights=weights, batch_size="full", epochs=1), 3, **settings))
    assert one.cohort == other.cohort
    for name, leaf in one.state["model"].items():
        torch.testing.assert_close(leaf, other.state["model"][name], rtol=1e-11, atol=1e-11)


def test_clients_send_gradients_and_buffers_and_keep_nothing() -> None:
    task, data = Task(Normed), federation((12, 30))
    record = last(fit(data, task, FedSGD(), 1))
    assert {report.bytes_up for report in record.reports} == {tree.size(task.initial()) + 16}
    assert record.own == {}


def test_a_schedule_over_rounds_is_that_of_fedavg_with_full_batches() -> None:
    halves = {"lr": LR, "schedule": {"name": "exponential", "factor": 0.5}}
    data, task = two_clients(), linear_task()
    one, other = (last(fit(data, task, kind, 3)) for kind in (FedSGD(**halves), FedAvg(batch_size="full", **halves)))
    torch.testing.assert_close(one.state["model"], other.state["model"], rtol=1e-12, atol=1e-12)
