"""Batches, epochs, early stopping, and which clients cannot be trained."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import tree
from fedloom.data.federation import Federation
from fedloom.data.split import Split
from fedloom.errors import InputError, TrainingError
from fedloom.task import Task
from fedloom.training import local
from fedloom.training.evaluation import evaluate
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


EPOCHS = 15


@pytest.mark.parametrize("group", [1, 3])
def test_early_stopping_restores_the_best_weights_seen_and_stops(group: int) -> None:
    task, data = Task(Dense, dtype="float64"), federation((60, 90, 40), seed=3)
    training = Training(lr=1.5, epochs=EPOCHS, batch_size=8, patience=2)
    trained = fit(task, data, training, group)
    chosen = clients(task, data)
    stopped_early = 0
    for position in range(data.clients):
        losses = [epoch["validation_loss"] for epoch in trained.history[position]]
        per_epoch = -(-len(data.indices(position, "train")) // 8)
        best = int(np.argmin(losses))
        assert trained.steps[position] == (best + 1) * per_epoch  # those that the returned weights saw
        if len(losses) < EPOCHS:
            stopped_early += 1
            assert len(losses) == best + 1 + 2  # two epochs that were no better, and no third
        restored = evaluate(task, tree.row(trained.model, position), chosen, position, "validation").values(task)
        assert restored["loss"] == pytest.approx(losses[best], rel=1e-9)
        # and they are the weights of that epoch: a run that ends there has the same
        until = fit(task, data, Training(lr=1.5, epochs=best + 1, batch_size=8), 1)
        assert_trees_close(tree.row(trained.model, position), tree.row(until.model, position), 1e-6)
    assert stopped_early >= 2


@pytest.mark.parametrize("group", [1, 2])
def test_early_stopping_without_validation_examples_names_the_client(group: int) -> None:
    data = federation((20, 30), split=ALL_TRAIN)
    with pytest.raises(InputError, match=r"Client 'client-0' has no validation examples, which patience .* needs"):
        fit(Task(Dense), data, Training(epochs=5, batch_size=10, patience=1), group)


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


@pytest.mark.parametrize("group", [1, 2])
def test_a_kept_optimizer_belongs_to_the_weights_that_patience_returns(group: int) -> None:
    data = federation((24, 40), seed=3, split=Split(train=0.5, validation=0.5, test=0.0))
    task = Task(Dense, dtype="float64")
    training = Training(lr=1.5, momentum=0.5, epochs=12, batch_size=8, optimizer_state="keep", patience=2)
    state = local.initial_optimizer(training, task, task.initial())["optimizer"]
    trained = fit(task, data, training, group, own={"optimizer": tree.stack([state] * 2)})
    assert trained.own["optimizer"]["steps:out.bias"].tolist() == trained.steps.tolist()
    epochs = [len(history) for history in trained.history]
    per_epoch = [-(-len(data.indices(client, "train")) // 8) for client in range(2)]
    assert any(steps < done * each for steps, done, each in zip(trained.steps.tolist(), epochs, per_epoch, strict=True))
