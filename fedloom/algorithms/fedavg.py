"""Federated averaging."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedloom.algorithm import Central, Clients, Cohort, Groups, Task, Trained, Tree, Update, by_size, expand, select


class FedAvg(Central):
    """Clients train on their own data, and the server averages.

    w ← Σ p_k w_k, where p_k is proportional to the number of training examples, or the same for every client.

    >>> FedAvg(lr=0.1, epochs=5, batch_size=10).train.epochs
    5.0
    """

    takes_stale: ClassVar[bool] = True
    trains_once: ClassVar[bool] = True
    reference: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"

    weights: Literal["examples", "uniform"] = "examples"
    """How much each client counts in the mean."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        return {**state, "model": self.average(cohort, state)}

    def average(self, cohort: Cohort, shared: Groups) -> Tree:
        """Train the clients of the cohort from `shared["model"]` and return the mean of their weights."""
        return cohort.reduce(self.client, shared, rule=self.rule)["model"]

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        return self.answer(shared, trained, data), trained.own

    def answer(self, shared: Groups, trained: Trained, data: Clients) -> Update:
        """Return what clients send after training: the leaves that the server shared, as positions."""
        sent = {"model": select(trained.model, shared["model"])}
        return Update(sent, by_size(self.weights, data.examples), trained=trained, positions={"model": "model"})
