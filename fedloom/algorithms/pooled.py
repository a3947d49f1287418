"""Training on pooled data: the baseline that shows what federation costs."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from fedloom.algorithm import Algorithm, Clients, Cohort, Groups, Task, Update, expand, uniform


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
