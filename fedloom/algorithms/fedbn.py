"""FedBN."""

from __future__ import annotations

from typing import ClassVar

from fedloom.algorithm import Clients, Cohort, Groups, Task, Tree, Update, expand, select, without
from fedloom.algorithms.fedavg import FedAvg


class FedBN(FedAvg):
    """FedAvg in which each client keeps its normalisation layers.

    w ← Σ p_k w_k for all other layers; the normalisation layers of client k continue from where client k left them. Use
    it if the distribution of features differs between clients. Layers are found by their type, at any depth.
    """

    reference: ClassVar[str] = "Li et al., FedBN: Federated Learning on Non-IID Features, ICLR 2021"

    def caution(self, task: Task) -> str:
        return "" if task.normalization else "the model has no normalisation layers, so this is FedAvg"

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {**super().init_own(task, model), "norm": select(model, task.normalization)}

    def average(self, cohort: Cohort, shared: Groups) -> Tree:
        sent = without(shared["model"], cohort.task.normalization)
        return {**shared["model"], **super().average(cohort, {**shared, "model": sent})}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        start = {**expand(shared["model"], len(data)), **own["norm"]}
        trained = self.fit(task, start, shared, own, data)
        return self.answer(shared, trained, data), {**trained.own, "norm": select(trained.model, task.normalization)}

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        return {**shared["model"], **own["norm"]} if own else shared["model"]
