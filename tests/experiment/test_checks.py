"""What a run would refuse while it trains is refused before it starts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedloom.data.preprocessing import Column, Preprocessing
from fedloom.errors import InputError
from fedloom.experiment import experiment_file
from fedloom.experiment.checks import check_agreed, check_start, check_target
from fedloom.experiment.experiment_file import parse
from fedloom.experiment.plan import Plan
from fedloom.experiment.tables import EvaluateTable
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from tests.conftest import Dense, federation


def check(train: dict[str, Any], task: Task | None = None, **tables: Any) -> None:
    data = {"source": "digits", "partition": {"name": "iid", "clients": 20}, **tables.pop("data", {})}
    plan = Plan.of(parse({"data": data, "train": train, "rounds": 3, **tables}))
    check_start(plan if task is None else replace(plan, task=lambda seed: task))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def test_a_last_batch_of_one_example_is_refused_with_batch_normalisation() -> None:
    check({"batch_size": 53})
    with pytest.raises(InputError, match="has 54 training examples, so with batch_size = 53 its last batch has one"):
        check({"batch_size": 53}, Task(normed))


def test_patience_without_validation_examples_is_refused() -> None:
    check({"patience": 2})
    with pytest.raises(InputError, match="has no validation examples, which patience"):
        check({"patience": 2}, data={"split": [0.8, 0.0, 0.2]})


def test_a_client_without_training_examples_is_refused_if_it_is_ever_drawn() -> None:
    data, one_of_ten = federation([0] + [20] * 9), Sampling(count=1)
    task = Task(Dense)
    plan = replace(Plan.of(parse({"rounds": 3})), federation=lambda seed: data, task=lambda seed: task)
    with pytest.raises(InputError, match="Client 'client-0' has no training examples"):
        check_start(plan)
    meets = {seed: any(0 in one_of_ten.draw(10, round, seed) for round in (1, 2, 3)) for seed in range(1, 20)}
    assert {*meets.values()} == {True, False}
    for seed, drawn in meets.items():
        with pytest.raises(InputError, match="has no training examples") if drawn else nullcontext():
            check_start(replace(plan, cohort=one_of_ten, seeds=(seed,)))


def test_a_target_must_name_a_known_metric_if_the_run_stops_there() -> None:
    check_target(EvaluateTable(target={"accuracy": 0.9}, stop="target"), Task(Dense))
    with pytest.raises(InputError, match=r"target must be about one of loss, accuracy\. Got 'acc' instead"):
        check_target(EvaluateTable(target={"acc": 0.9}), Task(Dense))
    with pytest.raises(InputError, match=r"accuracy is always between 0 and 1\. Got 90 instead"):
        check_target(EvaluateTable(target={"accuracy": 90}), Task(Dense))
    check_target(EvaluateTable(target={"loss": 90}), Task(Dense))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"classes": 3}, ""),
        ({"classes": 4}, r"gives 4 outputs per example, .* args = \{ classes = 3 \}"),
        ({}, ""),  # an output for each class that sites agreed on
        ({"classes": 2}, r"args = \{ classes = 3 \}"),
        ({"classes": 3, "features": 4}, "The model mlp does not take the data"),
    ],
)
def test_a_model_must_fit_the_table_that_sites_agreed_on(tmp_path: Path, args: dict[str, int], said: str) -> None:
    columns = (Column(name="age"), Column(name="ward", categories=("general", "icu")))
    agreed = Preprocessing(columns=columns, mean=(50.0, 0.5, 0.5), std=(15.0, 0.5, 0.5), shape=(3,))
    agreed.replace(classes=("0", "1", "2"), label=("outcome",)).write(tmp_path / "agreed.json")
    values = {"data": {"preprocessing": "agreed.json"}, "task": {"model": "mlp", "args": args}}
    plan = Plan.of(experiment_file.parse({**values, "algorithm": {"fedavg": {}}}, tmp_path), served=True)
    with pytest.raises(InputError, match=said) if said else nullcontext():
        check_agreed(plan)
