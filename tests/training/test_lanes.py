"""Clients side by side learn what they learn alone."""

from dataclasses import replace

import pytest
from torch import Tensor, nn

from fedloom import tree
from fedloom.algorithms import FedAvg
from fedloom.task import Task
from fedloom.training import local
from fedloom.training.local import Step, Training
from fedloom.tree import Groups, Tree
from tests.conftest import (
    FEATURES,
    federation,
)
from tests.training.helpers import MODELS, RAGGED, BatchMean, TimeMajor, assert_trees_close, clients, fit


class LookBack(FedAvg):
    """Variance reduction: the gradient minus that at the start, plus what the server and the client know."""

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        reduced = tree.sub(step.grad, step.grad_at(step.start))
        return tree.add(tree.add(reduced, shared["direction"]), own["control"], scale=-1.0)


@pytest.mark.parametrize(
    "training", [Training(batch_size=8, epochs=2), Training(batch_size=8, optimizer="adam", epochs=2)]
)
@pytest.mark.parametrize("model", MODELS)
def test_lanes_compute_what_a_client_computes_alone(model: str, training: Training) -> None:
    task, data = Task(MODELS[model], dtype="float64"), federation(RAGGED)
    plain = fit(task, data, training)
    for group in (2, 8):
        grouped = fit(task, data, training, group)
        assert_trees_close(grouped.model, plain.model, 1e-8)
        assert grouped.steps.tolist() == plain.steps.tolist()
        for one, other in zip(grouped.history, plain.history, strict=True):
            assert [epoch["loss"] for epoch in one] == pytest.approx([epoch["loss"] for epoch in other])


@pytest.mark.parametrize("model", MODELS)
def test_a_clients_bits_do_not_depend_on_its_lane_or_its_neighbours(model: str) -> None:
    task, data = Task(MODELS[model]), federation(RAGGED)
    training = Training(batch_size=8, epochs=2, momentum=0.9)
    together = fit(task, data, training, 3)
    chosen = clients(task, data, 3)
    for position in range(data.clients):
        alone = local.train(task, replace(chosen, ids=(position,)), tree.expand(task.initial(), 1), training)
        assert tree.sha256(tree.row(alone.model, 0)) == tree.sha256(tree.row(together.model, position))


@pytest.mark.parametrize("model", MODELS)
def test_a_correction_that_looks_at_another_gradient_is_the_same_in_lanes(model: str) -> None:
    task, data = Task(MODELS[model], dtype="float64"), federation(RAGGED)
    training = Training(lr=0.1, batch_size=16, epochs=2)
    trainable = tree.select(task.initial(), task.trainable)
    shared = {"direction": tree.scale(trainable, 0.01)}
    own = {"control": tree.stack([tree.scale(trainable, 0.02 * client) for client in range(data.clients)])}
    plain = fit(task, data, training, 1, correct=LookBack().correct, shared=shared, own=own)
    grouped = fit(task, data, training, 3, correct=LookBack().correct, shared=shared, own=own)
    assert_trees_close(grouped.model, plain.model, 1e-9)
    again = fit(task, data, training, 1, correct=LookBack().correct, shared=shared, own=tree_of_zeros(own))
    assert tree.sha256(again.model) != tree.sha256(plain.model)


def tree_of_zeros(groups: Groups) -> Groups:
    return {group: tree.zeros_like(one) for group, one in groups.items()}


class InstanceNormed(nn.Module):
    """Instance normalisation with running statistics over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x.reshape(-1, 4, 4)).flatten(1))


@pytest.mark.parametrize("model", [TimeMajor, BatchMean, InstanceNormed])
def test_a_model_that_would_see_the_padding_gives_the_same_with_any_group_size(model: type[nn.Module]) -> None:
    task, data = Task(model, dtype="float64"), federation((9, 20, 33))
    training = Training(batch_size=8)
    assert_trees_close(fit(task, data, training, 3).model, fit(task, data, training, 1).model)
