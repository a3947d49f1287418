"""Hierarchical averaging."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import model_validator

from fedloom.algorithm import Clients, Cohort, Count, Groups, InputError, Task, Tree, Update, mean, stack
from fedloom.algorithms.fedavg import FedAvg


class Staged(FedAvg):
    """Averages within groups, and then between groups.

    w ← Σ_g (p_g / p) Σ_(k in g) (p_k / p_g) w_k, as edge servers and a cloud would compute it. It equals FedAvg,
    because a group counts as much as its clients together.
    """

    takes_stale: ClassVar[bool] = False
    takes_noise: ClassVar[bool] = False
    reference: ClassVar[str] = "Liu et al., Client-Edge-Cloud Hierarchical Federated Learning, ICC 2020"

    groups: Count = 2
    """How many groups the clients are divided into."""

    @model_validator(mode="after")
    def _only_sums(self) -> Staged:
        if self.rule is not None:
            raise InputError("Staged adds sums of sums, so it cannot use a rule. Leave the rule out, or use fedavg.")
        return self

    @property
    def sums_cover_all(self) -> bool:
        return self.groups == 1

    def average(self, cohort: Cohort, shared: Groups) -> Tree:
        model = shared["model"]
        place = torch.arange(len(cohort)) % self.groups
        found = cohort.reduce(self.member, shared, each={"group": {"number": place}})
        present = [name for name, weight in found.weights.items() if weight > 0]
        flat = mean(stack([found[name] for name in present]), torch.stack([found.weights[name] for name in present]))
        rounded = {name: leaf if model[name].is_floating_point() else leaf.round() for name, leaf in flat.items()}
        return {name: leaf.to(model[name].dtype) for name, leaf in rounded.items()}

    def member(self, task: Task, shared: Groups, own: Groups, data: Clients, each: Groups) -> tuple[Update, Groups]:
        """Answer as FedAvg's client does, with weight only in the client's own group."""
        update, kept = self.client(task, shared, own, data)
        weigh, number = update.weights("model"), each["group"]["number"]
        # counters are rounded once, at the end
        sent = {n: x if x.is_floating_point() else x.to(torch.float64) for n, x in update.groups["model"].items()}
        names = [f"group{group}" for group in range(self.groups)]
        split = {name: torch.where(number == group, weigh, 0.0) for group, name in enumerate(names)}
        return Update(dict.fromkeys(names, sent), split, {}, update.trained, dict.fromkeys(names, "model")), kept
