"""Averaging by validation score."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from fedloom.aggregation.weights import SMALLEST_LOSS
from fedloom.algorithm import Central, Clients, Cohort, Groups, InputError, Task, Tree, Update, by_score, evaluate
from fedloom.tree import expand, row


class EvaluationWeighted(Central):
    """Clients with a better validation score count for more.

    w ← Σ (s_k / Σ s_j) w_k, where s_k is the score of client k by `metric` on its own validation data. For a loss, its
    inverse counts. An undefined score, such as the AUROC of a single class, has no weight beside defined scores. If no
    score is defined, all clients count the same. Each client computes its own weight, and its score is
    public.
    """

    name: ClassVar[str] = "evaluation_weighted"
    linear: ClassVar[bool] = False  # every client's score is public
    takes_stale: ClassVar[bool] = True
    reference: ClassVar[str] = "Samani, Federated Machine Learning, UCC 2020"

    metric: str = "accuracy"
    """The metric of the clients' scores."""
    scores: Literal["post", "pre"] = "post"
    """Whether clients are scored after (`post`) or before (`pre`) local training."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        return {"model": cohort.reduce(self.client, state, rule=self.rule)["model"]}

    def largest_weight(self, examples: int) -> float:
        share = self.metric in ("accuracy", "auroc") or self.metric.startswith("top_")
        return 1.0 if share else 1 / SMALLEST_LOSS

    def models_scored(self, clients: int) -> float:
        return 1.0

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        positions = range(len(data))
        scored = [row(trained.model, p) if self.scores == "post" else shared["model"] for p in positions]
        found = [validation_score(self.metric, task, scored[p], data, p) for p in positions]
        score = torch.tensor(found, dtype=torch.float64)
        weight = by_score(score, higher_is_better(self.metric, task))
        return Update({"model": trained.model}, weight, {"score": score}, trained, {"model": "model"}), trained.own


def validation_score(metric: str, task: Task, model: Tree, data: Clients, position: int) -> float:
    """Return how well a model does on one client's validation split."""
    values = evaluate(task, model, data, position, "validation").values(task)
    if metric not in values:
        known = ", ".join(["loss", *(measure.name for measure in task.measures)])
        why = f"the task measures {known}" if values else "there are no validation examples"
        raise InputError(f"Client '{data.name(position)}' has no {metric} to be weighted by: {why}.")
    return values[metric]


def higher_is_better(metric: str, task: Task) -> bool:
    """Return whether a higher score is better."""
    return metric != "loss" and all(m.higher_is_better for m in task.measures if m.name == metric)
