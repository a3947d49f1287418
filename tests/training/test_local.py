"""Local training computes what torch computes, and failures name the client and the step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedloom import tree
from fedloom.algorithms import FedAvg
from fedloom.data.federation import Federation
from fedloom.errors import TrainingError
from fedloom.task import Task
from fedloom.training import local
from fedloom.training.local import Step, Training, clip
from fedloom.training.modules import ModuleTensors, load
from fedloom.tree import Groups, Tree
from tests.conftest import (
    ALL_TRAIN,
    FEATURES,
    Dense,
    Memory,
    Moody,
    Noisy,
    Normed,
    Recurrent,
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
    with_bad_client,
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
        load(ModuleTensors(module).own, task.initial())
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


@pytest.mark.parametrize("group", [1, 3])
def test_clipping_is_torchs_clip_grad_norm(group: int) -> None:
    task, data = Task(Dense, dtype="float64"), federation(RAGGED)
    trained = fit(task, data, Training(lr=0.5, batch_size=8, epochs=2, clip=0.2), group)
    free = fit(task, data, Training(lr=0.5, batch_size=8, epochs=2), group)
    assert tree.sha256(trained.model) != tree.sha256(free.model)
    for position in range(data.clients):
        make = lambda p: torch.optim.SGD(p, lr=0.5)  # noqa: E731
        expected = by_torch(task, clients(task, data), position, make, epochs=2, size=8, clip=0.2)
        assert_trees_close(tree.row(trained.model, position), expected)


def test_a_gradient_within_the_bound_is_not_clipped() -> None:
    gradient = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert torch.equal(clip(gradient, 10.0)["a"], gradient["a"])
    assert clip(gradient, 1.0)["b"].item() == pytest.approx(0.8, abs=1e-6)


@pytest.mark.parametrize("group", [1, 3])
def test_weights_that_were_given_are_never_changed(group: int) -> None:
    task, data = Task(Normed), federation(RAGGED)
    shared = {"model": task.initial()}
    own = {
        "optimizer": tree.expand(local.initial_optimizer(ADAM_KEEP, task, task.initial())["optimizer"], data.clients)
    }
    before = tree.sha256(shared["model"]), tree.sha256(own["optimizer"])
    start = tree.expand(shared["model"], data.clients)
    fit(task, data, ADAM_KEEP, group, start, correct=Prox().correct, shared=shared, own=own)
    assert (tree.sha256(shared["model"]), tree.sha256(own["optimizer"])) == before


@pytest.mark.parametrize("model", [Noisy, lambda: Recurrent(layers=2, dropout=0.5)], ids=["rand_like", "lstm dropout"])
def test_a_model_that_draws_by_itself_is_reproducible_and_leaves_the_generator_alone(model: Any) -> None:
    task, data = Task(model), federation((9, 20))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        found.append(tree.sha256(fit(task, data, Training(batch_size=8, epochs=2)).model))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0] == found[1]


def test_a_model_that_draws_by_itself_draws_other_numbers_in_every_step_and_for_every_client() -> None:
    task, data = Task(Noisy), federation((8,), split=ALL_TRAIN)
    twins = Federation(
        data.x.repeat(2, 1), data.y.repeat(2), np.array([0, 8, 16]), split=ALL_TRAIN, classes=data.classes
    )
    one_step = fit(task, twins, Training(batch_size="full"))
    assert not torch.equal(one_step.model["out.weight"][0], one_step.model["out.weight"][1])
    losses = [epoch["loss"] for epoch in fit(task, twins, Training(batch_size="full", lr=1e-12, epochs=3)).history[0]]
    assert len(set(losses)) == 3


def test_a_buffer_that_is_not_saved_does_not_leak_from_one_client_to_the_next() -> None:
    task, data = Task(Memory), federation((9, 20))
    chosen = clients(task, data)
    together = local.train(task, chosen, tree.expand(task.initial(), 2), Training())
    alone = local.train(task, replace(chosen, ids=(1,)), tree.expand(task.initial(), 1), Training())
    assert tree.sha256(tree.row(alone.model, 0)) == tree.sha256(tree.row(together.model, 1))


class Frozen(nn.Module):
    """A parameter that is not trained and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 4)
        self.first.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).relu())


@pytest.mark.parametrize("group", [1, 3])
def test_what_is_frozen_or_unused_stays_and_the_rest_learns(group: int) -> None:
    task, data = Task(Frozen, dtype="float64"), federation((20, 30))
    trained = fit(task, data, Training(momentum=0.9, weight_decay=0.0, epochs=2, batch_size=8), group).model
    initial = task.initial()
    assert "first.weight" not in trained, "it stays with the task, and nobody sends it"
    assert torch.equal(task.module.first.weight, task.frozen["first.weight"])
    for client in range(2):
        assert torch.equal(trained["unused"][client], initial["unused"])
        assert not torch.equal(trained["first.bias"][client], initial["first.bias"])


class TiedWeights(nn.Module):
    """Encoder and decoder share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decode = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decode.weight = self.encode.weight
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.decode(torch.tanh(self.encode(x))))


@pytest.mark.parametrize("group", [1, 3])
def test_tied_weights_stay_tied(group: int) -> None:
    task, data = Task(TiedWeights, dtype="float64"), federation((20, 30))
    trained = fit(task, data, Training(batch_size=8), group).model
    for position in range(2):
        make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
        expected = by_torch(task, clients(task, data), position, make, epochs=1, size=8)
        assert torch.equal(expected["encode.weight"], expected["decode.weight"])
        torch.testing.assert_close(trained["encode.weight"][position], expected["encode.weight"])


def test_the_plain_step_also_names_the_step() -> None:
    with pytest.raises(TrainingError, match=r"client 'client-1', local training, step 1 of 6: the loss is nan"):
        fit(Task(Dense), with_bad_client(), Training(batch_size=8, epochs=2))


def test_an_error_inside_the_model_names_client_and_step() -> None:
    data = federation((16, 28, 16), split=ALL_TRAIN)
    message = r"^Round 3, client 'client-1', local training, step 2 of 2: RuntimeError: twelve is right out\n"
    with pytest.raises(TrainingError, match=message) as caught:
        fit(Task(Moody), data, Training(batch_size=16))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_inside_a_correction_names_the_client() -> None:
    def broken(step: Step, shared: Groups, own: Groups) -> Tree:
        raise KeyError("control")

    with pytest.raises(
        TrainingError, match=r"Round 3, client 'client-0', local training, step 1 of 1: KeyError: 'control'"
    ):
        fit(Task(Dense), federation((8,), split=ALL_TRAIN), Training(batch_size=8), correct=broken)
