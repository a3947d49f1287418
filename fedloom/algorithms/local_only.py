"""No sharing: the baseline that tells what federation gains."""

from __future__ import annotations

from typing import ClassVar

import torch

from fedloom.algorithm import Algorithm, Clients, Cohort, Groups, Task, Tree, Update


class LocalOnly(Algorithm):
    """Every client trains its own model on its own data; nothing is sent.

    w_k ← steps on F_k from w_k, round after round: what federation is to be better than.
    """

    name: ClassVar[str] = "local"

    def init(self, task: Task, model: Tree) -> Groups:
        return {}

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {**super().init_own(task, model), "model": model}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        cohort.reduce(self.client, state)
        return state

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, own["model"], shared, own, data)
        nothing = Update({}, torch.ones(len(data)), trained=trained)
        return nothing, {**trained.own, "model": trained.model}

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        return own["model"]
