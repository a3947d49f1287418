"""FedDC."""

from __future__ import annotations

from typing import ClassVar

from fedloom.algorithm import Clients, Cohort, Groups, NonNegative, Step, Task, Tree, Update, by_size
from fedloom.algorithms.fedavg import FedAvg
from fedloom.training.settings import only_plain_sgd
from fedloom.tree import add, expand, scale, select, sub, zeros_like


class FedDC(FedAvg):
    """Clients learn their drift, and the server corrects it.

    Each local step uses g + α (h_k + w_k − w) + d_k − d. Then d_k ← (w_k − w) / (steps · lr), h_k ← h_k + w_k − w,
    d ← Σ p_k d_k, h ← h + (m/K) Σ p_k (w_k − w) and w ← Σ p_k w_k + h, where m of K clients take part. Use it for many
    local steps on data that differ between clients.
    """

    takes_stale: ClassVar[bool] = False  # h must be the mean of what clients keep, which nothing scales
    divides_by_lr: ClassVar[bool] = True
    refuses: ClassVar[dict[str, str]] = only_plain_sgd("FedDC divides a client's change by lr")
    needs_all_from_start: ClassVar[str] = "h is a mean over all clients of the run"
    remembers_sent: ClassVar[bool] = True
    reference: ClassVar[str] = "Gao et al., FedDC: Federated Learning with Non-IID Data via Local Drift, CVPR 2022"

    alpha: NonNegative = 0.01
    """How strongly the drift is bound to the distance from the global model, α."""

    def init(self, task: Task, model: Tree) -> Groups:
        zeros = zeros_like(select(model, task.trainable))
        return {"model": model, "drift": zeros, "direction": zeros}

    def init_own(self, task: Task, model: Tree) -> Groups:
        zeros = zeros_like(select(model, task.trainable))
        return {**super().init_own(task, model), "drift": zeros, "direction": zeros}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        shared = {"model": state["model"], "direction": state["direction"]}
        mean = cohort.reduce(self.client, shared, rule=self.rule)
        before = select(state["model"], state["drift"])
        trained = select(mean["model"], before)
        drift = add(state["drift"], sub(trained, before), scale=cohort.share)  # h
        return {"model": {**mean["model"], **add(trained, drift)}, "drift": drift, "direction": mean["direction"]}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        change = sub(select(trained.model, task.trainable), select(shared["model"], task.trainable))
        assert trained.lr_sums is not None
        direction = scale(change, 1 / trained.lr_sums)
        weight = by_size(self.weights, data.examples)
        groups = {"model": trained.model, "direction": direction}
        update = Update(groups, weight, trained=trained, positions={"model": "model"})
        return update, {**trained.own, "drift": add(own["drift"], change), "direction": direction}

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        bound = add(step.grad, add(own["drift"], sub(step.params, step.start)), scale=self.alpha)
        return add(bound, sub(own["direction"], shared["direction"]))
