"""Federated averaging, with all the ways to weigh clients that the server can compute."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.aggregation import means, weights
from fedloom.algorithm import Central, Update
from fedloom.errors import InputError
from fedloom.federation.cohort import Answers, Cohort
from fedloom.task import Task
from fedloom.training import evaluation
from fedloom.training.clients import Clients
from fedloom.training.local import Groups, Trained
from fedloom.tree import Tree, change, expand, row, rows, select, sub


class FedAvg(Central):
    """Clients train on their own data, the server averages their weights: w ← Σ p_k w_k.

    p_k is in proportion to the number of examples, equal, in proportion to each client's own evaluation on its
    validation split (`score`; a loss counts by its inverse), or equal for clients that are at most one standard
    deviation worse than the mean (`within_std`). A score that is not defined, such as the AUROC of a single class,
    counts for nothing beside those that are; where none is defined, all clients count the same.

    >>> FedAvg(lr=0.1, epochs=5, batch_size=10).train.epochs
    5.0
    """

    reference: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017; "
        "`score` and `within_std`: Samani, Federated Machine Learning, UCC 2020"
    )

    weights: Literal["examples", "uniform", "score", "within_std"] = "examples"
    """How much each client counts in the mean."""
    metric: str = "accuracy"
    """The metric of the clients' scores."""
    scores: Literal["post", "pre"] = "post"
    """Whether clients are scored after (`post`) or before (`pre`) local training."""
    share: Literal["weights", "deltas"] = "weights"
    """Whether clients send their weights or the change of their weights."""

    @property
    def linear(self) -> bool:
        return self.weights != "within_std" and self.rule is None

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        return {**state, "model": self.average(state["model"], cohort, state)}

    def average(self, model: Tree, cohort: Cohort, shared: Groups) -> Tree:
        """Local training of the cohort, and the new weights."""
        if self.linear:
            mean = cohort.reduce(self.client, shared)["model"]
        else:
            mean = self.combine(model, cohort.map(self.client, shared), cohort)
        return moved(model, mean) if self.share == "deltas" else mean

    def combine(self, model: Tree, answers: Answers, cohort: Cohort) -> Tree:
        """What to make of each client's answer: a robust rule on the changes, or a mean over those chosen."""
        stacked, weigh = answers["model"], answers.weights["model"]
        if self.weights == "within_std":
            weigh = weights.within_one_std(answers.public["score"], self._higher_is_better(cohort.task))
        if self.rule is None:
            return means.mean(stacked, weigh)
        changes = stacked if self.share == "deltas" else change(stacked, model)
        sound = cohort.keep_finite({"model": changes}, {"model": weigh})
        judged = self.rule(rows(changes, sound), weigh[sound], len(cohort.left_out))
        return judged if self.share == "deltas" else moved(model, judged)

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        return self.answer(task, shared, own, trained, data), trained.own

    def answer(self, task: Task, shared: Groups, own: Groups, trained: Trained, data: Clients) -> Update:
        """What clients send after training: the shared leaves or what changed in them, and how much they count."""
        public = {}
        if self.weights in ("score", "within_std"):
            public["score"] = self._scores(task, shared, own, trained, data)
        if self.weights == "score":
            weigh = weights.by_score(public["score"], self._higher_is_better(task))
        else:
            weigh = weights.by_size(self.weights, data.examples)
        sent = select(trained.model, shared["model"])
        if self.share == "deltas":
            sent = sub(sent, shared["model"])
        return Update({"model": sent}, weigh, public, trained)

    def _scores(self, task: Task, shared: Groups, own: Groups, trained: Trained, data: Clients) -> Tensor:
        """Each client's own evaluation on its validation split."""
        found = []
        for position in range(len(data)):
            kept = {group: row(stacked, position) for group, stacked in own.items()}
            judged = row(trained.model, position) if self.scores == "post" else self.model(task, shared, kept)
            values = evaluation.evaluate(task, judged, data, position, "validation").values(task)
            if self.metric not in values:
                known = ", ".join(["loss", *(metric.name for metric in task.measures)])
                why = f"the task measures {known}" if values else "there are no validation examples"
                raise InputError(f"Client '{data.name(position)}' has no {self.metric} to be weighted by: {why}.")
            found.append(values[self.metric])
        return torch.tensor(found, dtype=torch.float64)

    def _higher_is_better(self, task: Task) -> bool:
        return self.metric != "loss" and all(m.higher_is_better for m in task.measures if m.name == self.metric)


def moved(model: Tree, changes: Tree) -> Tree:
    """The model after a change; counters are moved by whole numbers."""
    return {name: (leaf + changes[name]).to(leaf.dtype) for name, leaf in model.items()}
