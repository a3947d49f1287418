"""The serial backend computes one client after another."""

import torch

from fedloom import tree
from fedloom.algorithms import FedAvg
from fedloom.backends.serial import Serial
from fedloom.federation.engine import fit
from fedloom.task import Task
from fedloom.training.clients import Setup
from tests.conftest import Dense, federation

DATA = federation((9, 14, 6))


def test_it_finds_the_setup_itself_and_trains_clients_one_by_one() -> None:
    backend = Serial(DATA, Task(Dense))
    assert backend.setup.group == 1
    assert backend.setup.replay
    assert backend.setup.loss_is_mean


def test_replayed_and_plain_steps_give_the_same_weights() -> None:
    task = Task(Dense, dtype="float64")
    replayed, plain = (
        list(fit(DATA, task, FedAvg(lr=0.5), 2, backend=Serial(DATA, task, setup)))[-1].state["model"]
        for setup in (None, Setup(loss_is_mean=True))
    )
    assert tree.sha256(plain) != tree.sha256(task.initial())
    for name, leaf in plain.items():
        assert torch.allclose(replayed[name], leaf, rtol=0, atol=1e-12)
