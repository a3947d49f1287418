"""FedRep."""

from __future__ import annotations

from typing import ClassVar

import torch

from fedloom import local
from fedloom.algorithm import Update
from fedloom.algorithms.fedavg import FedAvg
from fedloom.clients import Clients
from fedloom.cohort import Cohort
from fedloom.errors import InputError
from fedloom.local import Groups, Step
from fedloom.record import Positive
from fedloom.task import Task
from fedloom.tree import Tree, expand, select


class FedRep(FedAvg):
    """All clients share the body of a model, each has its own head: the head is trained first, then the body.

    Steps on F_k(body, h_k) by h_k, then by body_k, which begins as the shared one; body ← Σ p_k body_k. `head` names
    the leaves of the head by their beginnings; left out, it is the last layer with parameters. For clients with
    different labels or tastes.
    """

    reference: ClassVar[str] = "Collins et al., Exploiting Shared Representations for Personalized FL, ICML 2021"

    head: tuple[str, ...] = ()
    head_epochs: Positive = 1.0

    def head_leaves(self, task: Task, model: Tree) -> list[str]:
        """Names of the leaves that stay with the client."""
        prefixes = self.head or (task.trainable[-1].rpartition(".")[0],)
        starts = [prefix.rstrip(".") for prefix in prefixes]
        named = [name for name in model if any(name == p or name.startswith(f"{p}.") for p in starts)]
        if not named or len(named) == len(model):
            raise InputError(
                f"The 'head' parameter of FedRep must name some of the model's leaves, but not all. "
                f"Got {list(prefixes)} for {', '.join(model)}."
            )
        return named

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {**super().init_own(task, model), "head": select(model, self.head_leaves(task, model))}

    def average(self, model: Tree, cohort: Cohort, shared: Groups) -> Tree:
        head = self.head_leaves(cohort.task, model)
        body = {name: leaf for name, leaf in model.items() if name not in head}
        return {**model, **super().average(body, cohort, {**shared, "model": body})}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        start = {**expand(shared["model"], len(data)), **own["head"]}
        first = self.train.replace(epochs=self.head_epochs)
        headed = local.train(task, data, start, first, correct=self.head_only, shared=shared, own=own)
        # buffers moved by the head's phase belong to the body, which has not been trained yet
        start = {**expand(shared["model"], len(data)), **select(headed.model, own["head"])}
        trained = local.train(task, data, start, self.train, correct=self.body_only, shared=shared, own=headed.own)
        update = self.answer(task, shared, own, trained, data)
        return update, {**trained.own, "head": select(trained.model, own["head"])}

    def head_only(self, step: Step, shared: Groups, own: Groups) -> Tree:
        """Gradients of the head; the body stays."""
        return {n: torch.zeros_like(g) if n in shared["model"] else g for n, g in step.grad.items()}

    def body_only(self, step: Step, shared: Groups, own: Groups) -> Tree:
        """Gradients of the body; the head stays."""
        return {n: g if n in shared["model"] else torch.zeros_like(g) for n, g in step.grad.items()}

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        return {**shared["model"], **own["head"]} if own else shared["model"]
