"""CoCoA+."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom import keys
from fedloom.algorithm import Algorithm, Clients, Cohort, Count, Groups, InputError, Positive, Task, Tree, Update, batch
from fedloom.algorithms.fsvrg import linear_layer
from fedloom.tree import map_leaves, scale, unflatten, zeros_like

Vector = NDArray[np.float64]


class CoCoA(Algorithm):
    """Clients solve parts of the dual problem of a linear model.

    w ← w + γ Σ Δw_k with Δw_k = Σ x_i Δα_i / (λ n), by dual coordinate ascent on each client: adding (γ = 1, σ' = m) or
    averaging (γ = 1/m, σ' = 1). It minimises (1/n) Σ ℓ_i(w) + (λ/2) ‖w‖², where ℓ is the task's loss and w includes the
    bias. The model must be linear with one output, and the loss mse (ridge regression, ℓ = (w·x − y)²) or bce (logistic
    regression). n is the number of examples of all clients that have taken part so far. λ is `regularization`. There is
    no learning rate. The first round starts from zero weights, because dual and primal variables must match.
    """

    takes_noise: ClassVar[bool] = False
    reference: ClassVar[str] = "Ma et al., Adding vs. Averaging in Distributed Primal-Dual Optimization, ICML 2015"
    needs: ClassVar[str] = "linear"
    refuses: ClassVar[dict[str, str]] = {
        "weight_decay": "CoCoA's L2 term is 'regularization', so 'weight_decay' has no meaning. Leave it out."
    }

    regularization: Positive = 0.01
    """λ, the strength of the L2 penalty."""
    aggregation: Literal["adding", "averaging"] = "adding"
    """Whether the clients' changes are added up (γ = 1) or averaged (γ = 1/m)."""
    local_passes: Count = 1
    """Passes of dual coordinate ascent over a client's examples in a round."""
    capacity: Count = 10_000
    """The most training examples a client may have. Each client keeps one dual variable per example."""

    def init(self, task: Task, model: Tree) -> Groups:
        layer = linear_layer(task)
        if layer is None or layer.out_features != 1:
            raise InputError('CoCoA is for linear models with one output, such as model = "logistic" with classes = 1.')
        if len(task.trainable) < len(task.form):
            raise InputError("CoCoA trains the whole linear model: it cannot have frozen parameters or buffers.")
        if task.loss not in ("mse", "bce"):
            raise InputError(f'CoCoA supports loss = "mse" (ridge) and "bce" (logistic). Got {task.loss!r} instead.')
        return {"model": zeros_like(model), "problem": {"examples": torch.zeros((), dtype=torch.int64)}}

    def init_own(self, task: Task, model: Tree) -> Groups:
        counted = torch.zeros((), dtype=torch.bool)
        return {"dual": {"alpha": torch.zeros(self.capacity, dtype=torch.float64), "counted": counted}}

    def passes(self, method: str) -> float:
        return 0.0 if method == "count" else float(self.local_passes)

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        before = state["problem"]["examples"]
        new = cohort.reduce(self.count, {})
        total = before + torch.round(new["size"]["examples"] * new.weights["size"]).to(torch.int64)
        # w is Σ α_i x_i / (λ n), so it shrinks when n grows
        model = scale(state["model"], float(before / total.clamp(min=1)))
        problem, clients = {"examples": total}, len(cohort)
        size = {**problem, "clients": torch.tensor(clients)}
        found = cohort.reduce(self.client, {"model": model, "size": size})
        # the sum over the clients that answered is their mean times their number; γ is the one that they were told
        factor = len(cohort) * (1.0 if self.aggregation == "adding" else 1 / clients)
        moved = map_leaves(lambda w, d: w + factor * d.to(w.dtype), model, found["change"])
        return {"model": moved, "problem": problem}

    def count(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        """Return how many examples each client adds to the problem: all of them in its first round, then none."""
        new = torch.where(own["dual"]["counted"], 0, data.examples).to(torch.float64)
        counted = torch.ones(len(data), dtype=torch.bool)
        return Update({"size": {"examples": new}}, torch.ones(len(data))), {"dual": {**own["dual"], "counted": counted}}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        changes, duals = [], []
        for position in range(len(data)):
            change, dual = self._ascend(task, shared, own["dual"]["alpha"][position].numpy(), data, position)
            changes.append(change)
            duals.append(torch.from_numpy(dual))
        stacked = unflatten(torch.from_numpy(np.stack(changes)), _weight_first(shared["model"]))
        sent = {"change": {name: stacked[name] for name in shared["model"]}}
        return Update(sent, torch.ones(len(data))), {"dual": {**own["dual"], "alpha": torch.stack(duals)}}

    def _ascend(self, task: Task, shared: Groups, alpha: Vector, data: Clients, position: int) -> tuple[Vector, Vector]:
        """Ascend over one client's dual variables in a keyed random order; return the change of w and the new duals."""
        rows = data.rows(position, "train")
        if len(rows) > self.capacity:
            raise InputError(f"Client '{data.name(position)}' has {len(rows)} examples: set capacity to at least that.")
        x, y = (part.to(torch.float64).numpy() for part in batch(data, rows, task))
        x, y = x.reshape(len(x), -1), y.reshape(-1)
        w = np.concatenate([leaf.to(torch.float64).numpy().ravel() for leaf in _weight_first(shared["model"]).values()])
        if len(w) > x.shape[1]:
            x = np.hstack([x, np.ones((len(x), 1))])  # the bias is a feature that is always one
        total, clients = int(shared["size"]["examples"]), int(shared["size"]["clients"])
        sigma, gamma = (clients, 1.0) if self.aggregation == "adding" else (1.0, 1 / clients)
        strength = self.regularization * total
        squares = (x**2).sum(1)
        change, delta = np.zeros_like(w), np.zeros(len(x))
        update = _ridge if task.loss == "mse" else _logistic
        for number in range(self.local_passes):
            for i in keys.permutation(data.key(position, "dual", number), len(x)):
                margin = x[i] @ (w + sigma * change)
                step = update(alpha[i] + delta[i], y[i], margin, sigma * squares[i] / strength)
                delta[i] += step
                change += step / strength * x[i]
        kept = alpha.copy()
        kept[: len(x)] += gamma * delta
        return change, kept


def _weight_first(model: Tree) -> Tree:
    return dict(sorted(model.items(), key=lambda item: -item[1].dim()))


def _ridge(alpha: float, y: float, margin: float, curvature: float) -> float:
    """Return the exact step to the maximum over one dual variable for the loss (x·w − y)²."""
    return (y - margin - alpha / 2) / (1 / 2 + curvature)


def _logistic(alpha: float, y: float, margin: float, curvature: float) -> float:
    """Return the step to the maximum for the logistic loss, by bisection over the probability y − alpha."""
    low, high = 1e-12, 1 - 1e-12
    for _ in range(60):
        middle = (low + high) / 2
        slope = np.log(middle / (1 - middle)) - margin - curvature * (y - middle - alpha)
        low, high = (low, middle) if slope > 0 else (middle, high)
    return y - (low + high) / 2 - alpha
