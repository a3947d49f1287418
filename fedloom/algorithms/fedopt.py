"""Adaptive optimisers on the server: FedAvgM, FedAdagrad, FedAdam, FedYogi."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from fedloom.algorithm import Cohort, Decay, Groups, Positive, Task, Tree, add, map_leaves, select, sub, zeros_like
from fedloom.algorithms.fedavg import FedAvg


class FedAvgM(FedAvg):
    """FedAvg with momentum on the server.

    v ← β v + Δ, w ← w + η v, where Δ is the clients' mean change. Use it if the clients of different rounds disagree:
    the momentum remembers the earlier ones.
    """

    reference: ClassVar[str] = "Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019"

    server_lr: Positive = 1.0
    """The server's learning rate, η."""
    server_momentum: Decay = 0.9
    """The server's momentum, β."""

    def init(self, task: Task, model: Tree) -> Groups:
        return {"model": model, "velocity": zeros_like(select(model, task.trainable))}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = self.average(cohort, {"model": state["model"]})
        before = select(state["model"], state["velocity"])
        velocity = add(sub(select(mean, before), before), state["velocity"], scale=self.server_momentum)
        return {"model": {**mean, **add(before, velocity, scale=self.server_lr)}, "velocity": velocity}


class FedAdagrad(FedAvg):
    """The server takes adaptive steps, as Adagrad does.

    m ← β1 m + (1 − β1) Δ, v ← v + Δ², w ← w + η m / (√v + τ), where Δ is the clients' mean change. Use it for sparse
    updates.
    """

    takes_complex: ClassVar[bool] = False
    reference: ClassVar[str] = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"

    weights: Literal["examples", "uniform"] = "uniform"
    """How much each client counts in the mean."""
    server_lr: Positive = 0.01
    """The server's learning rate, η."""
    beta1: Decay = 0.9
    """Decay of the mean change, β1."""
    tau: Positive = 1e-9
    """Added to the denominator, τ: larger values make the step less adaptive."""

    def init(self, task: Task, model: Tree) -> Groups:
        nothing = zeros_like(select(model, task.trainable))
        return {"model": model, "first": nothing, "second": nothing}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = self.average(cohort, {"model": state["model"]})
        before = select(state["model"], state["first"])
        change = sub(select(mean, before), before)
        first = map_leaves(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, state["first"], change)
        second = self.accumulate(state["second"], change)
        rate = self.rate(cohort.round)
        after = map_leaves(lambda w, m, v: w + rate * m / (v.sqrt() + self.tau), before, first, second)
        return {"model": {**mean, **after}, "first": first, "second": second}

    def accumulate(self, second: Tree, change: Tree) -> Tree:
        """Return the running sum of squares."""
        return map_leaves(lambda v, d: v + d.square(), second, change)

    def rate(self, round: int) -> float:
        """Return the server's learning rate in a round."""
        return self.server_lr


class FedAdam(FedAdagrad):
    """The server takes adaptive steps, as Adam does.

    v ← β2 v + (1 − β2) Δ², and otherwise as FedAdagrad. Use it if plain averaging is slow.
    """

    beta2: Decay = 0.99
    """Decay of the mean squared change, β2."""
    bias_correction: bool = False
    """Correct m and v for their zero start, as Flower does."""

    def accumulate(self, second: Tree, change: Tree) -> Tree:
        return map_leaves(lambda v, d: self.beta2 * v + (1 - self.beta2) * d.square(), second, change)

    def rate(self, round: int) -> float:
        if not self.bias_correction:
            return self.server_lr
        return float(self.server_lr * (1 - self.beta2**round) ** 0.5 / (1 - self.beta1**round))


class FedYogi(FedAdagrad):
    """The server takes adaptive steps, as Yogi does.

    v ← v − (1 − β2) Δ² sign(v − Δ²), and otherwise as FedAdagrad. Use it if FedAdam's steps vary too much.
    """

    beta2: Decay = 0.99
    """How slowly the mean squared change adapts, β2."""

    def accumulate(self, second: Tree, change: Tree) -> Tree:
        def leaf(v: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
            square = d.square()
            return v - (1 - self.beta2) * square * torch.sign(v - square)

        return map_leaves(leaf, second, change)
