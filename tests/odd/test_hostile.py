"""What a hostile reading found around models and losses: each gave a wrong number, or ended a run for nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import tree
from fedloom.algorithms import FedAvg, FedRep
from fedloom.algorithms.evolution.fitness import population_outputs
from fedloom.backends.serial import Serial
from fedloom.data.federation import Federation
from fedloom.errors import InputError, TrainingError
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.work import Place
from fedloom.task import Task
from fedloom.testing.ways import InProcess
from fedloom.training import fast_paths
from fedloom.training.clients import Clients
from fedloom.training.evaluation import evaluate, outputs
from fedloom.training.probe import probe
from tests.conftest import ALL_TRAIN, Dense, federation
from tests.odd.losses import Growing
from tests.odd.table import CLASSES, FEATURES, Net


def classes(count: int, rows: int = 600) -> Federation:
    draws = np.random.default_rng(0)
    y = np.concatenate([np.arange(count), draws.integers(0, count, rows - count)])
    x = draws.normal(size=(rows, FEATURES)).astype("float32")
    names = tuple(map(str, range(count)))
    return Federation(torch.from_numpy(x), torch.from_numpy(y), np.array([0, rows]), classes=names)


@pytest.mark.parametrize("heavy", [3, 150, 299])
def test_one_class_of_hundreds_with_another_weight_is_enough(heavy: int) -> None:
    weight = torch.ones(300)
    weight[heavy] = 20.0
    task = Task(lambda: nn.Linear(FEATURES, 300), loss=lambda o, y: F.cross_entropy(o, y, weight=weight.to(o.dtype)))
    assert not probe(classes(300), task).loss_is_mean


def test_a_loss_that_knows_single_precision_only_is_tried_in_it() -> None:
    turn = torch.eye(3)
    assert probe(federation((30,)), Task(Dense, loss=lambda o, y: F.cross_entropy(o @ turn, y))).loss_is_mean


class Narrow(Net):
    """Not finite where an example is below 1, as a trial's halved rows are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(torch.acosh(x))))


def test_bits_do_not_depend_on_which_client_a_process_sees_first() -> None:
    draws = np.random.default_rng(0)
    x = np.concatenate([1 + 0.5 * draws.random((40, FEATURES)), 3 + 2 * draws.random((80, FEATURES))])
    data = Federation(
        torch.from_numpy(x).float(), torch.arange(120) % 3, np.array([0, 40, 80, 120]), classes=("a", "b", "c")
    )
    found = set()
    for cuts in ((), (1,), (2,)):
        task = Task(Narrow)
        backend = InProcess(Place(data, task, probe(data, task).setup(1)), cuts)
        last = list(fit(data, task, FedAvg(batch_size=8, lr=0.1), 2, backend=backend))[-1]
        found.add(tree.sha256(last.state["model"]))
    assert len(found) == 1


class ChangesItsInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x.sub_(0.5))))


def test_a_population_gets_the_same_answer_twice() -> None:
    task = Task(ChangesItsInput)
    data = federation((20,))
    setup = probe(data, task).setup(1)
    population = {name: torch.stack([leaf, leaf * 2, leaf * 3]) for name, leaf in task.initial().items()}
    first, second = (population_outputs(task, population, {}, data.x[:6].clone(), setup) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("loss", [Growing(), lambda o, y: F.cross_entropy(o + torch.rand_like(o), y)])
def test_clients_that_are_measured_together_do_not_share_a_losss_state(loss: Any) -> None:
    data, task = federation((12,) * 40), Task(Dense, loss=loss, metrics=[])
    (record,) = fit(data, task, FedAvg(lr=1e-9), 1, evaluation=Evaluation(splits=("test",)))
    backend = Serial(data, task)
    clients = replace(Clients(data, tuple(range(40))), setup=backend.setup)
    for client in (0, 1, 7, 39):
        alone = evaluate(task, task.initial(), clients, client, "test")
        assert record.clients["pre_fit"][client]["test"].sums == pytest.approx(alone.sums, rel=1e-5)


class Padded(nn.Module):
    """In evaluation torch has a path of its own for transformers, in which padding is zero."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), 2, 8)
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[:, 1] = True
        return self.out(self.layers(x, src_key_padding_mask=mask).sum(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_model_is_evaluated_as_torch_evaluates_it() -> None:
    data, task = federation((30,)), Task(Padded)
    assert not probe(data, task).layers.drops_evaluating
    module = task.build().eval()
    with torch.no_grad():
        assert torch.equal(outputs(task, task.initial(), data.x[:5]), module(data.x[:5]))


def test_the_watch_of_lanes_forgives_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the optimum, gradients of features far from zero are nothing but rounding."""
    monkeypatch.setattr(fast_paths, "WATCHED", 1)
    draws = np.random.default_rng(0)
    x = (1000 + draws.normal(size=(240, 16))).astype("float32")
    y = torch.from_numpy((x @ draws.normal(size=16) * 1e-3).astype("float32"))
    data = Federation(torch.from_numpy(x), y, np.arange(0, 241, 20), split=ALL_TRAIN)
    task = Task(nn.Linear, args={"in_features": 16, "out_features": 1}, loss="mse", metrics=[])
    backend = InProcess(Place(data, task, replace(probe(data, task).setup(4), group=4)), ())
    for record in fit(
        data, task, FedAvg(batch_size=10, lr=1e-8), 15, backend=backend, evaluation=Evaluation(splits=())
    ):
        assert record.complete


class KeepsAParametersMemory(Net):
    def __init__(self) -> None:
        super().__init__()
        self.raw = self.first.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x) + x @ self.raw.T))


class AsABuffer(Net):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("raw", self.first.weight.data, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x) + x @ self.raw.T))


class HasViewsOfOneParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(FEATURES * CLASSES) * 0.1)
        self.weight = self.flat.data.view(CLASSES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.flat[:CLASSES]


@pytest.mark.parametrize("build", [KeepsAParametersMemory, lambda: AsABuffer(False), HasViewsOfOneParameter])
def test_a_parameter_under_another_name_in_the_same_memory_is_refused(build: Any) -> None:
    with pytest.raises(InputError, match=r"keeps a part of '.*' also as '.*', in the same memory"):
        probe(federation((20,)), Task(build))


def test_saved_tensors_that_share_memory_are_not_trained_side_by_side() -> None:
    assert "memory in common" in probe(federation((20,)), Task(lambda: AsABuffer(True))).cannot_group


FACTOR = {"now": 1.0}


class TurnsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * FACTOR["now"]


class Reverses(Net):
    """A global variable changes gradients, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(TurnsGradients.apply(torch.tanh(self.first(x))))


def test_the_watch_sees_wrong_gradients_behind_a_large_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_paths, "WATCHED", 1)
    monkeypatch.setitem(FACTOR, "now", 1.0)
    data, task = federation((64, 64), split=ALL_TRAIN), Task(Reverses)
    rounds = fit(data, task, FedAvg(batch_size=32, lr=0.05), 6, backend=Serial(data, task))
    next(rounds)
    FACTOR["now"] = 0.5
    with pytest.raises(TrainingError, match="the recorded step gave something else"):
        list(rounds)


def test_no_gradient_is_left_behind() -> None:
    data, task = federation((20, 30)), Task(Dense)
    setup = probe(data, task).setup(1, replay=False)
    list(fit(data, task, FedRep(lr=0.1), 1, backend=Serial(data, task, setup)))
    assert [name for name, leaf in task.module.named_parameters() if leaf.grad is not None] == []
