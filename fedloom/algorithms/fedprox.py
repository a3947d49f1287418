"""FedProx."""

from __future__ import annotations

from typing import ClassVar

from fedloom.algorithm import Groups, NonNegative, Step, Tree, add, sub
from fedloom.algorithms.fedavg import FedAvg


class FedProx(FedAvg):
    """FedAvg with a pull towards the global model: adds mu/2 · ‖w − w_global‖² to each client's loss.

    w_k ← w_k − lr (g + mu (w_k − w)), then w ← Σ p_k w_k. For clients whose data or amount of work differ much.
    """

    reference: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    mu: NonNegative = 0.01
    """How strongly clients are pulled towards the global model. 0 is FedAvg."""

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        if not self.mu:  # then it is FedAvg, bit for bit: not even zeros are added
            return step.grad
        return add(step.grad, sub(step.params, step.start), scale=self.mu)
