"""Rehearsals: what they tell is what a run counts and raises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from fedloom import tree
from fedloom.algorithm import Clients, Groups, Step, Tree
from fedloom.algorithms import ALGORITHMS, FedAvg
from fedloom.data.split import Split
from fedloom.errors import InputError, TrainingError
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from fedloom.training.probe import probe
from fedloom.tuning.rehearsal import MessageBytes, rehearse
from tests.conftest import Dense, Logit, Normed, Pictures, federation, slow_after, two_classes

CLIENTS = 7
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ALGORITHMS),
    ("fedavg", {"rule": {"name": "krum", "byzantine": 2}}),
    ("evaluation_weighted", {"scores": "pre"}),
    ("fedavg", {"optimizer": "adam", "optimizer_state": "keep", "epochs": 7.0}),
    ("peer", {"weights": "score", "scores": "pre"}),
    *(("peer", {"topology": topology, "weights": "metropolis"}) for topology in ("ring", "star", "erdos_renyi")),
    ("ifca", {"clusters": 3}),
]


def told(name: str, net: type[nn.Module], clients: int = CLIENTS, **settings: Any) -> tuple[MessageBytes | None, Task]:
    data = federation([20 + number for number in range(clients)])
    task = Task(net)
    if net is Logit:
        data, task = two_classes(data), Task(net, loss="bce")
    reports = rehearse(ALGORITHMS[name](**settings), data, task, probe(data, task), clients)
    return None if reports is None else MessageBytes.of(reports), task


@pytest.mark.parametrize(
    ("name", "settings"), slow_after(8, SETTINGS), ids=[f"{name}-{given}" for name, given in SETTINGS]
)
def test_what_is_told_beforehand_is_what_a_run_counts(name: str, settings: dict[str, Any]) -> None:
    algorithm = ALGORITHMS[name](**settings)
    several = {"fedrep", "openai_es", "snes"}  # need a head, or one output for each class
    for net in (Logit,) if name == "cocoa" else (Pictures,) if name in several else (Pictures, Logit):
        found, task = told(name, net, **settings)
        data = federation([20 + number for number in range(CLIENTS)])
        data = two_classes(data) if net is Logit else data
        (record,) = fit(data, task, algorithm, 1, evaluation=Evaluation(splits=()))
        counted = MessageBytes(sum(r.bytes_up for r in record.reports), sum(r.bytes_down for r in record.reports))
        assert found == (MessageBytes(0, 0) if algorithm.pooled else counted)


def test_what_algorithms_send() -> None:
    def models(name: str, clients: int, **settings: Any) -> tuple[int, int]:
        """In models, up and down."""
        found, task = told(name, Dense, clients, **settings)
        assert found is not None
        return round(found.up / tree.size(task.initial())), round(found.down / tree.size(task.initial()))

    assert models("local", 5) == models("pooled", 5) == (0, 0)
    assert models("fedavg", 5) == models("fedsgd", 5) == (5, 5)
    assert models("scaffold", 5) == (10, 10)
    assert models("ifca", 5, clusters=3)[1] == 15
    assert models("peer", 5) == (5, 20)  # a server relays what each client sends once
    assert models("peer", 5, topology="ring", scores="pre", weights="score") == (10, 20)


def test_what_a_few_examples_cannot_tell_is_left_open() -> None:
    assert told("fedavg", Dense, lr=1e38, batch_size=1)[0] is None


def test_what_a_run_would_refuse_is_refused() -> None:
    with pytest.raises(InputError, match="has no auroc to be weighted by: the task measures loss, accuracy"):
        told("evaluation_weighted", Dense, metric="auroc")


class Broken(FedAvg):
    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return shared["nothing"]


def test_an_error_in_your_own_algorithm_is_found_in_the_rehearsal() -> None:
    data, task = federation((20, 20)), Task(Dense)
    with pytest.raises(TrainingError, match=r"^A rehearsal with 20 examples failed\. Round 1.*KeyError: 'nothing'"):
        rehearse(Broken(), data, task, probe(data, task), 2)


class NoUpdate(FedAvg):
    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> Any:
        return super().client(task, shared, own, data)[0]


class Undefined(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float("nan")  # type: ignore[no-any-return]


def test_a_wrong_answer_and_a_model_without_a_finite_loss_are_found_in_the_rehearsal() -> None:
    data = federation((20, 20))
    with pytest.raises(InputError, match=r"^NoUpdate\.client \(\S*test_rehearsal\.py, line \d+\) returned an Update\."):
        rehearse(NoUpdate(), data, Task(Dense), probe(data, Task(Dense)), 2)
    with pytest.raises(
        TrainingError, match=r"^A rehearsal .*the loss of the initial model, before any step, is not fin"
    ):
        rehearse(FedAvg(), data, Task(Undefined), probe(data, Task(Undefined)), 2)


def test_steps_that_diverge_in_the_rehearsal_do_not_make_an_experiment_invalid() -> None:
    data, task = federation((20, 20)), Task(Dense)
    assert rehearse(FedAvg(lr=1e38, batch_size=2), data, task, probe(data, task), 2) is None


def test_a_table_that_says_its_own_splits_is_rehearsed() -> None:
    sizes = np.array([[12, 4, 4], [20, 5, 5]])
    data, task = replace(federation([20, 30]), split_sizes=sizes), Task(Pictures)
    assert rehearse(FedAvg(), data, task, probe(data, task), 2) is not None


@pytest.mark.parametrize(("sizes", "batch_size"), [((40, 40), 11), ((6, 6, 6), 3), ((2,), 8)])
def test_a_last_batch_of_one_in_the_rehearsal_alone_is_not_refused(sizes: tuple[int, ...], batch_size: int) -> None:
    data, task = federation(sizes, split=Split(train=1.0, validation=0.0, test=0.0)), Task(Normed)
    algorithm = FedAvg(batch_size=batch_size)
    assert [*fit(data, task, algorithm, 1, evaluation=Evaluation(splits=()))]
    assert rehearse(algorithm, data, task, probe(data, task), len(sizes)) is not None
