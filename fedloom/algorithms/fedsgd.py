"""Federated gradient descent."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedloom.algorithm import Central, Clients, Cohort, Groups, Task, Update, by_size, full_gradient
from fedloom.tree import add, expand, select


class FedSGD(Central):
    """Clients send full gradients, and the server takes a step.

    w ← w − lr · Σ n_k g_k / Σ n_k, where g_k is the gradient over all examples of client k. This equals FedAvg with one
    epoch of one full batch, and is the baseline for FedAvg. Of the training parameters, only `lr` and
    `schedule` have a meaning.
    """

    refuses: ClassVar[dict[str, str]] = {
        name: f"FedSGD takes one plain gradient step a round, so '{name}' has no meaning. Leave it out, or use fedavg "
        'with batch_size = "full".'
        for name in ("optimizer", "momentum", "weight_decay", "clip", "patience", "local_schedule", "clients")
    }
    reference: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"

    weights: Literal["examples", "uniform"] = "examples"
    """How much each client counts in the mean."""

    def passes(self, method: str) -> float:
        return 1.0

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = cohort.reduce(self.client, state, rule=self.rule)
        stepped = add(select(state["model"], mean["gradient"]), mean["gradient"], scale=-self.train.lr_at(cohort.round))
        return {**state, "model": {**state["model"], **stepped, **mean["buffers"]}}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        full = full_gradient(task, data, expand(shared["model"], len(data)))
        groups = {"gradient": full.gradient, "buffers": full.buffers}
        return Update(groups, by_size(self.weights, data.examples), positions={"buffers": "model"}), own
