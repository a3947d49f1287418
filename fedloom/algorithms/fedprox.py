"""FedProx."""

from __future__ import annotations

from typing import ClassVar

from fedloom.algorithm import Groups, NonNegative, Step, Tree, add, sub
from fedloom.algorithms.fedavg import FedAvg


class FedProx(FedAvg):
    """FedAvg with a pull towards the global model.

    Adds mu/2 · ‖w_k − w‖² to each client's loss: w_k ← w_k − lr (g + mu (w_k − w)), then w ← Σ p_k w_k. Use it if the
    data or the amount of work differ much between clients.
    """

    reference: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    mu: NonNegative = 0.01
    """How strongly clients are pulled towards the global model. 0 is FedAvg."""

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        if not self.mu:  # FedAvg, bit for bit: adding zeros could change a sign
            return step.grad
        return add(step.grad, sub(step.params, step.start), scale=self.mu)
