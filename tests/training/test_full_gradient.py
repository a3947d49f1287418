"""The full gradient is that of the mean loss, and failures name the client."""

from typing import Any

import pytest
import torch

from fedloom import tree
from fedloom.errors import InputError, TrainingError
from fedloom.task import Task
from fedloom.training.full_gradient import full_gradient
from fedloom.training.local import Training
from tests.conftest import (
    Dense,
    Noisy,
    Recurrent,
    federation,
)
from tests.training.helpers import MODELS, assert_trees_close, clients, empty_client, fit, with_bad_client


@pytest.mark.parametrize("model", [Noisy, lambda: Recurrent(layers=2, dropout=0.5)], ids=["rand_like", "lstm dropout"])
def test_the_full_gradient_of_a_model_that_draws_by_itself_is_reproducible_too(model: Any) -> None:
    task, data = Task(model), federation((9, 20))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        full = full_gradient(task, clients(task, data), tree.expand(task.initial(), 2))
        found.append(tree.sha256(full.gradient))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0] == found[1]


@pytest.mark.parametrize("model", MODELS)
def test_the_full_gradient_is_that_of_the_mean_loss(model: str) -> None:
    task, data = Task(MODELS[model], dtype="float64"), federation((9, 30))
    full = full_gradient(task, clients(task, data), tree.expand(task.initial(), 2))
    one = fit(task, data, Training(lr=0.25, batch_size="full"))
    stepped = tree.add(tree.expand(tree.select(task.initial(), task.trainable), 2), full.gradient, scale=-0.25)
    assert_trees_close(stepped, tree.select(one.model, task.trainable), 1e-12)
    assert_trees_close(full.buffers, {n: leaf for n, leaf in one.model.items() if n not in task.trainable}, 1e-12)
    assert full.losses.tolist() == pytest.approx([history[0]["loss"] for history in one.history], rel=1e-6)


def test_a_full_gradient_without_training_examples_names_the_client() -> None:
    task, data = Task(Dense), empty_client()
    with pytest.raises(InputError, match="Client 'ben' has no training examples"):
        full_gradient(task, clients(task, data), tree.expand(task.initial(), 3))


def test_a_full_gradient_that_is_not_finite_names_round_and_client() -> None:
    task, data = Task(Dense), with_bad_client()
    with pytest.raises(TrainingError, match=r"Round 3, client 'client-1', its full gradient: the loss is nan"):
        full_gradient(task, clients(task, data), tree.expand(task.initial(), 3))
