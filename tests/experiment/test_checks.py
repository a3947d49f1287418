"""`fedloom check` refuses what a run would refuse while it trains."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from fedloom.errors import InputError
from fedloom.experiment.checks import check_clients, check_target
from fedloom.experiment.experiment_file import EvaluateTable, parse
from fedloom.experiment.plan import Plan
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.training.probe import probe
from tests.conftest import Dense, federation


def check(train: dict[str, Any], task: Task | None = None, **tables: Any) -> None:
    data = {"source": "digits", "partition": {"name": "iid", "clients": 20}, **tables.pop("data", {})}
    plan = Plan.of(parse({"data": data, "train": train, "rounds": 3, **tables}))
    federation = plan.federation(1)
    check_clients(plan, "fedavg", probe(federation, task or plan.task(1)))


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
    facts, plan = probe(data, Task(Dense)), replace(Plan.of(parse({"rounds": 3})), federation=lambda seed: data)
    with pytest.raises(InputError, match="Client 'client-0' has no training examples"):
        check_clients(plan, "fedavg", facts)
    meets = {seed: any(0 in one_of_ten.draw(10, round, seed) for round in (1, 2, 3)) for seed in range(1, 20)}
    assert {*meets.values()} == {True, False}
    for seed, drawn in meets.items():
        with pytest.raises(InputError, match="has no training examples") if drawn else nullcontext():
            check_clients(replace(plan, cohort=one_of_ten, seeds=(seed,)), "fedavg", facts)


def test_a_target_must_name_a_known_metric_if_the_run_stops_there() -> None:
    check_target(EvaluateTable(target={"accuracy": 0.9}, stop="target"), Task(Dense))
    with pytest.raises(InputError, match=r"target must be about one of loss, accuracy\. Got 'acc' instead"):
        check_target(EvaluateTable(target={"acc": 0.9}), Task(Dense))
    with pytest.raises(InputError, match=r"accuracy is always between 0 and 1\. Got 90 instead"):
        check_target(EvaluateTable(target={"accuracy": 90}), Task(Dense))
    check_target(EvaluateTable(target={"loss": 90}), Task(Dense))
