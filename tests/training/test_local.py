"""What a client computes: local training, in lanes and plain, and full gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pydantic import Field

from fedloom import tree
from fedloom.algorithms import FedAvg
from fedloom.task import Task
from fedloom.training import local
from fedloom.training.local import Groups, Step, Training
from fedloom.training.modules import load
from fedloom.training.recorded import RecordedTrainer
from fedloom.tree import Tree
from tests.conftest import (
    Dense,
    federation,
)
from tests.training.helpers import (
    ADAM_KEEP,
    MODELS,
    RAGGED,
    Prox,
    assert_trees_close,
    batches,
    by_torch,
    clients,
    fit,
    job_of,
)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("model", ["dense", "pictures"])
@pytest.mark.parametrize(
    ("training", "make"),
    [
        (Training(lr=0.2, epochs=2, batch_size=8), lambda p: torch.optim.SGD(p, lr=0.2)),
        (
            Training(lr=0.05, momentum=0.9, weight_decay=0.1, epochs=2, batch_size=8),
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
        ),
        (Training(optimizer="adam", lr=0.01, epochs=2, batch_size=8), lambda p: torch.optim.Adam(p, lr=0.01)),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_local_training_is_torchs_on_the_keyed_order_of_batches(
    model: str, training: Training, make: Callable[..., torch.optim.Optimizer], group: int
) -> None:
    task, data = Task(MODELS[model], dtype="float64"), federation(RAGGED)
    trained = fit(task, data, training, group)
    for position in range(data.clients):
        expected = by_torch(task, clients(task, data), position, make, epochs=2, size=8)
        # Adam divides by a root that is nearly zero where a gradient is: rounding shows there
        assert_trees_close(tree.row(trained.model, position), expected, 1e-9)


def test_a_trainer_is_found_again_when_an_equal_algorithm_comes_from_another_process() -> None:
    task = Task(Dense)

    def trainer(mu: float) -> object:
        return local.trainer_for(job_of(task, correct=Prox(mu=mu).correct))

    assert isinstance(trainer(0.5), RecordedTrainer)
    assert trainer(0.5) is trainer(0.5)
    assert trainer(0.7) is not trainer(0.5)


class Chosen(FedAvg):
    """A field that is a list."""

    layers: list[str] = Field(default_factory=lambda: ["hidden.weight"])

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return {name: leaf * 0 if name in self.layers else leaf for name, leaf in step.grad.items()}


@pytest.mark.parametrize("group", [1, 2])
def test_an_algorithm_with_a_correction_may_have_fields_of_any_kind(group: int) -> None:
    task, data = Task(Dense), federation((9, 20))
    trained = fit(task, data, Training(batch_size=8), group, correct=Chosen().correct)
    assert torch.equal(trained.model["hidden.weight"][0], task.initial()["hidden.weight"])
    assert not torch.equal(trained.model["out.weight"][0], task.initial()["out.weight"])


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("training", [ADAM_KEEP, Training(momentum=0.9, batch_size=8, optimizer_state="keep")])
def test_a_kept_optimizer_goes_on_where_it_stopped(training: Training, group: int) -> None:
    task, data = Task(Dense, dtype="float64"), federation((33, 60, 9))
    state = local.initial_optimizer(training, task, task.initial())["optimizer"]
    own = {"optimizer": tree.stack([state] * data.clients), "other": {"x": torch.ones(data.clients)}}
    first = fit(task, data, training, group, own=own)
    second = fit(task, data, training, group, start=first.model, own=first.own)
    # the same without a pause: two epochs of the same order of batches, by torch
    for position in range(data.clients):
        module = task.build()
        load(module, task.initial())
        optimizer = (
            torch.optim.Adam(module.parameters(), lr=0.01)
            if training.optimizer == "adam"
            else torch.optim.SGD(module.parameters(), lr=training.lr, momentum=0.9)
        )
        for rows in batches(clients(task, data), position, 0, 8) * 2:
            optimizer.zero_grad()
            F.cross_entropy(module(data.x[rows].double()), data.y[rows]).backward()
            optimizer.step()
        assert_trees_close(tree.row(second.model, position), dict(module.state_dict()), 1e-9)
    assert second.own["optimizer"]["steps:out.bias"].tolist() == (2 * first.steps).tolist()
    assert torch.equal(second.own["other"]["x"], torch.ones(3))
    reset = fit(task, data, training.replace(optimizer_state="reset"), group, start=first.model)
    assert tree.sha256(reset.model) != tree.sha256(second.model)


def test_only_an_optimizer_that_is_kept_and_has_a_state_is_kept() -> None:
    task = Task(Dense)
    assert local.initial_optimizer(Training(optimizer="adam"), task, task.initial()) == {}
    assert local.initial_optimizer(Training(optimizer_state="keep"), task, task.initial()) == {}
    assert list(local.initial_optimizer(ADAM_KEEP, task, task.initial())) == ["optimizer"]
