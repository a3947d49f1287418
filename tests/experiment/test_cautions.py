"""Settings that may mislead or have no effect are named before a run trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.algorithms import FedAvg, Pooled
from fedloom.data.build import federate
from fedloom.data.federation import as_dataset
from fedloom.experiment.cautions import cautions
from fedloom.experiment.experiment_file import parse
from fedloom.experiment.plan import Plan
from fedloom.experiment.tables import EvaluateTable
from fedloom.privacy.table import ExampleTable, PrivacyTable
from fedloom.task import Task
from tests.conftest import Dense, federation


def plan() -> Plan:
    data = {"source": "digits", "partition": {"name": "dirichlet", "clients": 4, "alpha": 1.0}}
    return Plan.of(parse({"rounds": 3, "seeds": [1, 2], "data": data, "algorithm": {"fedavg": {}}}))


def test_a_delta_that_protects_nobody_is_named() -> None:
    weak = replace(plan(), privacy=PrivacyTable(example_dp=ExampleTable(delta=0.4)))
    data = federation((6, 9))
    only_tests = np.array([[0, 3, 3], [3, 3, 3]])  # a client that trains on nothing needs no protection
    for one in (data, replace(data, split_sizes=only_tests)):
        said, *_ = cautions(weak, Task(Dense), one)
        assert "the smallest client has 3 training examples" in said


def test_a_headline_over_more_rounds_than_there_are_is_named() -> None:
    made, task, data = plan(), Task(Dense), federation((6, 6))
    few = cautions(replace(made, evaluate=EvaluateTable(headline="last:50", every=2)), task, data)
    assert few == ['[evaluate] headline = "last:50", but only 3 rounds are measured: it is the mean of all of them.']
    assert cautions(replace(made, evaluate=EvaluateTable(headline="last:3")), task, data) == []
    none = cautions(replace(made, rounds=0), task, data)
    assert none == ["rounds = 0: nothing is trained, and the model is only evaluated as it is given."]


class Ignores(FedAvg):
    """Has a setting that nothing reads."""

    mu: float = 0.1


def test_a_setting_that_was_given_and_has_no_effect_is_named() -> None:
    algorithms = {"usual": Ignores(lr=0.1), "mine": Ignores(lr=0.1, mu=0.5)}
    said = cautions(replace(plan(), algorithms=algorithms), Task(Dense), federation((6, 6)))
    assert said == ["mine: The setting mu of Ignores has no effect: no method that runs reads self.mu."]


def test_batches_of_which_no_client_has_one_are_named_if_short_ones_are_to_be_dropped() -> None:
    data = federation((20, 30))
    largest = int(data.sizes("train").max())
    sizes = {"one": largest + 1, "two": largest + 1, "fits": largest, "all": "full"}
    algorithms = {label: FedAvg(batch_size=size, drop_last=True) for label, size in sizes.items()}
    algorithms["keeps"] = FedAvg(batch_size=largest + 1)
    (said,) = cautions(replace(plan(), algorithms=algorithms), Task(Dense), data)
    assert said.startswith(f"one, two: drop_last = true drops nothing: the largest client has {largest} training")


def test_a_metric_of_the_second_class_is_cautioned_about_if_it_is_the_frequent_one() -> None:
    rare = replace(federation((20, 20)), y=(torch.arange(40) % 4 == 0).long(), classes=("died", "survived"))
    frequent = replace(rare, y=1 - rare.y)
    task = Task(Dense, metrics=["auroc", "f1", "recall"])
    assert cautions(plan(), task, rare) == []
    (said,) = cautions(plan(), task, frequent)
    assert said == (
        "f1, recall: the class that counts is the second by name, survived, which 75 % of examples have. f1_of_0 is "
        "about died."
    )


def test_one_client_has_nobody_to_learn_from() -> None:
    task = Task(Dense)
    (said,) = cautions(plan(), task, federation((20,)))
    assert said.startswith("There is one client, so nothing is federated")
    assert cautions(plan(), task, federation((20, 20))) == []
    alone = replace(plan(), algorithms={"pooled": Pooled()})
    assert cautions(alone, task, federation((20,))) == []


def test_a_metric_of_your_own_that_does_not_say_what_is_better_is_cautioned_about() -> None:
    def inv(outputs: np.ndarray, labels: np.ndarray) -> float:
        return float(1 - (outputs.argmax(1) == labels).mean())

    (said,) = cautions(plan(), Task(Dense, metrics=["accuracy", inv]), federation((20, 20)))
    assert "metric inv: taken as better when higher. Set inv.higher_is_better = False" in said
    for better in (True, False):
        inv.higher_is_better = better  # type: ignore[attr-defined]
        assert cautions(plan(), Task(Dense, metrics=["accuracy", inv]), federation((20, 20))) == []


@pytest.mark.parametrize(("normalize", "warned"), [("client", True), ("federated", True), ({"f0": [0, 16]}, False)])
def test_an_epsilon_of_examples_assumes_that_they_do_not_decide_the_scale(normalize: Any, warned: bool) -> None:
    names = tuple(f"f{place}" for place in range(16))
    source = replace(as_dataset(np.random.default_rng(0).random((40, 16)), np.arange(40) % 2), features=names)
    data = federate(source, clients=2, normalize=normalize)
    private = replace(plan(), privacy=PrivacyTable(example_dp=ExampleTable(epsilon=4.0)))
    found = [said for said in cautions(private, Task(Dense), data) if "decide how data is scaled" in said]
    assert len(found) == warned
    assert [*cautions(replace(plan(), privacy=PrivacyTable()), Task(Dense), data)] == []
