"""Federated averaging."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from fedloom import weights
from fedloom.algorithm import Algorithm, Update
from fedloom.clients import Clients
from fedloom.cohort import Cohort
from fedloom.local import Groups
from fedloom.task import Task
from fedloom.tree import expand


class FedAvg(Algorithm):
    """Clients train on their own data, the server averages their weights: w ← Σ n_k w_k / Σ n_k.

    >>> FedAvg(lr=0.1, epochs=5, batch_size=10).train.epochs
    5.0
    """

    reference: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"

    weights: Literal["examples", "uniform"] = "examples"

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = cohort.reduce(self.client, state)
        return {**state, "model": mean["model"]}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        return Update({"model": trained.model}, self.weigh(data), trained=trained), trained.own

    def weigh(self, data: Clients) -> Tensor:
        """How much each client counts."""
        return weights.by_examples(data.examples) if self.weights == "examples" else weights.uniform(data.examples)
