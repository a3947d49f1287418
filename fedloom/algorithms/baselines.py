"""The baselines without a paper: training alone shows what federation gains, and training on all data what it costs."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import model_validator

from fedloom.algorithm import Algorithm, Clients, Cohort, Groups, Task, Tree, Update, expand, uniform


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


class Pooled(Algorithm):
    """Trains one model on all data in one place; not federated.

    w ← steps on Σ (n_k / n) F_k from w, on the union of all clients' training splits, for rounds × epochs and with one
    optimiser throughout. This is the baseline that federation is compared with.
    """

    pooled: ClassVar[bool] = True

    @model_validator(mode="after")
    def _one_optimizer(self) -> Pooled:
        if self.train.optimizer_state == "reset":
            object.__setattr__(self, "train", self.train.replace(optimizer_state="keep"))
        return self

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        return {"model": cohort.reduce(self.client, state)["model"]}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        update = Update({"model": trained.model}, uniform(data.examples), trained=trained, positions={"model": "model"})
        return update, trained.own
