"""SCAFFOLD."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedloom.algorithm import Central, Clients, Cohort, Groups, Positive, Step, Task, Tree, Update, by_size, uniform
from fedloom.training.settings import only_plain_sgd
from fedloom.tree import add, expand, scale, select, sub, zeros_like


class Scaffold(Central):
    """Control variates correct the drift of clients.

    Each local step uses g − c_k + c. Then c_k ← c_k − c + (w − w_k) / (steps · lr), w ← w + η Σ p_k (w_k − w) and
    c ← c + (1/K) Σ (c_k⁺ − c_k). Use it for many local steps on data that differ between clients.
    """

    takes_stale: ClassVar[bool] = True
    trains_once: ClassVar[bool] = True
    remembers_sent: ClassVar[bool] = True
    divides_by_lr: ClassVar[bool] = True
    refuses: ClassVar[dict[str, str]] = only_plain_sgd("Scaffold's control variates need plain gradient steps")
    needs_all_from_start: ClassVar[str] = "the control variate c is a mean over all clients of the run"
    reference: ClassVar[str] = "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging, ICML 2020 (option II)"

    weights: Literal["examples", "uniform"] = "uniform"
    """How much each client counts in the mean."""
    server_lr: Positive = 1.0
    """The server's learning rate, η."""

    def init(self, task: Task, model: Tree) -> Groups:
        return {"model": model, "control": zeros_like(select(model, task.trainable))}

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {**super().init_own(task, model), "control": zeros_like(select(model, task.trainable))}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = cohort.reduce(self.client, state, rule=self.rule)
        before = select(state["model"], state["control"])
        moved = add(before, sub(select(mean["model"], before), before), scale=self.server_lr)
        control = add(state["control"], mean["control"], scale=cohort.share)
        return {"model": {**mean["model"], **moved}, "control": control}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        drift = sub(select(shared["model"], task.trainable), select(trained.model, task.trainable))
        assert trained.lr_sums is not None
        change = sub(scale(drift, 1 / trained.lr_sums), shared["control"])
        groups = {"model": trained.model, "control": change}
        weigh = {"model": by_size(self.weights, data.examples), "control": uniform(data.examples)}
        update = Update(groups, weigh, trained=trained, positions={"model": "model"})
        return update, {**trained.own, "control": add(own["control"], change)}

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return add(sub(step.grad, own["control"]), shared["control"])
