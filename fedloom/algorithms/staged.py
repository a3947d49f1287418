"""Hierarchical averaging."""

from __future__ import annotations

import torch

from fedloom.algorithm import Update
from fedloom.algorithms.fedavg import FedAvg
from fedloom.clients import Clients
from fedloom.cohort import Cohort
from fedloom.local import Groups
from fedloom.record import Count
from fedloom.rules import mean
from fedloom.task import Task
from fedloom.tree import Tree, stack


class Staged(FedAvg):
    """Averages within groups first, then the groups' averages, as edge servers and a cloud would.

    Weighted by what the groups weigh in sum, it equals flat averaging.
    """

    groups: Count = 2

    def average(self, model: Tree, cohort: Cohort, shared: Groups) -> Tree:
        place = torch.arange(len(cohort)) % self.groups
        found = cohort.reduce(self.member, shared, each={"group": {"number": place}})
        present = [name for name, weight in found.weights.items() if weight > 0]
        return mean(stack([found[name] for name in present]), torch.stack([found.weights[name] for name in present]))

    def member(self, task: Task, shared: Groups, own: Groups, data: Clients, each: Groups) -> tuple[Update, Groups]:
        """A client's answer to its own group; to the others it sends nothing of weight."""
        update, kept = self.client(task, shared, own, data)
        weigh, number = update.weights("model"), each["group"]["number"]
        names = [f"group{group}" for group in range(self.groups)]
        split = {name: torch.where(number == group, weigh, 0.0) for group, name in enumerate(names)}
        return Update(dict.fromkeys(names, update.groups["model"]), split, update.public, update.trained), kept
