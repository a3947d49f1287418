"""Every algorithm declares which groups of an update are positions, and from which base they started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.aggregation.means import mean
from fedloom.algorithm import Clients, Groups, Task, Update
from fedloom.algorithms import ALGORITHMS
from fedloom.algorithms.fedavg import FedAvg
from fedloom.backends.serial import Serial
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.work import ClientWork, Outcome, Work
from fedloom.testing import check_algorithm
from fedloom.tree import Tree, select, sub
from tests.conftest import Dense, Logit, federation, two_classes


class Recording(Serial):
    """Keeps what clients were sent and what each of them answered."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: list[tuple[Groups, Outcome]] = []

    def run(self, work: Work) -> Any:
        if isinstance(work, ClientWork):
            self.seen.append((work.shared, replace(work, keep="stack").perform(self.place)))
        return super().run(work)


def recorded(name: str, **settings: Any) -> list[tuple[Groups, Outcome]]:
    data = federation((9, 23, 14))
    net: Any = Dense
    if name == "cocoa":
        net, data = Logit, two_classes(data)
    task = Task(net, loss="bce" if name == "cocoa" else "cross_entropy", dtype="float64")
    backend = Recording(data, task)
    for _ in fit(data, task, ALGORITHMS[name](**settings), 2, backend=backend, evaluation=Evaluation(splits=())):
        pass
    return backend.seen


def distance(a: Tree, b: Tree) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in b)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_mean_of_positions_is_the_base_plus_the_mean_change(name: str) -> None:
    for shared, outcome in recorded(name):
        assert outcome.positions is not None
        for group, base in outcome.positions.items():
            stacked, weights = outcome.stack[group], outcome.weights[group]
            if stacked and float(weights.sum()) > 0:
                before = select(shared[base], stacked)
                assert distance(sub(mean(stacked, weights), before), mean(sub(stacked, before), weights)) < 1e-12


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"fed_dropout", "cocoa"}))
def test_without_training_positions_stay_at_their_base_and_nothing_else_looks_like_one(name: str) -> None:
    still = {"lr": 1e-12} if name not in ("neuroevolution", "random_search", "openai_es", "snes") else {}
    for shared, outcome in recorded(name, **still):
        for group, stacked in outcome.stack.items():
            counts = outcome.weights[group] > 0
            moved = {n: leaf[counts] for n, leaf in stacked.items()}
            base = (outcome.positions or {}).get(group)
            if base is not None and stacked and bool(counts.any()):
                assert distance(moved, select(shared[base], stacked)) < 1e-8, f"{group} does not start from {base}"
            elif base is None and stacked and stacked.keys() <= shared.get("model", {}).keys():
                assert distance(moved, select(shared["model"], stacked)) > 1e-3, f"{group} is not declared"


class Undeclared(FedAvg):
    """Declares a base that the server did not share."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, kept = super().client(task, shared, own, data)
        return replace(update, positions={"model": "modle"}), kept


class OtherLeaves(FedAvg):
    """Declares a base with other leaves."""

    def round(self, state: Groups, cohort: Any) -> Groups:
        wrong = {"other": {"w": torch.zeros(1)}}
        return {"model": cohort.reduce(self.client, {**state, **wrong}, rule=self.rule)["model"]}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, kept = super().client(task, shared, own, data)
        return replace(update, positions={"model": "other"}), kept


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Undeclared, "'modle', which is not in what was shared"), (OtherLeaves, "'other' does not have")],
)
def test_check_algorithm_refuses_a_base_that_does_not_fit(kind: type[FedAvg], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_algorithm(kind)
