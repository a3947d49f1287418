"""Training without sharing: the baseline that shows what federation gains."""

from __future__ import annotations

from typing import ClassVar

import torch

from fedloom.algorithm import Algorithm, Clients, Cohort, Groups, Task, Tree, Update


class LocalOnly(Algorithm):
    """Each client trains its own model; nothing is sent.

    w_k ← steps on F_k from w_k, round after round. This is the baseline that federation should beat.
    """

    takes_stale: ClassVar[bool] = True  # there is nothing to be stale
    trains_once: ClassVar[bool] = True
    name: ClassVar[str] = "local"

    def init(self, task: Task, model: Tree) -> Groups:
        return {}

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {**super().init_own(task, model), "model": model}

    def largest_weight(self, examples: int) -> float:
        return 1.0

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        cohort.reduce(self.client, state)
        return state

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, own["model"], shared, own, data)
        nothing = Update({}, torch.ones(len(data)), trained=trained)
        return nothing, {**trained.own, "model": trained.model}

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        return own["model"]
