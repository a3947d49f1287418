"""The separable natural evolution strategy of Schaul, Glasmachers and Schmidhuber."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Clients, Cohort, Groups, Positive, Task, Tree, Update, map_leaves, select, without
from fedloom.algorithms.evolution.fitness import FitnessName, Search
from fedloom.algorithms.evolution.openai_es import around, directions_from, to_tree, to_vector, weighted_sum
from fedloom.record import AtLeastTwo


class SNES(Search):
    """Adapts each weight and its step; needs no gradients.

    Candidates are w + s ∘ ε, which clients rebuild from a seed. With utilities u from the ranks of the candidates,
    w ← w + η_w s ∘ Σ u ε and s ← s ∘ exp(η_s / 2 · Σ u (ε² − 1)). By default η_s is (3 + ln d) / (5 √d) for d weights,
    so you need no learning rate. Use it for small models whose weights differ in scale.
    """

    reference: ClassVar[str] = "Schaul et al., High Dimensions and Heavy Tails for Natural Evolution Strategies, 2011"

    fitness: FitnessName = "cross_entropy"
    """What candidates are judged by."""
    population: AtLeastTwo = 50
    """The number of candidates in a round."""
    sigma: Positive = 0.05
    """The width that every weight starts with."""
    centre_lr: Positive = 1.0
    """The learning rate of the weights, η_w."""
    width_lr: Positive | None = None
    """The learning rate of the widths, η_s. By default, (3 + ln d) / (5 √d) for d weights."""

    def init(self, task: Task, model: Tree) -> Groups:
        widths = map_leaves(lambda leaf: torch.full_like(leaf, self.sigma), select(model, task.trainable))
        return {"model": model, "widths": widths}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        seed = torch.tensor(cohort.key("directions") >> 1)
        fitness = cohort.reduce(self.judge, {**state, "now": {"seed": seed}})["fitness"]["fitness"]
        centre = select(state["model"], state["widths"])
        steps = directions_from(centre, seed, self.population)
        utilities = natural_utilities(fitness)
        width = to_vector(state["widths"])
        rate = self.width_lr or (3 + math.log(len(width))) / (5 * math.sqrt(len(width)))
        moved = to_vector(centre) + self.centre_lr * width * weighted_sum(utilities, steps)
        widened = width * torch.exp(rate / 2 * weighted_sum(utilities, steps.square() - 1))
        cohort.note(fitness=float(fitness.max()), mean_fitness=float(fitness.mean()), width=float(widened.mean()))
        return {"model": {**state["model"], **to_tree(moved, centre)}, "widths": to_tree(widened, centre)}

    def judge(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        centre = select(shared["model"], shared["widths"])
        steps = directions_from(centre, shared["now"]["seed"], self.population)
        population = around(centre, to_vector(shared["widths"]), steps)
        return self.answer(task, population, without(shared["model"], centre), data), own


def natural_utilities(fitness: Tensor) -> Tensor:
    """Return max(0, ln(λ/2 + 1) − ln k) for rank k (1 is the best), scaled to a sum of 1, minus 1/λ. Ties share a mean.

    >>> natural_utilities(torch.tensor([1.0, 2.0]))
    tensor([-0.5000,  0.5000], dtype=torch.float64)
    """
    count = len(fitness)
    rank = torch.arange(1, count + 1, dtype=torch.float64)
    table = (math.log(count / 2 + 1) - rank.log()).clamp(min=0)
    table = table / table.sum() - 1 / count
    utilities = torch.empty(count, dtype=torch.float64)
    utilities[torch.argsort(fitness, descending=True, stable=True)] = table
    equal = (fitness[:, None] == fitness[None, :]).to(torch.float64)
    return (equal @ utilities) / equal.sum(1)
