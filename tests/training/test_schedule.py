"""Batches, epochs, early stopping, and which clients cannot be trained."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import tree
from fedloom.data.federation import Federation
from fedloom.errors import TrainingError
from fedloom.task import Task
from fedloom.training.local import Training
from tests.conftest import (
    ALL_TRAIN,
    FEATURES,
    Dense,
    federation,
)
from tests.training.helpers import assert_trees_close, batches, clients, fit, with_bad_client


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("epochs", "batch_size", "steps"),
    [
        (1, 10, [1, 3, 6]),  # 6, 30 and 60 training examples
        (2, 10, [2, 6, 12]),
        (0.5, 10, [1, 2, 3]),  # 1.5 steps of 3 are two
        (1.5, 10, [2, 4, 9]),  # 4.5 steps of 3 are four: halves go to the even number
        (0.01, 10, [1, 1, 1]),  # never less than one
        (1, 7, [1, 5, 9]),
        (1, 1000, [1, 1, 1]),
        (3, "full", [3, 3, 3]),
    ],
)
def test_epochs_may_be_fractions_and_the_last_batch_smaller(
    epochs: float, batch_size: Any, steps: list[int], group: int
) -> None:
    task, data = Task(Dense), federation((6, 30, 60), split=ALL_TRAIN)
    assert fit(task, data, Training(epochs=epochs, batch_size=batch_size), group).steps.tolist() == steps


def test_half_an_epoch_is_the_first_half_of_the_whole_one() -> None:
    task, data = Task(Dense, dtype="float64"), federation((32,), split=ALL_TRAIN)
    rows = batches(clients(task, data), 0, 0, 8)
    weights = {name: leaf.clone().requires_grad_() for name, leaf in task.initial().items()}
    for part in rows[:2]:
        output = torch.func.functional_call(task.module, weights, (data.x[part].double(),))
        found = torch.autograd.grad(F.cross_entropy(output, data.y[part]), list(weights.values()))
        weights = {n: (w - 0.1 * g).detach().requires_grad_() for (n, w), g in zip(weights.items(), found, strict=True)}
    trained = fit(task, data, Training(epochs=0.5, batch_size=8, lr=0.1))
    assert_trees_close(tree.row(trained.model, 0), {name: leaf.detach() for name, leaf in weights.items()})


def test_every_epoch_has_another_order_and_every_client_and_round_its_own() -> None:
    task, data = Task(Dense), federation((20, 20), split=ALL_TRAIN)
    one = clients(task, data)
    orders = [
        tuple((torch.cat(batches(chosen, position, epoch, 8)) % 20).tolist())
        for chosen in (one, replace(one, round=4), replace(one, call=2), replace(one, seed=8))
        for position in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("batch_size", ["full", 1000])
@pytest.mark.parametrize("group", [1, 2])
def test_a_full_batch_is_all_examples_at_once(batch_size: Any, group: int) -> None:
    task, data = Task(Dense, dtype="float64"), federation((5, 40), split=ALL_TRAIN)
    trained = fit(task, data, Training(lr=0.3, batch_size=batch_size), group)
    for position in range(2):
        weights = {name: leaf.requires_grad_() for name, leaf in task.initial().items()}
        rows = data.indices(position, "train")
        output = torch.func.functional_call(task.module, weights, (data.x[rows].double(),))
        found = torch.autograd.grad(F.cross_entropy(output, data.y[rows]), list(weights.values()))
        expected = {n: (w - 0.3 * g).detach() for (n, w), g in zip(weights.items(), found, strict=True)}
        assert_trees_close(tree.row(trained.model, position), expected)


def test_a_full_batch_in_passes_is_the_full_batch() -> None:
    task, data = Task(Dense, dtype="float64"), federation((50, 7), split=ALL_TRAIN)
    whole = fit(task, data, Training(batch_size="full", epochs=2))
    passes = fit(task, data, Training(batch_size="full", epochs=2), micro_batch=16)
    assert_trees_close(passes.model, whole.model, 1e-12)
    assert passes.history[0][0]["loss"] == pytest.approx(whole.history[0][0]["loss"])


@pytest.mark.parametrize("group", [1, 3])
def test_the_history_has_the_mean_training_loss_of_every_epoch(group: int) -> None:
    task, data = Task(Dense, dtype="float64"), federation((12, 50), split=ALL_TRAIN)
    history = fit(task, data, Training(lr=1e-9, epochs=2.5, batch_size=8), group).history
    # with hardly any learning the loss stays that of the initial weights
    for position in range(2):
        rows = data.indices(position, "train")
        output = torch.func.functional_call(task.module, task.initial(), (data.x[rows].double(),))
        expected = F.cross_entropy(output, data.y[rows]).item()
        losses = [epoch["loss"] for epoch in history[position]]
        assert losses[:2] == pytest.approx([expected, expected], rel=1e-6)
    assert len(history[1]) == 3


@pytest.mark.parametrize("group", [1, 2])
def test_a_loss_that_is_not_finite_names_round_client_and_value(group: int) -> None:
    message = r"^Round 3, client 'client-1', local training.*: the loss is nan.*\. A smaller lr or a clip may help\.$"
    with pytest.raises(TrainingError, match=message):
        fit(Task(Dense), with_bad_client(), Training(batch_size=8), group)


class Squares(nn.Module):
    """Explodes when the step is too large."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).square().sum(-1)


@pytest.mark.parametrize("group", [1, 2])
def test_a_huge_learning_rate_ends_in_an_error_and_not_in_bad_weights(group: int) -> None:
    data = federation((20, 20), split=ALL_TRAIN)
    regression = Federation(data.x, data.y.float(), data.offsets, split=ALL_TRAIN)
    with pytest.raises(TrainingError, match=r"Round 3, client '[01]', local training.*: the loss is (nan|inf)"):
        fit(Task(Squares, loss="mse", metrics=[]), regression, Training(lr=1e6, epochs=20, batch_size=4), group)
