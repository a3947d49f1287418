"""Small federations, and what tests of rounds compute by hand."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fedloom import tree
from fedloom.algorithms import FedAvg
from fedloom.data.federation import Federation
from fedloom.task import Task
from fedloom.training.clients import Clients
from fedloom.training.evaluation import Measured
from fedloom.tree import Groups, Tree
from tests.conftest import federation

SIZES = (12, 30, 21, 45)
LIGHT = {"batch_size": 8, "lr": 0.05}


def by_hand(task: Task, weights: Tree, data: Federation, rows: Tensor) -> dict[str, float]:
    """Loss and accuracy, computed without fedloom."""
    module = task.build().eval()
    module.load_state_dict(weights)
    output = module(data.x[rows].to(task.torch_dtype))
    return {
        "loss": F.cross_entropy(output, data.y[rows]).item(),
        "accuracy": (output.argmax(1) == data.y[rows]).double().mean().item(),
    }


def values(measured: dict[str, Measured], task: Task, split: str = "test") -> dict[str, float]:
    return measured[split].values(task)


def with_server_data(examples: int) -> Federation:
    extra = federation((examples,), seed=9)
    return federation(SIZES, server={"test": (extra.x, extra.y)})


class PersonalHead(FedAvg):
    """Every client keeps its own last layer."""

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {"head": tree.select(model, ["out.weight", "out.bias"])}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> Any:
        start = {**tree.expand(shared["model"], len(data)), **own["head"]}
        trained = self.fit(task, start, shared, {}, data)
        from fedloom.algorithm import Update

        return Update({"model": trained.model}, data.examples.double(), trained=trained), {
            "head": tree.select(trained.model, ["out.weight", "out.bias"])
        }

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        return {**shared["model"], **own["head"]}
