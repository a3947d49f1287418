"""Federated averaging, computed by hand."""

import numpy as np
import pytest
import torch

from fedloom import keys
from fedloom.algorithms import FedAvg
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from tests.algorithms.linear import (
    LR,
    RANGES,
    START,
    descend,
    linear_task,
    trained,
    two_clients,
)
from tests.conftest import ALL_TRAIN, Normed, federation, last


@pytest.mark.parametrize(("weights", "shares"), [("examples", (2 / 5, 3 / 5)), ("uniform", (1 / 2, 1 / 2))])
def test_a_round_of_one_full_batch(weights: str, shares: tuple[float, float]) -> None:
    expected = START
    for rounds in (1, 2, 3):
        expected = sum(share * descend(expected, rows) for share, rows in zip(shares, RANGES, strict=True))
        algorithm = FedAvg(lr=LR, batch_size="full", weights=weights)
        np.testing.assert_allclose(trained(algorithm, rounds), expected, rtol=1e-14, atol=1e-14)


def test_the_first_step_in_plain_numbers() -> None:
    # client 1: errors −0.9 and −0.15, gradient (−1.35, −1.65, −1.05); client 2: errors −0.15, −2.4, −2.15
    first = START - 0.1 * np.array([-1.35, -1.65, -1.05])
    second = START - 0.1 * np.array([-5.3 / 3, -22.8 / 3, -9.4 / 3])
    np.testing.assert_allclose(descend(START, RANGES[0]), first, rtol=1e-14)
    np.testing.assert_allclose(descend(START, RANGES[1]), second, rtol=1e-14)
    np.testing.assert_allclose(trained(FedAvg(lr=0.1, batch_size="full"), 1), (2 * first + 3 * second) / 5, rtol=1e-14)


@pytest.mark.parametrize(("weights", "shares"), [("examples", (2 / 5, 3 / 5)), ("uniform", (1 / 2, 1 / 2))])
@pytest.mark.parametrize("batch", [1, 2])
def test_rounds_of_minibatches_in_the_order_of_the_keys(batch: int, weights: str, shares: tuple[float, float]) -> None:
    seed, epochs = 11, 3
    expected = START
    for round in (1, 2):
        models = []
        for client, rows in enumerate(RANGES):
            w = expected
            for epoch in range(epochs):
                order = rows[keys.permutation(keys.key(seed, "batches", round, 0, client, epoch), len(rows))]
                for begin in range(0, len(rows), batch):
                    w = descend(w, order[begin : begin + batch])
            models.append(w)
        expected = sum(share * w for share, w in zip(shares, models, strict=True))
        algorithm = FedAvg(lr=LR, batch_size=batch, epochs=epochs, weights=weights)
        np.testing.assert_allclose(trained(algorithm, round, seed=seed), expected, rtol=1e-13, atol=1e-13)


def test_a_fraction_of_zero_is_one_client_whose_weights_are_the_new_model() -> None:
    records = fit(
        two_clients(), linear_task(), FedAvg(lr=LR, batch_size="full"), 4, sampling=Sampling(fraction=0.0), seed=3
    )
    expected, seen = START, set()
    for record in records:
        (client,) = record.cohort
        seen.add(client)
        expected = descend(expected, RANGES[client])
        np.testing.assert_allclose(record.state["model"]["weight"].numpy().ravel(), expected[:2], rtol=1e-13)
    assert seen == {0, 1}


def test_buffers_are_averaged_like_weights_and_counters_to_whole_numbers() -> None:
    task = Task(Normed, dtype="float64")
    data = federation((4, 12), split=ALL_TRAIN)
    record = last(fit(data, task, FedAvg(batch_size=4, lr=1e-12), 1, evaluation=Evaluation(splits=())))
    # hardly any learning: the running mean is that of the initial layer's outputs, batch by batch
    hidden = torch.func.functional_call(task.build().hidden, *_hidden(task), (data.x.double(),)).detach()
    means = []
    for client, size in enumerate((4, 12)):
        rows = data.indices(client, "train").numpy()
        order = rows[keys.permutation(keys.key(0, "batches", 1, 0, client, 0), size)]
        mean = torch.zeros(6, dtype=torch.float64)
        for begin in range(0, size, 4):
            mean = 0.9 * mean + 0.1 * hidden[order[begin : begin + 4]].mean(0)
        means.append(mean)
    expected = (4 * means[0] + 12 * means[1]) / 16
    torch.testing.assert_close(record.state["model"]["norm.running_mean"], expected, rtol=1e-8, atol=1e-8)
    batches = record.state["model"]["norm.num_batches_tracked"]
    assert batches.dtype == torch.int64
    assert batches.item() == 2  # 1 and 3 batches, weighted by 4 and 12 examples: 2.5, to the even number


def _hidden(task: Task) -> tuple[dict[str, torch.Tensor]]:
    initial = task.initial()
    return ({"weight": initial["hidden.weight"], "bias": initial["hidden.bias"]},)
