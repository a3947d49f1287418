"""q-FedAvg."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch

from fedloom.algorithm import Algorithm, Clients, Cohort, Groups, NonNegative, Task, Update, by_size, evaluate
from fedloom.tree import add, expand, scale, select, sub


class QFedAvg(Algorithm):
    """Clients with a larger loss count for more, which is fairer.

    With L = 1 / lr, F_k the loss of client k at w, and p_k equal or proportional to the number of examples:
    w ← w − Σ p_k F_k^q L (w − w_k) / Σ p_k (q F_k^(q−1) ‖L (w − w_k)‖² + L F_k^q). q = 0 is FedAvg. Fairness may cost
    some of the average. The paper draws clients by their examples and weighs them equally; if clients are drawn evenly,
    `examples` has the same expectation.
    """

    takes_complex: ClassVar[bool] = False
    takes_noise: ClassVar[bool] = False
    divides_by_lr: ClassVar[bool] = True
    has_one_rate: ClassVar[bool] = True
    reference: ClassVar[str] = "Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020"

    weights: Literal["examples", "uniform"] = "uniform"
    """How much each client counts, before its loss is considered."""
    q: NonNegative = 1.0
    """How much more a larger loss counts. 0 is FedAvg."""

    def passes(self, method: str) -> float:
        return self.train.epochs + 1 / 3  # an evaluation costs about a third of a gradient

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = cohort.reduce(self.client, state)
        # Σ Δ_k / Σ h_k, written as a step towards the mean weighted by F_k^q; with q = 0 it is that mean
        pace = mean["pace"]["numerator"] / mean["pace"]["denominator"]
        before, trained = (select(model, cohort.task.trainable) for model in (state["model"], mean["model"]))
        return {"model": {**mean["model"], **add(scale(before, 1 - pace), scale(trained, pace))}}

    def largest_weight(self, examples: int) -> float:
        return math.inf if self.q else super().largest_weight(examples)  # a loss has no bound

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        measured = [evaluate(task, shared["model"], data, position, "train") for position in range(len(data))]
        losses = [found.values(task)["loss"] for found in measured]
        loss = torch.tensor(losses, dtype=torch.float64).clamp(min=1e-10)
        steepness = 1 / self.train.lr_at(data.round)
        change = sub(select(trained.model, task.trainable), select(shared["model"], task.trainable))
        squares = sum(leaf.to(torch.float64).flatten(1).square().sum(1) for leaf in change.values())
        pull, counts = loss**self.q, by_size(self.weights, data.examples)
        numerator = steepness * pull
        denominator = self.q * loss ** (self.q - 1) * steepness**2 * squares + numerator
        groups = {"model": trained.model, "pace": {"numerator": numerator, "denominator": denominator}}
        weigh = {"model": counts * pull, "pace": counts}
        return Update(groups, weigh, trained=trained, positions={"model": "model"}), trained.own
