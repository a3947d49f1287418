"""Ditto."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fedloom.algorithm import Clients, Groups, NonNegative, Step, Task, Tree, Update, add, local, select, sub
from fedloom.algorithms.fedavg import FedAvg


class Ditto(FedAvg):
    """Each client also trains a model near the global one.

    v_k ← v_k − lr (g + lam (v_k − w)) pulls a client's own model towards the global one; w ← Σ p_k w_k is the global
    one, trained as in FedAvg. Use it for fairness and robustness through personalisation.
    """

    trains_once: ClassVar[bool] = False
    reference: ClassVar[str] = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"

    lam: NonNegative = 0.1
    """How strongly each client's own model is pulled towards the global one."""

    def init_own(self, task: Task, model: Tree) -> Groups:
        kept = super().init_own(task, model)
        beside = {f"personal_{group}": tree for group, tree in kept.items()}  # a second optimiser, if theirs is kept
        return {**kept, **beside, "personal": model}

    def passes(self, method: str) -> float:
        return 2 * self.train.epochs

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, kept = super().client(task, shared, own, data)
        optimizer = {"optimizer": own["personal_optimizer"]} if "personal_optimizer" in own else {}
        personal = local.train(
            task, data, own["personal"], self.train, correct=self.towards_global, shared=shared, own=optimizer
        )
        beside = {f"personal_{group}": tree for group, tree in personal.own.items()}
        return replace(update, trained=personal), {**kept, **beside, "personal": personal.model}

    def towards_global(self, step: Step, shared: Groups, own: Groups) -> Tree:
        """Return the gradient of the client's own model."""
        return add(step.grad, sub(step.params, select(shared["model"], step.params)), scale=self.lam)

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        return own["personal"] if own else shared["model"]
