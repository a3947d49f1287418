"""FSVRG, and SVRG on pooled data as its reference."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from fedloom.aggregation.weights import by_examples, uniform
from fedloom.algorithm import Central, Clients, Cohort, Groups, Positive, Step, Task, Trained, Tree, Update, without
from fedloom.training import local
from fedloom.training.evaluation import batch
from fedloom.training.full_gradient import full_gradient
from fedloom.training.settings import only_plain_sgd
from fedloom.tree import add, expand, map_leaves, scale, select, sub


class FSVRG(Central):
    """Takes variance-reduced steps that allow for rare features.

    The server first collects ∇f(w). Then each client takes one step of size h_k = h / n_k for each of its examples, in
    random order: w_k ← w_k − h_k (S_k [∇f_i(w_k) − ∇f_i(w)] + ∇f(w)); then w ← w + A Σ (n_k/n) (w_k − w).
    S_k = φ_j / φ_kj and A = K / ω_j for a single linear layer, and both are 1 for other models. Use it for sparse,
    unbalanced problems. Without `h`, `lr` is used. There is always one example in a step, and one epoch. A
    `weight_decay` c changes the problem to f(w) + c/2 ‖w‖². The second part needs no estimate: c w_k is added to what
    h_k multiplies.
    """

    takes_noise: ClassVar[bool] = False
    refuses: ClassVar[dict[str, str]] = {
        **only_plain_sgd("FSVRG takes plain steps"),
        "clip": "FSVRG divides gradients by a client's examples, so 'clip' has no meaning. Leave it out.",
    }
    reference: ClassVar[str] = "Konečný et al., Federated Optimization for On-Device Intelligence, 2016"

    h: Positive | None = None
    """The step size before it is divided by the client's number of examples, so it is larger than other algorithms'
    `lr`. By default, `lr`.
    """
    scaling: Literal["auto", "identity"] = "auto"
    """`auto` scales by how many examples and clients have a feature, for a single linear layer. `identity` never does.
    """

    @model_validator(mode="after")
    def _one_example_a_step(self) -> FSVRG:
        # the method fixes these, whatever the [train] table says
        lr = self.train.lr if self.h is None else self.h
        fixed = self.train.replace(batch_size=1, epochs=1.0, patience=None, lr=lr, clients=None)
        if fixed != self.train:
            object.__setattr__(self, "train", fixed)
        return self

    def passes(self, method: str) -> float:
        return {"gradient": 1.0, "features": 0.0}.get(method, 2 * self.train.epochs)  # a step takes two gradients

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = cohort.reduce(self.gradient, state, rule=self.rule)
        shared = {**state, "gradient": mean["gradient"]}
        scaled = self.scaling == "auto" and linear_layer(cohort.task) is not None
        if scaled:
            counts = cohort.reduce(self.features, state)
            shared["frequency"] = {"phi": counts["frequency"]["phi"]}
        moved = cohort.reduce(self.client, shared, rule=self.rule)
        change = moved["change"]
        if scaled:
            present = counts["present"]["share"]  # ω_j / K
            factor = torch.where(present > 0, 1 / present, 1.0)
            change = map_leaves(lambda leaf: leaf * factor.to(leaf.dtype) if leaf.dim() == 2 else leaf, change)
        before = select(state["model"], change)
        return {"model": {**state["model"], **moved["buffers"], **add(before, change)}}

    def gradient(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        """Return every client's full gradient, weighted by its examples."""
        full = full_gradient(task, data, expand(shared["model"], len(data)))
        return Update({"gradient": full.gradient}, by_examples(data.examples)), own

    def features(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        """Return how often each feature is not zero, and which clients have it at all."""
        phi = torch.stack([frequency(task, data, position) for position in range(len(data))])
        groups = {"frequency": {"phi": phi}, "present": {"share": (phi > 0).to(phi.dtype)}}
        each = {"frequency": by_examples(data.examples), "present": uniform(data.examples)}
        return Update(groups, each), own

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        pace = {"size": {"examples": data.examples.to(task.torch_dtype)}}
        if "frequency" in shared:
            mine = torch.stack([frequency(task, data, position) for position in range(len(data))])
            ratio = torch.where(mine > 0, shared["frequency"]["phi"] / mine, 1.0)
            pace["scaling"] = {"features": ratio.to(task.torch_dtype)}
        trained = self.fit(task, expand(shared["model"], len(data)), shared, {**own, **pace}, data)
        change = sub(select(trained.model, task.trainable), select(shared["model"], task.trainable))
        groups = {"change": change, "buffers": without(trained.model, task.trainable)}
        update = Update(groups, by_examples(data.examples), trained=trained, positions={"buffers": "model"})
        return update, {group: tree for group, tree in trained.own.items() if group not in pace}

    def fit(self, task: Task, start: Tree, shared: Groups, own: Groups, data: Clients) -> Trained:
        plain = self.train.replace(weight_decay=0.0)  # `correct` adds it, so that it is scaled too
        return local.train(task, data, start, plain, correct=self.correct, shared=shared, own=own)

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        difference = sub(step.grad, step.grad_at(step.start))
        if "scaling" in own:
            factor = own["scaling"]["features"]
            difference = {n: leaf * factor if leaf.dim() == 2 else leaf for n, leaf in difference.items()}
        direction = add(difference, shared["gradient"])
        if self.train.weight_decay:
            direction = add(direction, step.params, scale=self.train.weight_decay)
        return scale(direction, 1 / own["size"]["examples"])


class SVRG(FSVRG):
    """FSVRG on pooled data, without scaling: its baseline.

    w ← w − (h / n) (∇f_i(w) − ∇f_i(w₀) + ∇f(w₀)) over one random permutation of all n examples, from w₀.
    """

    reference: ClassVar[str] = "Johnson & Zhang, Accelerating SGD Using Predictive Variance Reduction, NIPS 2013"
    pooled: ClassVar[bool] = True

    scaling: Literal["identity"] = "identity"
    """Pooled data needs no scaling."""


def linear_layer(task: Task) -> nn.Linear | None:
    """Return the linear layer that is the whole model; None if the model has other layers with parameters."""
    parts = [part for part in task.module.modules() if next(part.parameters(recurse=False), None) is not None]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], nn.Linear) else None


def frequency(task: Task, data: Clients, position: int) -> Tensor:
    """Return the share of one client's training examples in which each feature is not zero."""
    x, _ = batch(data, data.rows(position, "train"), task)
    return (x.flatten(1) != 0).to(torch.float64).mean(0)
