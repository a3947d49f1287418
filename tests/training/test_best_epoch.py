"""Early stopping: the weights, steps and optimiser of the best epoch."""

import math

import numpy as np
import pytest
import torch

from fedloom import tree
from fedloom.data.split import Split
from fedloom.errors import InputError
from fedloom.task import Task
from fedloom.training import local
from fedloom.training.best_epoch import BestEpoch
from fedloom.training.evaluation import evaluate
from fedloom.training.local import Training
from tests.conftest import ALL_TRAIN, Dense, federation
from tests.training.helpers import assert_trees_close, clients, fit

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


def test_any_loss_is_better_than_one_that_is_not_a_number() -> None:
    task, data = Task(Dense, dtype="float64"), federation((24,))
    best = BestEpoch(task, clients(task, data), 0, patience=2)
    weights = task.initial()
    broken = {**weights, "out.bias": torch.full_like(weights["out.bias"], math.nan)}
    history: dict[str, float] = {}
    stops = [best.measure(history, each, {}, steps) for steps, each in enumerate((broken, weights, weights, broken))]
    assert stops == [False, False, False, True]
    assert best.kept is not None
    assert best.kept[2] == 1
    assert math.isnan(history["validation_loss"])
