"""Models, federations and references that the tests of local training share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import keys, tree
from fedloom.algorithms import FedAvg
from fedloom.data.federation import Federation
from fedloom.task import Task
from fedloom.training import local
from fedloom.training.clients import Clients, Setup
from fedloom.training.local import Step, Trained, Training
from fedloom.training.modules import ModuleTensors, load
from fedloom.training.probe import probe
from fedloom.training.schedule import TrainingJob
from fedloom.tree import Groups, Tree
from tests.conftest import (
    ALL_TRAIN,
    FEATURES,
    Dense,
    Normed,
    Pictures,
    federation,
)

RAGGED = (4, 9, 33, 21, 60)


MODELS = {"dense": Dense, "normed": Normed, "pictures": Pictures}


def clients(task: Task, data: Federation, group: int = 1, **settings: Any) -> Clients:
    setup = probe(data, task).setup(group=group, **settings)
    return Clients(data, tuple(range(data.clients)), seed=7, round=3, call=1, setup=setup)


def fit(
    task: Task,
    data: Federation,
    training: Training,
    group: int = 1,
    start: Tree | None = None,
    correct: Any = None,
    shared: Groups | None = None,
    own: Groups | None = None,
    **settings: Any,
) -> Trained:
    start = tree.expand(task.initial(), data.clients) if start is None else start
    chosen = clients(task, data, group, **settings)
    return local.train(task, chosen, start, training, correct=correct, shared=shared, own=own)


def assert_trees_close(a: Tree, b: Tree, tolerance: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


def batches(data: Clients, position: int, epoch: int, size: int) -> list[Tensor]:
    """The rows of each batch of one epoch, in the order that the client's key gives."""
    rows = data.rows(position, "train")
    order = rows[torch.from_numpy(keys.permutation(data.key(position, "batches", epoch), len(rows)))]
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def by_torch(
    task: Task,
    data: Clients,
    position: int,
    make: Callable[..., torch.optim.Optimizer],
    epochs: int,
    size: int,
    clip: float | None = None,
) -> Tree:
    """The same local training, written with torch.optim and autograd."""
    module = task.build()
    load(ModuleTensors(module).own, task.initial())
    module.train()
    optimizer = make(module.parameters())
    for epoch in range(epochs):
        for rows in batches(data, position, epoch, size):
            optimizer.zero_grad()
            x, y = data.federation.x[rows].to(task.torch_dtype), data.federation.y[rows]
            F.cross_entropy(module(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
    return {name: leaf.detach() for name, leaf in module.state_dict().items()}


class Prox(FedAvg):
    """FedProx: a pull towards where the client began."""

    mu: float = 0.5

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return tree.add(step.grad, tree.sub(step.params, step.start), scale=self.mu)


def job_of(task: Task, training: Training = Training(), **settings: Any) -> TrainingJob:
    data = federation(RAGGED)
    start = tree.expand(task.initial(), data.clients)
    given = {"correct": None, "shared": {}, "own": {}, "optimizer": None, "trained": start, **settings}
    those = Clients(data, tuple(range(data.clients)), setup=Setup(replay=True))
    return TrainingJob(task, those, start, training, **given)


ADAM_KEEP = Training(optimizer="adam", lr=0.01, batch_size=8, optimizer_state="keep")


def empty_client() -> Federation:
    return replace(federation((6, 8)), offsets=np.array([0, 6, 6, 14]), names=("anna", "ben", "cleo"))


def with_bad_client() -> Federation:
    data = federation((20, 20, 20), split=ALL_TRAIN)
    data.x[20:40] = torch.nan
    return data


class TimeMajor(nn.Module):
    """Dropout where examples are the second dimension, as in many a recurrent or attention model."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(x.t().unsqueeze(-1))).mean(0)


class BatchMean(nn.Module):
    """Examples see each other outside of batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x - x.mean(0))
