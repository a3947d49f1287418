"""Federated dropout with an optimiser that clients keep: what is left out of a sub-model stays out."""

from typing import Any

import pytest
import torch

from fedloom.algorithm import Update
from fedloom.algorithms import FederatedDropout
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from fedloom.training.clients import Clients
from fedloom.tree import Groups
from tests.conftest import Dense, federation

SEEN: list[tuple[Update, Groups, Groups]] = []


class Watched(FederatedDropout):
    """Federated dropout that shows what clients answer and keep."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, kept = super().client(task, shared, own, data)
        SEEN.append((update, own, kept))
        return update, kept


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        {"lr": 0.01, "optimizer": "adam"},
        {"lr": 0.01, "optimizer": "adam", "weight_decay": 0.1},
    ],
    ids=str,
)
def test_what_is_left_out_stays_zero_and_its_optimiser_rests(settings: dict[str, Any]) -> None:
    SEEN.clear()
    algorithm = Watched(rate=0.5, batch_size=4, optimizer_state="keep", **settings)
    list(fit(federation((20, 14)), Task(Dense), algorithm, 4, evaluation=Evaluation(splits=())))
    moved = 0
    for update, own, kept in SEEN:
        for name, mask in update.groups["had"].items():
            assert (update.groups["model"][name][mask == 0] == 0).all(), name
            for slot in (key for key in own["optimizer"] if key.endswith(f":{name}") and not key.startswith("steps:")):
                before, after = own["optimizer"][slot], kept["optimizer"][slot]
                assert torch.equal(before[mask == 0], after[mask == 0]), slot
                moved += int((before[mask == 0] != 0).sum())
    assert moved, "somebody should have something to keep for later"
