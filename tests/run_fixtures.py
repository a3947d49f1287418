"""One small comparison that is run once, for all tests that read a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedloom as fl
from tests.conftest import Dense, federation

LABELS = ("fedavg", "local", "pooled")


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three algorithms, two seeds, four clients, five rounds, everything measured."""
    folder = tmp_path_factory.mktemp("comparison") / "small"
    from fedloom.experiment.tables import EvaluateTable

    fl.run(
        federation([20, 15, 30, 25], seed=4),
        fl.Task(Dense),
        {"fedavg": fl.FedAvg(lr=0.3, batch_size=4), "local": fl.LocalOnly(lr=0.3), "pooled": fl.Pooled(lr=0.3)},
        rounds=5,
        seeds=2,
        cohort=fl.Sampling(count=3),
        evaluate=EvaluateTable(
            splits=("test", "train"), universal=True, epochs=True, target={"accuracy": 0.5}, server=("test",)
        ),
        out=folder,
        backend="serial",
    )
    return folder
