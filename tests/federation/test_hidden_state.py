"""An algorithm of your own that keeps something in itself is refused, however it gets around the frozen record."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pytest

from fedloom.algorithm import Clients, Cohort, Groups, Step, Task, Tree, Update
from fedloom.algorithms.fedavg import FedAvg
from fedloom.errors import TrainingError
from fedloom.federation.engine import Evaluation, fit
from tests.conftest import ALL_TRAIN, Dense, federation


class InItsDict(FedAvg):
    """Counts rounds in its own dictionary."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        vars(self)["seen"] = vars(self).get("seen", 0) + 1
        return super().round(state, cohort)


class InPrivate(FedAvg):
    """Counts steps in a private attribute, which may be set although the record is frozen."""

    _seen: int = 0

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        self._seen += 1
        return step.grad


class InAList(FedAvg):
    """Collects clients in a list."""

    seen: list[int] = []  # noqa: RUF012

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        self.seen.append(len(data))
        return super().client(task, shared, own, data)


class FromTheStart(FedAvg):
    """Keeps the initial model, which a run that continues does not have."""

    def init(self, task: Task, initial: Tree) -> Groups:
        vars(self)["seen"] = initial
        return super().init(task, initial)


class Remembering(FedAvg):
    """Computes a value once, which changes nothing."""

    @cached_property
    def factor(self) -> float:
        return 2.0 * self.train.lr

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return {name: leaf * self.factor for name, leaf in step.grad.items()}


def train(algorithm: FedAvg) -> list[Any]:
    data = federation((5, 7), split=ALL_TRAIN)
    return list(fit(data, Task(Dense), algorithm, 2, evaluation=Evaluation(splits=())))


@pytest.mark.parametrize(
    ("kind", "method", "name"),
    [
        (InItsDict, "InItsDict.round", "seen"),
        (InPrivate, "InPrivate.client", "_seen"),
        (InAList, "InAList.client", "seen"),
        (FromTheStart, "FromTheStart.init", "seen"),
    ],
)
def test_a_run_refuses_what_an_algorithm_keeps_in_itself(kind: type[FedAvg], method: str, name: str) -> None:
    with pytest.raises(TrainingError) as caught:
        train(kind())
    said = str(caught.value)
    assert said.startswith(method)
    assert f", or what it calls, keeps '{name}' in the algorithm itself." in said
    assert "belongs in the state that `init` and `round` return, and what a client remembers in `own`" in said


def test_a_value_that_is_computed_once_is_no_state() -> None:
    assert len(train(Remembering())) == 2
