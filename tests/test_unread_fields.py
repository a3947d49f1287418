"""Settings that no method reads are found, and others never are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import model_validator

from fedloom.algorithm import Algorithm, Clients, Cohort, Groups, Step, Task, Tree, Update, add, expand, sub
from fedloom.algorithms import CLASSES
from fedloom.algorithms.fedavg import FedAvg
from fedloom.unread_fields import unread_fields, without_effect


class Pull(FedAvg):
    """Reads its setting in a correction."""

    mu: float = 0.1

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return add(step.grad, sub(step.params, step.start), scale=self.mu)


class Ignores(Pull):
    """Overrides the method that reads the setting."""

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return step.grad


class Inherits(Pull):
    """Calls the method that reads the setting."""

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return super().correct(step, shared, own)


class Weighs(FedAvg):
    """Weighs clients in its own way, whatever `weights` says."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        return Update({"model": trained.model}, torch.ones(len(data)), positions={"model": "model"}), trained.own


class Means(FedAvg):
    """Takes a mean, whatever `rule` says."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        return {"model": cohort.reduce(self.client, state)["model"]}


class PassesOn(Ignores):
    """Lets a function read what it likes."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        vars(self)
        return super().round(state, cohort)


class LooksInside(Ignores):
    """Reads its fields as a dict."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        return super().round(state, cohort) if self.__dict__["mu"] else state


class Derives(Ignores):
    """Makes a learning rate of its setting."""

    @model_validator(mode="before")
    @classmethod
    def _rate(cls, values: Any) -> Any:
        return {"lr": 0.1 * values.get("mu", 1.0), **values}


class Property(Ignores):
    """Reads its setting in a property."""

    @property
    def strength(self) -> float:
        return 2 * self.mu

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return add(step.grad, step.params, scale=self.strength)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        *((kind, []) for kind in (Pull, Inherits, PassesOn, LooksInside, Derives, Property)),
        (Ignores, ["mu"]),
        (Weighs, ["weights"]),
        (Means, ["rule"]),
    ],
)
def test_a_setting_is_without_effect_if_no_method_that_runs_reads_it(kind: type[Algorithm], found: list[str]) -> None:
    assert unread_fields(kind) == found


def test_a_class_without_source_text_has_no_findings() -> None:
    made: dict[str, Any] = {"FedAvg": FedAvg, "__name__": __name__}
    exec("class Typed(FedAvg):\n    mu: float = 0.1\n    def round(self, state, cohort):\n        return state", made)
    assert unread_fields(made["Typed"]) == []


@pytest.mark.parametrize("name", CLASSES)
def test_all_settings_of_fedloom_have_an_effect(name: str) -> None:
    assert unread_fields(CLASSES[name]) == []


def test_the_sentence_names_the_setting_and_the_class() -> None:
    assert without_effect(Ignores) == {
        "mu": "The setting mu of Ignores has no effect: no method that runs reads self.mu."
    }
