"""CoCoA+."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedloom import keys
from fedloom.algorithm import Algorithm, Update
from fedloom.clients import Clients
from fedloom.cohort import Cohort
from fedloom.errors import InputError
from fedloom.evaluation import batch
from fedloom.local import Groups
from fedloom.record import Count, Positive
from fedloom.task import Task
from fedloom.tree import Tree, map_leaves, zeros_like

Vector = NDArray[np.float64]


class CoCoA(Algorithm):
    """Each client solves its part of the dual problem exactly enough, and what they find is added up.

    w ← w + γ Σ Δw_k with Δw_k = Σ x_i Δα_i / (λ n), by dual coordinate ascent on each client: adding (γ = 1, σ' = m) or
    averaging (γ = 1/m, σ' = 1). For linear models with one output and loss mse (ridge regression) or bce (logistic
    regression), with (λ/2) ‖w‖². No learning rate is needed. The first round begins with zero weights, because dual and
    primal must belong together.
    """

    reference: ClassVar[str] = "Ma et al., Adding vs. Averaging in Distributed Primal-Dual Optimization, ICML 2015"
    needs: ClassVar[str] = "linear"

    regularization: Positive = 0.01
    aggregation: Literal["adding", "averaging"] = "adding"
    local_passes: Count = 1
    capacity: Count = 10_000  # the most examples a client may have: one dual variable each is kept

    def init(self, task: Task, model: Tree) -> Groups:
        parts = [part for part in task.module.modules() if next(part.parameters(recurse=False), None) is not None]
        if len(parts) != 1 or not isinstance(parts[0], nn.Linear) or parts[0].out_features != 1:
            raise InputError('CoCoA is for linear models with one output, such as model = "logistic" with classes = 1.')
        if task.loss not in ("mse", "bce"):
            raise InputError(f'CoCoA knows loss = "mse" (ridge) and "bce" (logistic). Got {task.loss!r} instead.')
        return {"model": zeros_like(model)}

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {"dual": {"alpha": torch.zeros(self.capacity, dtype=torch.float64)}}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = cohort.reduce(self.count, {})["size"]["examples"]
        if "problem" not in state:
            # the dual problem has one size for good: that of all clients, known from the first cohort
            state = {**state, "problem": {"examples": torch.round(mean * cohort.population).to(torch.int64)}}
        size = {**state["problem"], "clients": torch.tensor(len(cohort))}
        found = cohort.reduce(self.client, {"model": state["model"], "size": size})
        # the clients' changes are added: their mean times their number, times γ
        factor = len(cohort) * (1.0 if self.aggregation == "adding" else 1 / len(cohort))
        moved = map_leaves(lambda w, d: w + factor * d.to(w.dtype), state["model"], found["change"])
        return {**state, "model": moved}

    def count(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        """How many examples each client has: the dual problem is scaled by their sum."""
        return Update({"size": {"examples": data.examples.to(torch.float64)}}, torch.ones(len(data))), own

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        changes, duals = [], []
        for position in range(len(data)):
            change, dual = self._ascend(task, shared, own["dual"]["alpha"][position].numpy(), data, position)
            changes.append(change)
            duals.append(torch.from_numpy(dual))
        weight = next(name for name, leaf in shared["model"].items() if leaf.dim() == 2)
        stacked = torch.from_numpy(np.stack(changes))
        features = shared["model"][weight].shape[1]
        groups = {name: stacked[:, features].reshape(-1, 1) for name in shared["model"] if name != weight}
        groups[weight] = stacked[:, :features].reshape(len(data), 1, features)
        ordered = {name: groups[name] for name in shared["model"]}
        return Update({"change": ordered}, torch.ones(len(data))), {"dual": {"alpha": torch.stack(duals)}}

    def _ascend(self, task: Task, shared: Groups, alpha: Vector, data: Clients, position: int) -> tuple[Vector, Vector]:
        """Dual coordinate ascent over one client's examples, in a keyed random order."""
        rows = data.rows(position, "train")
        if len(rows) > self.capacity:
            raise InputError(f"Client '{data.name(position)}' has {len(rows)} examples: set capacity to at least that.")
        x, y = (part.to(torch.float64).numpy() for part in batch(data, rows, task))
        x = x.reshape(len(x), -1)
        w = np.concatenate([leaf.to(torch.float64).numpy().ravel() for leaf in _weight_first(shared["model"])])
        if len(w) > x.shape[1]:
            x = np.hstack([x, np.ones((len(x), 1))])  # the bias is a feature that is always one
        total, clients = int(shared["size"]["examples"]), int(shared["size"]["clients"])
        adding = self.aggregation == "adding"
        sigma, gamma = (clients, 1.0) if adding else (1.0, 1 / clients)
        scale = self.regularization * total
        squares = (x**2).sum(1)
        change, delta = np.zeros_like(w), np.zeros(len(x))
        update = _ridge if task.loss == "mse" else _logistic
        for number in range(self.local_passes):
            for i in keys.permutation(data.key(position, "dual", number), len(x)):
                margin = x[i] @ (w + sigma * change)
                step = update(alpha[i] + delta[i], y[i], margin, sigma * squares[i] / scale)
                delta[i] += step
                change += step / scale * x[i]
        kept = alpha.copy()
        kept[: len(x)] += gamma * delta
        return change, kept


def _weight_first(model: Tree) -> list[torch.Tensor]:
    return sorted(model.values(), key=lambda leaf: -leaf.dim())


def _ridge(alpha: float, y: float, margin: float, curvature: float) -> float:
    """The exact maximum over one dual variable for the loss (x·w − y)² / 2."""
    return (y - margin - alpha) / (1 + curvature)


def _logistic(alpha: float, y: float, margin: float, curvature: float) -> float:
    """The maximum over one dual variable for the logistic loss, by bisection; alpha · y is in (0, 1) for labels ±1."""
    sign = 1.0 if y > 0.5 else -1.0
    low, high = 1e-12, 1 - 1e-12
    for _ in range(60):
        middle = (low + high) / 2
        slope = np.log((1 - middle) / middle) - sign * margin - curvature * (middle - sign * alpha)
        low, high = (middle, high) if slope > 0 else (low, middle)
    return sign * (low + high) / 2 - alpha
