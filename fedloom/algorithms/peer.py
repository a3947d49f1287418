"""Peer-to-peer learning without a server."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom import keys
from fedloom.aggregation.weights import by_score, metropolis, topology, uniform, within_one_std
from fedloom.algorithm import Algorithm, Clients, Cohort, Count, Groups, Inbox, Share, Task, Tree, Update, mean
from fedloom.algorithms.evaluation_weighted import higher_is_better, validation_score
from fedloom.tree import row, rows, stack


class Peer(Algorithm):
    """Each client averages its neighbours' weights; no server.

    W ← A W, with one row of A for each client. A row is uniform, Metropolis, or made from the scores of the neighbours'
    weights on the client's own validation split (`score`, `within_std`). With `scores = "pre"`, neighbours also send
    the weights that they started the round with, and these are scored. An undefined score, such as the AUROC of a
    single class, has no weight beside defined scores. If no score is defined, all neighbours count the same. Use it if
    there is no server that all clients trust.
    """

    linear: ClassVar[bool] = False
    reference: ClassVar[str] = "Samani, Federated Machine Learning, UCC 2020; Lian et al., NeurIPS 2017 (gossip)"

    weights: Literal["uniform", "score", "within_std", "metropolis"] = "uniform"
    """How much each neighbour counts in a client's average."""
    metric: str = "accuracy"
    """The metric of the neighbours' scores."""
    scores: Literal["post", "pre"] = "post"
    """Whether neighbours are scored by their weights after (`post`) or before (`pre`) local training."""
    topology: Literal["full", "ring", "torus", "star", "k_regular", "erdos_renyi"] = "full"
    """Which clients are neighbours."""
    degree: Count = 2
    """The number of neighbours in a `k_regular` topology."""
    probability: Share = 0.5
    """The probability of an edge in an `erdos_renyi` topology."""
    redraw: bool = False
    """Draw another random topology in every round."""

    @property
    def needs_all_from_start(self) -> str:
        return "" if self.topology == "full" else "its topology is drawn for them"

    def init(self, task: Task, model: Tree) -> Groups:
        return {}

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {**super().init_own(task, model), "model": model}

    def graph(self, clients: int, seed: int, round: int = 0) -> Tensor:
        """Return which clients receive from which."""
        drawn = keys.key(seed, "topology", round if self.redraw else 0)
        return topology(self.topology, clients, drawn, self.degree, self.probability)

    def models_scored(self, clients: int) -> float:
        return float(self.graph(clients, 0).sum()) / clients if self._judges else 0.0

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        sent = cohort.map(self.client, state)
        graph = self.graph(len(cohort), cohort.seed, cohort.round)
        each = {"row": {"weights": metropolis(graph)}} if self.weights == "metropolis" else None
        cohort.exchange(self.mix, sent.groups, graph, each=each)
        return state

    def passes(self, method: str) -> float:
        return self.train.epochs if method == "client" else 0.0

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, own["model"], shared, own, data)
        sent = {"model": trained.model, **({"before": own["model"]} if self._judges and self.scores == "pre" else {})}
        return Update(sent, torch.ones(len(data)), trained=trained), trained.own

    @property
    def _judges(self) -> bool:
        return self.weights in ("score", "within_std")

    def mix(
        self, task: Task, shared: Groups, own: Groups, data: Clients, inbox: Inbox, each: Groups | None = None
    ) -> tuple[Update, Groups]:
        """Average what each client received. The scores it gave are reported, the weights are not."""
        averages, scores = [], torch.full((len(data), inbox.neighbours.shape[1]), torch.nan, dtype=torch.float64)
        for position in range(len(data)):
            senders = inbox.senders(position)
            received = rows(inbox.trees["model"], torch.tensor(senders))
            if self._judges:
                judged = rows(inbox.trees["before"], torch.tensor(senders)) if self.scores == "pre" else received
                each_judged = (row(judged, number) for number in range(len(senders)))
                found = [validation_score(self.metric, task, model, data, position) for model in each_judged]
                scores[position, senders] = torch.tensor(found, dtype=torch.float64)
            given = None if each is None else each["row"]["weights"][position][senders]
            weigh = self._row(task, scores[position, senders]) if given is None else given
            averages.append(mean(received, weigh))
        public = {"scores": scores} if self._judges else {}
        return Update({}, torch.ones(len(data)), public), {**own, "model": stack(averages)}

    def _row(self, task: Task, scores: Tensor) -> Tensor:
        """Return how much each neighbour counts, from the scores that one client gave."""
        higher = higher_is_better(self.metric, task)
        if self.weights == "score":
            return by_score(scores, higher)
        return within_one_std(scores, higher) if self.weights == "within_std" else uniform(scores)

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        return own["model"]
