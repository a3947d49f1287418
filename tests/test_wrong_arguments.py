"""What is wrong in a call from Python is said in a message, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedloom as fl
from fedloom.errors import InputError
from fedloom.metrics import Metric
from fedloom.results.result import Result

X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = (X.sum(1) > 0).astype(int)
fed = fl.Federation.from_arrays(X, Y, clients=2)
task = fl.Task("logistic")
one = fl.FedAvg()
anything: Any = fl  # the same functions, without their types: these calls are wrong


def data(**options: Any) -> Any:
    return anything.Federation.from_arrays(X, Y, **options)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: anything.run(fed, one, task), "Got a Task instead. The order is federation, task, algorithm"),
    (lambda: anything.run(fed, {"a": one}, task), "The order is federation, task, algorithm"),
    (lambda: anything.run(fed, task, 3), r"must be an algorithm, such as fedloom.FedAvg\(\). Got 3"),
    (lambda: anything.run(fed, task, fl.FedAvg), r"Write FedAvg\(\), with brackets"),
    (lambda: anything.run(fl.Federation, task, one), "The data must be a Federation"),
    (lambda: anything.run(fed, task, one, seeds=1.5), "seeds must be a list of whole numbers.* Got 1.5"),
    (lambda: anything.run(fed, task, one, seeds=[1.5]), r"seeds must be a list of whole numbers.* Got \[1.5\]"),
    (lambda: anything.run(fed, task, one, seeds=None), "seeds must be a list"),
    (lambda: anything.run(fed, task, one, rounds="3"), "rounds must be a whole number, at least 0. Got '3'"),
    (lambda: anything.run(fed, task, one, out=3), "'out' must be the path of a folder"),
    (lambda: anything.run(fed, task, one, fresh="no"), "'fresh' must be True or False. Got 'no'"),
    (lambda: anything.run(fed, task, one, progress=True), "'progress' must be a Progress"),
    (lambda: anything.run(fed, task, one, should_stop=True), "'should_stop' must be a function"),
    (lambda: anything.run(fed, task, one, connect=1), "'connect' must be a function"),
    (lambda: anything.run(fed, task, one, description="mine"), "'description' must be a dict"),
    (lambda: list(anything.fit(fed, task, one, "3")), "rounds must be a whole number"),
    (lambda: list(anything.fit(fed, task, one, 1, seed=1.5)), "A seed must be a whole number. Got 1.5"),
    (lambda: list(anything.fit(fed, task, fl.FedAvg, 1)), r"Write FedAvg\(\)"),
    (lambda: list(anything.fit(fed, task, [one], 1)), "What you train must be an algorithm"),
    (lambda: fl.Task("logistic", loss=nn.CrossEntropyLoss), r"The loss is a class. Write CrossEntropyLoss\(\)"),
    (lambda: anything.Task("logistic", loss=None), 'must be a name, such as "mse", or a function.* Got None'),
    (lambda: anything.Task("logistic", metrics=[nn.L1Loss]), "The metric L1Loss is a class"),
    (lambda: anything.Task("logistic", metrics=[Metric]), "The metric Metric is a class"),
    (lambda: anything.Task("logistic", metrics=len), "'metrics' of a task must be a list"),
    (lambda: fl.Task("logistic", metrics=[lambda o, t: 0.0, lambda o, t: 1.0]), "Two metrics are called <lambda>"),
    (lambda: anything.Task("logistic", args=[3]), r"'args' of a task must be a dict.* Got \[3\]"),
    (lambda: anything.Task("logistic", init=3), "'init' of a task must be torch, glorot or a safetensors file. Got 3"),
    (lambda: anything.Task("logistic", seed=1.5), "'seed' of a task must be a whole number. Got 1.5"),
    (lambda: data(client=2), "one name per example. Got 2 instead: for a number of clients, write clients=2"),
    (lambda: data(clients=2, split=0.8), "three shares: train, validation, test. Got 0.8"),
    (lambda: data(clients=2, seed=1.5), "A seed must be a whole number"),
    (lambda: data(clients=2, group=3), "There are 40 examples but 1 groups"),
    (lambda: data(clients=2, test=X), r"must be examples and their labels, \(x, y\)"),
    (lambda: anything.Federation.from_arrays([[1, 2], [3]], [0, 1], clients=1), "examples of one shape"),
    (lambda: anything.load(3), "A path must be a string or a pathlib.Path. Got 3"),
]


@pytest.mark.parametrize(("call", "says"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_wrong_argument_is_named(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        call()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("wrong") / "run"
    rounds: Any = np.int64(1)
    return fl.run(fed, task, one, rounds, seeds=np.array([1]), backend="serial", out=out)  # type: ignore[arg-type]


def test_a_result_names_what_it_does_not_have(result: Any, tmp_path: Path) -> None:
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: result.has_global_model("ditto"), r"There is no run of ditto. Known: fedavg; seed 1\.$"),
        (lambda: result.cell("fedavgg"), r"Known: fedavg; seed 1\. Did you mean 'fedavg'"),
        (lambda: result.cell(3), "There is no run of 3"),
        (lambda: result.model(["fedavg"]), r"There is no run of \['fedavg'\]"),
        (lambda: result.weights("fedavg", "1"), "with seed '1'"),
        (lambda: result.preprocessing(9), "There is no run of any algorithm with seed 9"),
        (lambda: result.rows(["clients"]), "There is no table"),
        (lambda: result.plot("accuracy", 3), "A path must be"),
        (lambda: result.report("x"), "'fill' must be min-max or std. Got 'x'"),
    ]
    for call, says in calls:
        with pytest.raises(InputError, match=says):
            call()
    assert result.has_global_model("fedavg")
