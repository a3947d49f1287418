"""IFCA."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from typing import ClassVar, Literal

import torch

from fedloom.algorithm import Central, Clients, Cohort, Count, Groups, Task, Tree, Update, by_size, concat, evaluate


class IFCA(Central):
    """Each client trains the best fitting of several models.

    j_k = argmin_j F_k(w_j) on the training data, w_j ← Σ p_k w_k over the clients with j_k = j; a model that no client
    chose stays as it is. Clients choose whenever they use a model, including for evaluation and in rounds without
    them. Use it if the clients fall into groups.
    """

    reference: ClassVar[str] = "Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020"

    weights: Literal["examples", "uniform"] = "examples"
    """How much each client counts in the mean of its cluster."""
    clusters: Count = 2
    """The number of global models."""

    @property
    def sums_cover_all(self) -> bool:
        return self.clusters == 1

    def init(self, task: Task, model: Tree) -> Groups:
        others = (replace(task, seed=task.seed + number).initial() for number in range(1, self.clusters))
        return {"model0": model, **{f"model{number}": tree for number, tree in enumerate(others, 1)}}

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {**super().init_own(task, model), "cluster": {"number": torch.zeros((), dtype=torch.int64)}}

    def passes(self, method: str) -> float:
        return self.train.epochs + self.clusters / 3  # an evaluation costs about a third of a gradient

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = cohort.reduce(self.client, state, rule=self.rule)
        return {name: mean[name] if mean.weights[name] > 0 else tree for name, tree in state.items()}

    def choose(self, task: Task, shared: Groups, own: Groups, data: Clients) -> Groups:
        """Return the number of the model with the lowest training loss for each client. Undefined losses never win."""
        losses = torch.full((len(data), self.clusters), inf, dtype=torch.float64)
        for position, number in product(range(len(data)), range(self.clusters)):
            measured = evaluate(task, shared[f"model{number}"], data, position, "train")
            losses[position, number] = measured.values(task).get("loss", inf)
        return {**own, "cluster": {"number": losses.nan_to_num(inf, posinf=inf).argmin(1)}}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        own = self.choose(task, shared, own, data)
        chosen, names = own["cluster"]["number"], list(shared)
        start = concat([{n: leaf[None] for n, leaf in shared[f"model{choice}"].items()} for choice in chosen.tolist()])
        trained = self.fit(task, start, shared, own, data)
        each, same = by_size(self.weights, data.examples), {name: name for name in names}
        weigh = {name: torch.where(chosen == number, each, 0.0) for number, name in enumerate(names)}
        return Update(dict.fromkeys(names, trained.model), weigh, trained=trained, positions=same), trained.own

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        return shared[f"model{int(own['cluster']['number'])}"] if own else shared["model0"]

    def server_model(self, task: Task, state: Groups) -> Tree | None:
        return state["model0"] if self.clusters == 1 else None
