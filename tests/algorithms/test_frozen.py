"""Frozen parameters stay as they are, bit for bit, in the server's state and in what clients keep."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.algorithms import ALGORITHMS
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from tests.conftest import CLASSES, FEATURES, federation


class Features(nn.Module):
    """Random features that nobody trains, below and within what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.random = nn.Linear(FEATURES, 9)
        self.random.requires_grad_(False)
        self.norm = nn.LayerNorm(9)
        self.middle = nn.Linear(9, 6)
        self.middle.bias.requires_grad_(False)
        nn.init.normal_(self.middle.bias)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.norm(self.random(x)))))


FROZEN = ("random.weight", "random.bias", "middle.bias")
WAYS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ALGORITHMS if name not in ("cocoa",)),
    *(("peer", {"weights": weights, "metric": "loss"}) for weights in ("score", "within_std", "metropolis")),
    ("peer", {"topology": "ring", "weights": "metropolis"}),
    ("staged", {"groups": 3}),
    ("fedavg", {"rule": "geometric_median"}),
    ("fedavg", {"rule": "centred_clipping"}),
    ("evaluation_weighted", {"metric": "loss"}),
]


@pytest.mark.parametrize(("name", "settings"), WAYS, ids=str)
def test_what_is_frozen_never_changes(name: str, settings: dict[str, Any]) -> None:
    task, data = Task(Features), federation((14, 9, 21, 12, 17, 10, 13))
    algorithm = ALGORITHMS[name](**settings, **({} if "lr" not in ALGORITHMS[name].known() else {"lr": 0.1}))
    initial = task.initial()
    start = {**algorithm.init(task, initial), "own": {}}
    for record in fit(data, task, algorithm, 3, evaluation=Evaluation(splits=())):
        for groups in (record.state, *record.own.values()):
            for group, leaves in groups.items():
                for leaf in (leaf for leaf in FROZEN if leaf in leaves):
                    before = start[group][leaf] if group in start else initial[leaf]
                    assert torch.equal(leaves[leaf], before), f"round {record.round}, {group}: {leaf}"
