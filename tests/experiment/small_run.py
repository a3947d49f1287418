"""A small run that tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedloom as fl
from fedloom.results.result import Result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


ALGORITHMS = {
    "fedavg": fl.FedAvg(lr=0.2, batch_size=4),
    "kept": fl.FedAvg(optimizer="adam", lr=0.01, optimizer_state="keep"),
    "fedsgd": fl.FedSGD(lr=0.2),
    "local": fl.LocalOnly(lr=0.2, batch_size=4),
    "pooled": fl.Pooled(optimizer="adam", lr=0.01),
}


def run(federation: Any, task: Any, folder: Path, rounds: int = 4, **settings: Any) -> Result:
    settings = {"algorithms": ALGORITHMS, "backend": "serial", **settings}
    return fl.run(federation, task, rounds=rounds, out=folder, **settings)


class StopAfter:
    """Asks to stop after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0
