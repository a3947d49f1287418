"""The small finished comparison as `RunData`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import fedloom as fl
from fedloom.experiment.store import Store
from fedloom.results.run_data import RunData
from tests.conftest import Logit, two_classes
from tests.conftest import federation as data_of
from tests.experiment.conftest import federation, task  # noqa: F401 (fixtures for small runs)

TESTED = {"anna": 100, "ben": 9, "chloe": 100, "dora": 0, "eve": 40}
Made = Callable[..., RunData]


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two seeds and five clients."""
    folder = tmp_path_factory.mktemp("alone")
    data = two_classes(data_of([20] * 5, names=tuple(TESTED)))
    algorithms = {"fedavg": fl.FedAvg(lr=0.1), "alone": fl.LocalOnly(lr=0.1)}
    model = fl.Task(Logit, loss="bce", metrics=["accuracy"])
    fl.run(data, model, algorithms, 1, seeds=(1, 2), out=folder, backend="serial")
    return folder


@pytest.fixture
def made(trained: Path, tmp_path: Path) -> Made:
    """A copy of that run with these values of clients in both seeds: of each algorithm, or one for all clients."""

    def make(metric: str = "accuracy", **values: list[tuple[float, float]]) -> RunData:
        shutil.copytree(trained, tmp_path / "run")
        with Store(tmp_path / "run") as store, store._transaction() as database:
            database.execute("DELETE FROM client_metrics WHERE phase = 'final' AND client = 3")  # dora has no tests
            for place, tested in enumerate(TESTED.values()):
                database.execute("UPDATE clients SET test = ? WHERE client = ?", (tested, place))
            where = "phase = 'final' AND metric = 'accuracy' AND client = ? AND cell = ?"
            for (label, seed), cell in RunData.read(tmp_path / "run").cells.items():
                for client, value in enumerate(values[label]):
                    change = f"UPDATE client_metrics SET value = ? WHERE {where}"
                    database.execute(change, (value[seed - 1], client, cell["id"]))
            for table in ("client_metrics", "metrics"):
                database.execute(f"UPDATE {table} SET metric = ? WHERE metric = 'accuracy'", (metric,))
            about = (metric in ("accuracy", "mae"), metric not in ("mae", "rmse"), metric)
            database.execute("UPDATE metrics SET is_mean = ?, higher_is_better = ? WHERE metric = ?", about)
        return RunData.read(tmp_path / "run")

    return make
