"""A run refuses what `fedloom check` refuses before it trains anything, and leaves nothing behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom as fl
from fedloom.errors import InputError
from fedloom.experiment import experiment_file
from fedloom.experiment.plan import Plan
from fedloom.experiment.run import run_plan
from fedloom.tuning.estimate import estimate
from tests.conftest import Dense
from tests.conftest import federation as small
from tests.experiment.small_run import ALGORITHMS, run

NET = """
from torch import nn
def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
"""
DATA = {"source": "digits", "partition": {"name": "dirichlet", "clients": 8, "alpha": 1.0}}


def refused(values: dict[str, Any], folder: Path) -> str:
    """Return what `check` and `run` say about a file, which is the same."""
    experiment = experiment_file.parse(
        {"rounds": 2, "run": {"backend": "serial"}, **values}, folder, default_name="refused"
    )
    with pytest.raises(InputError) as checked:
        estimate(experiment)
    with pytest.raises(InputError) as ran:
        run_plan(Plan.of(experiment), folder / "runs" / "refused")
    assert not (folder / "runs").exists()  # so that the next attempt needs no --fresh
    assert str(ran.value) == str(checked.value)
    return str(ran.value)


def test_what_only_the_data_of_a_later_seed_makes_impossible_is_refused_with_the_seed(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    values = {"data": {**DATA, "seed": "run"}, "task": {"model": "net.py:net"}, "seeds": [1, 2]}
    plan = Plan.of(experiment_file.parse(values, tmp_path))
    first, second = ({*plan.federation(seed).sizes("train").tolist()} for seed in (1, 2))
    batch_size = next(
        size
        for size in range(2, 500)
        if not any(count % size == 1 for count in first) and any(count % size == 1 for count in second)
    )
    said = refused({**values, "train": {"batch_size": batch_size}}, tmp_path)
    assert said.startswith("In seed 2: Client '")
    assert f"with batch_size = {batch_size} its last batch has one" in said
    few = {**values, "train": {"batch_size": 1}}
    assert refused(few, tmp_path).startswith("In seed 1: Client '")
    assert refused({**few, "data": DATA}, tmp_path).startswith("Client '")  # all seeds have this data
    wrong = {**values, "data": {**DATA, "seed": "run", "split": [0, 0.5, 0.5]}}
    assert refused(wrong, tmp_path).startswith("The 'split' of the data")


@pytest.mark.parametrize(
    ("second", "tables", "said"),
    [
        ({"patience": 2}, {"data": {**DATA, "split": [0.8, 0.0, 0.2]}}, "has no validation examples"),
        ({"clients": [{"name": "nobody", "lr": 0.1}]}, {}, "nobody"),
        ({"name": "scaffold", "schedule": {"name": "cosine", "over": 1}}, {}, "divides by the learning rate"),
    ],
)
def test_what_only_a_later_algorithm_makes_impossible_is_refused(
    second: dict[str, Any], tables: dict[str, Any], said: str, tmp_path: Path
) -> None:
    algorithms = {"fedavg": {}, "second": {"name": "fedavg", **second}}
    assert said in refused({"data": DATA, **tables, "algorithm": algorithms}, tmp_path)


def test_clients_that_never_train_are_not_refused(task: fl.Task, tmp_path: Path) -> None:
    data = replace(small([2, 20, 20]), split_sizes=np.array([[0, 1, 1], [10, 5, 5], [10, 5, 5]]))
    cohort = fl.Sampling(count=1)
    seed = next(n for n in range(1, 99) if not any(0 in cohort.draw(3, round, n) for round in (1, 2)))
    found = run(data, fl.Task(Dense), tmp_path, algorithms=fl.FedAvg(), seeds=[seed], cohort=cohort, rounds=2)
    assert found.status == "done"
    with pytest.raises(InputError, match="Client 'client-0' has no training examples"):
        run(data, fl.Task(Dense), tmp_path, algorithms=fl.FedAvg(), seeds=[seed], cohort=cohort, rounds=99)
    assert fl.load(tmp_path).status == "done"  # as before


def test_the_data_of_a_seed_is_loaded_once_to_check_it_and_once_to_train(tmp_path: Path) -> None:
    loaded: Counter[int] = Counter()

    def load(seed: int) -> fl.Federation:
        loaded[seed] += 1
        return small([20, 20], seed=seed)

    two = {label: ALGORITHMS[label] for label in ("fedavg", "local")}
    run(load, fl.Task(Dense), tmp_path / "one", algorithms=two, seeds=[1], rounds=1)
    assert loaded == {1: 1}
    loaded.clear()
    run(load, fl.Task(Dense), tmp_path / "two", algorithms=two, seeds=[1, 2, 3], rounds=1)
    assert max(loaded.values()) == 2
