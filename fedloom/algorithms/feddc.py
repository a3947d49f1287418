"""FedDC."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from fedloom.algorithm import Clients, Cohort, Groups, InputError, NonNegative, Step, Task, Tree, Update, by_size
from fedloom.algorithms.fedavg import FedAvg
from fedloom.tree import add, expand, scale, select, sub, zeros_like


class FedDC(FedAvg):
    """Clients learn how far they drift, and the server corrects it.

    Each local step uses g + α (h_k + w_k − w) + d_k − d. Then d_k ← (w_k − w) / (steps · lr), h_k ← h_k + w_k − w,
    d ← Σ p_k d_k and w ← Σ p_k (w_k + h_k). Use it for many local steps on data that differ between clients.
    """

    reference: ClassVar[str] = "Gao et al., FedDC: Federated Learning with Non-IID Data via Local Drift, CVPR 2022"

    alpha: NonNegative = 0.01
    """How strongly the drift is bound to the distance from the global model, α."""

    @model_validator(mode="after")
    def _plain_steps(self) -> FedDC:
        if self.train.optimizer != "sgd" or self.train.momentum:
            raise InputError('FedDC divides a client\'s change by lr: use optimizer = "sgd" without momentum.')
        return self

    def init(self, task: Task, model: Tree) -> Groups:
        return {"model": model, "direction": zeros_like(select(model, task.trainable))}

    def init_own(self, task: Task, model: Tree) -> Groups:
        zeros = zeros_like(select(model, task.trainable))
        return {**super().init_own(task, model), "drift": zeros, "direction": zeros}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = cohort.reduce(self.client, state, rule=self.rule)
        return {"model": mean["model"], "direction": mean["direction"]}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        reached = select(trained.model, task.trainable)
        change = sub(reached, select(shared["model"], task.trainable))
        drift = add(own["drift"], change)
        assert trained.lr_sums is not None
        direction = scale(change, 1 / trained.lr_sums)
        update = Update(
            {"model": {**trained.model, **add(reached, drift)}, "direction": direction},
            by_size(self.weights, data.examples),
            trained=trained,
            positions={"model": "model"},
        )
        return update, {**trained.own, "drift": drift, "direction": direction}

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        bound = add(step.grad, add(own["drift"], sub(step.params, step.start)), scale=self.alpha)
        return add(bound, sub(own["direction"], shared["direction"]))
