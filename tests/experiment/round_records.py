"""Records of rounds with known numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedloom.federation.engine import RoundRecord
from fedloom.federation.work import Report
from fedloom.task import Task
from fedloom.training.evaluation import Measured

TASK = Task(nn.Linear, args={"in_features": 4, "out_features": 2})


RANKING = Task(nn.Linear, args={"in_features": 4, "out_features": 2}, metrics=("accuracy", "auroc"))


def measured(count: int, accuracy: float, loss: float = 1.0) -> Measured:
    return Measured(count, {"loss": loss * count, "accuracy": accuracy * count})


def ranked(scores: list[float], targets: list[int]) -> Measured:
    count = len(targets)
    sums = {"loss": 1.0 * count, "accuracy": 0.5 * count}
    return Measured(count, sums, {"auroc": torch.tensor(scores)}, torch.tensor(targets))


def record(round: int, **changes: Any) -> RoundRecord:
    """Two clients of 10 and 30 test examples; client 0 is twice as often right."""
    both = {0: {"test": measured(10, 0.8)}, 1: {"test": measured(30, 0.4)}}
    values: dict[str, Any] = {
        "round": round,
        "state": {},
        "cohort": (0, 1),
        "reports": (Report(0, 100, 200), Report(1, 100, 200)),
        "clients": {"pre_fit": both, "post_fit": both},
        "server": {"test": measured(100, 0.6)},
        "own": {},
        "seconds": 0.25,
    }
    return RoundRecord(**{**values, **changes})


def final(round: int, accuracy: float) -> RoundRecord:
    last = {0: {"test": measured(10, accuracy)}, 1: {"test": measured(30, accuracy / 2)}}
    tested = {0: {**last[0], "universal": measured(40, accuracy)}, 1: {**last[1], "universal": measured(40, 0.0)}}
    return record(round, clients={"pre_fit": last, "post_fit": tested, "final": last})
