"""Per-FedAvg."""

from __future__ import annotations

from typing import ClassVar

from fedloom.algorithm import Groups, NonNegative, Step, Tree, add
from fedloom.algorithms.fedavg import FedAvg


class PerFedAvg(FedAvg):
    """Learns a model that is good after one step by a client.

    w_k ← w_k − lr ∇f(w_k − alpha ∇f(w_k)), then w ← Σ p_k w_k. This is the first-order variant, with the same batch for
    both gradients. Use it if clients will adapt the model to their own data.
    """

    trains_once: ClassVar[bool] = False
    reference: ClassVar[str] = "Fallah et al., Personalized Federated Learning: A Meta-Learning Approach, NeurIPS 2020"

    alpha: NonNegative = 0.01
    """The step size of a client's adaptation."""

    def passes(self, method: str) -> float:
        return 2 * self.train.epochs

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return step.grad_at(add(step.params, step.grad, scale=-self.alpha))
