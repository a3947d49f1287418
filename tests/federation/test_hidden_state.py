"""An algorithm of your own that keeps something in itself is refused, however it gets around the frozen record."""

from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import Any, ClassVar

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


class InItsClass(FedAvg):
    """Counts rounds in its class, which is not frozen."""

    seen: ClassVar[int] = 0

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        type(self).seen += 1
        return super().round(state, cohort)


class InAListOfABase(InItsClass):
    """Collects clients in a list that all algorithms of the class share."""

    met: ClassVar[list[int]] = []

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        return FedAvg.round(self, state, cohort)

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        self.met.append(len(data))
        return super().client(task, shared, own, data)


class InAListInADict(InItsClass):
    """Counts clients in a list inside a dictionary of its class."""

    store: ClassVar[dict[str, Any]] = {"x": ({"y": [0]},)}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        self.store["x"][0]["y"][0] += 1
        return FedAvg.round(self, state, cohort)


class InADeque(InItsClass):
    """Keeps what it saw last."""

    last: ClassVar[deque[int]] = deque(maxlen=3)

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        self.last.append(len(self.last))
        return FedAvg.round(self, state, cohort)


class InAnInnerClass(InItsClass):
    """Counts rounds in a class inside its class."""

    class Store:
        """Counts."""

        seen = 0
        cycle: ClassVar[list[Any]] = []

    Store.cycle.append(Store)

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        self.Store.seen += 1
        return FedAvg.round(self, state, cohort)


class Reading(FedAvg):
    """Reads what containers of its class hold, and changes nothing."""

    table: ClassVar[dict[str, Any]] = {"factors": [(1.0, 2.0)]}

    class Store:
        """Holds itself."""

        cycle: ClassVar[list[Any]] = []

    Store.cycle.append(Store)

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        (low, _), *_ = self.table["factors"]
        return {name: leaf * low for name, leaf in step.grad.items()}


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
        (InItsClass, "InItsClass.round", "seen"),
        (InAListOfABase, "InAListOfABase.client", "met"),
        (InAListInADict, "InAListInADict.round", "store"),
        (InADeque, "InADeque.round", "last"),
        (InAnInnerClass, "InAnInnerClass.round", "Store"),
    ],
)
def test_a_run_refuses_what_an_algorithm_keeps_in_itself(kind: type[FedAvg], method: str, name: str) -> None:
    with pytest.raises(TrainingError) as caught:
        train(kind())
    said = str(caught.value)
    assert said.startswith(method)
    assert f", or what it calls, keeps '{name}' in the algorithm itself or its class." in said
    assert "belongs in the state that `init` and `round` return, and what a client remembers in `own`" in said


def test_a_value_that_is_computed_once_is_no_state() -> None:
    assert len(train(Remembering())) == 2
    assert len(train(Reading())) == 2
