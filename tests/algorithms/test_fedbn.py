"""FedBN: normalisation layers stay with the clients."""

import torch

from fedloom.algorithms import FedAvg, FedBN
from fedloom.federation.engine import fit
from fedloom.task import Task
from tests.conftest import ALL_TRAIN, Dense, Normed, federation, last


def test_without_normalisation_layers_it_says_that_it_is_fedavg() -> None:
    assert FedBN().caution(Task(Dense)) == "the model has no normalisation layers, so this is FedAvg"
    assert FedBN().caution(Task(Normed)) == FedAvg().caution(Task(Dense)) == ""


def test_normalisation_layers_stay_with_the_clients() -> None:
    task, data = Task(Normed, dtype="float64"), federation((12, 30), split=ALL_TRAIN)
    settings = {"lr": 0.1, "batch_size": "full"}
    one, other = (last(fit(data, task, kind(**settings), 1)) for kind in (FedBN, FedAvg))
    before = task.initial()
    assert set(one.own[0]["norm"]) == set(task.normalization) != set()
    for name, leaf in one.state["model"].items():
        expected = before[name] if name in task.normalization else other.state["model"][name]
        assert torch.equal(leaf, expected), name
    assert not torch.equal(one.own[0]["norm"]["norm.weight"], one.own[1]["norm"]["norm.weight"])
