"""FedNova."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from fedloom.algorithm import Central, Clients, Cohort, Groups, Task, Update, by_size, without
from fedloom.tree import add, expand, scale, select, sub


class FedNova(Central):
    """Averages what clients change per local step.

    w ← w − (Σ p_k a_k) Σ p_k (w − w_k) / a_k, where a_k is the effective number of local steps. A client that takes
    more steps does not count for more. Use it for clients with different amounts of data or work.
    """

    takes_noise: ClassVar[bool] = False
    has_one_rate: ClassVar[bool] = True
    refuses: ClassVar[dict[str, str]] = {"optimizer": 'FedNova counts steps of optimizer = "sgd": use that, or fedavg.'}
    reference: ClassVar[str] = "Wang et al., Tackling the Objective Inconsistency Problem, NeurIPS 2020"

    weights: Literal["examples", "uniform"] = "examples"
    """How much each client counts in the mean."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = cohort.reduce(self.client, state, rule=self.rule)
        before = select(state["model"], mean["direction"])
        moved = add(before, mean["direction"], scale=mean["steps"]["effective"])
        return {"model": {**state["model"], **mean["buffers"], **moved}}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        steps, momentum = trained.steps.to(torch.float64), self.train.momentum
        effective = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
        change = sub(select(trained.model, task.trainable), select(shared["model"], task.trainable))
        buffers = without(trained.model, task.trainable)
        groups = {"direction": scale(change, 1 / effective), "steps": {"effective": effective}, "buffers": buffers}
        weigh = by_size(self.weights, data.examples)
        return Update(groups, weigh, trained=trained, positions={"buffers": "model"}), trained.own
