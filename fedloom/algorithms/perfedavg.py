"""Per-FedAvg."""

from __future__ import annotations

from typing import ClassVar

from fedloom.algorithm import Groups, NonNegative, Step, Tree, add
from fedloom.algorithms.fedavg import FedAvg


class PerFedAvg(FedAvg):
    """Learns a model that becomes good after one step on a client's own data: g is taken at w − alpha ∇f(w).

    w_k ← w_k − lr ∇f(w_k − alpha ∇f(w_k)), then w ← Σ p_k w_k. The first-order variant, with the same batch for both
    gradients. For clients that will adapt the model themselves.
    """

    reference: ClassVar[str] = "Fallah et al., Personalized Federated Learning: A Meta-Learning Approach, NeurIPS 2020"

    alpha: NonNegative = 0.01
    """The step size with which a client adapts the model."""

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return step.grad_at(add(step.params, step.grad, scale=-self.alpha))
