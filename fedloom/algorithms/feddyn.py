"""FedDyn."""

from __future__ import annotations

from typing import ClassVar

from fedloom.algorithm import Central, Clients, Cohort, Groups, Positive, Step, Task, Tree, Update, uniform
from fedloom.tree import add, expand, select, sub, zeros_like


class FedDyn(Central):
    """Changes the clients' losses so that their optima agree.

    A local step uses g − g_k + α (w − w_global). Then g_k ← g_k − α (w_k − w), h ← h − α (1/K) Σ (w_k − w) and
    w ← (1/m) Σ w_k − h / α. Use it for many local steps on data that differ between clients.
    """

    trains_once: ClassVar[bool] = True
    needs_all_from_start: ClassVar[str] = "h is a mean over all clients of the run"
    remembers_sent: ClassVar[bool] = True
    reference: ClassVar[str] = "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021"

    alpha: Positive = 0.1
    """Strength of the dynamic regularisation, α."""

    def init(self, task: Task, model: Tree) -> Groups:
        return {"model": model, "bend": zeros_like(select(model, task.trainable))}

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {**super().init_own(task, model), "gradient": zeros_like(select(model, task.trainable))}

    def largest_weight(self, examples: int) -> float:
        return 1.0

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = cohort.reduce(self.client, {"model": state["model"]}, rule=self.rule)["model"]
        before = select(state["model"], state["bend"])
        trained = select(mean, before)
        bend = add(state["bend"], sub(trained, before), scale=-self.alpha * cohort.share)  # h
        return {"model": {**mean, **add(trained, bend, scale=-1 / self.alpha)}, "bend": bend}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        change = sub(select(trained.model, task.trainable), select(shared["model"], task.trainable))
        update = Update({"model": trained.model}, uniform(data.examples), trained=trained, positions={"model": "model"})
        return update, {**trained.own, "gradient": add(own["gradient"], change, scale=-self.alpha)}

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return add(sub(step.grad, own["gradient"]), sub(step.params, step.start), scale=self.alpha)
