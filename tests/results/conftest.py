"""The small finished comparison as `RunData`."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedloom as fl
from fedloom.results.run_data import RunData
from tests.conftest import Logit, two_classes
from tests.conftest import federation as data_of
from tests.experiment.conftest import federation, task  # noqa: F401 (fixtures for small runs)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two seeds whose rounds have half of the clients."""
    folder = tmp_path_factory.mktemp("runs") / "drawn"
    data = two_classes(data_of([30, 40, 25, 35, 50, 45, 30, 60, 55, 20], seed=2))
    algorithms = {"fedavg": fl.FedAvg(lr=0.1), "fedprox": fl.FedProx(lr=0.1, mu=1.0)}
    evaluate = fl.Evaluation(splits=("train", "test"), universal=True)
    cohort = fl.Sampling(count=6)
    fl.run(
        data,
        fl.Task(Logit, loss="bce"),
        algorithms,
        3,
        seeds=(1, 2),
        cohort=cohort,
        evaluate=evaluate,
        out=folder,
        backend="serial",
    )
    return folder


@pytest.fixture
def run(comparison: Path) -> RunData:
    return RunData.read(comparison)
