"""MOON."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedloom.algorithm import Clients, Groups, NonNegative, Positive, Step, Task, Tree, Update, View, add
from fedloom.algorithms.fedavg import FedAvg


class Moon(FedAvg):
    """Clients' features stay near the global model's features.

    w_k ← w_k − lr ∇[f + mu · mean of −log(e^{s(w)} / (e^{s(w)} + e^{s(v)}))], then w ← Σ p_k w_k. For each example,
    s(w) is the cosine similarity of its features in the model that is trained and in the global model w, divided by
    the temperature; v is the client's model of its last round. Features are the input of the model's last layer with
    parameters, or of the layer that `layer` names. In a model of one layer, features are the input, and this is
    FedAvg. Use it for pictures whose labels differ between clients.
    """

    trains_once: ClassVar[bool] = False
    reads_batch: ClassVar[bool] = True
    reference: ClassVar[str] = "Li et al., Model-Contrastive Federated Learning, CVPR 2021"

    mu: NonNegative = 1.0
    """The weight of the contrastive term. 0 is FedAvg."""
    temperature: Positive = 0.5
    """The temperature of the contrastive term, τ."""
    layer: str = ""
    """The layer whose input are the features, such as `head`. By default, the last layer with parameters."""

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {**super().init_own(task, model), "previous": model}

    def passes(self, method: str) -> float:
        return self.train.epochs * (1 + 5 / 3 if self.mu else 1)  # another gradient, and two evaluations

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, kept = super().client(task, shared, own, data)
        assert update.trained is not None
        return update, {**kept, "previous": update.trained.model}

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        if not self.mu:  # FedAvg, bit for bit
            return step.grad
        models = (shared["model"], own["previous"])
        near, far = (step.batch.at(weights).features(self.layer) for weights in models)

        def contrast(view: View) -> Tensor:
            features = view.features(self.layer)
            apart = cosine_similarity(features, far) - cosine_similarity(features, near)
            return self.mu * softplus(apart / self.temperature).mean()

        return add(step.grad, step.batch.grad_of(contrast))
