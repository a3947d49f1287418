"""The separable natural evolution strategy of Schaul, Glasmachers and Schmidhuber."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import model_validator

from fedloom.algorithm import (
    Clients,
    Cohort,
    Count,
    Groups,
    InputError,
    Positive,
    Task,
    Tree,
    Update,
    clone,
    map_leaves,
    row,
    select,
)
from fedloom.algorithms.evolution.fitness import FitnessName, Search
from fedloom.algorithms.evolution.operators import flatten, unflatten
from fedloom.algorithms.evolution.perturbations import around, directions, natural_utilities, weighted_sum


class SNES(Search):
    """One model and a width for each weight, both moved towards whatever random changes help.

    Candidates are w + s ∘ ε, which clients rebuild from a seed. With utilities u from ranks, w ← w + η_w s ∘ Σ u ε and
    s ← s ∘ exp(η_s / 2 · Σ u (ε² − 1)). Left to itself, η_s is (3 + ln d) / (5 √d) for d weights. It needs no learning
    rate: for small models whose weights differ in scale.
    """

    reference: ClassVar[str] = "Schaul et al., High Dimensions and Heavy Tails for Natural Evolution Strategies, 2011"

    fitness: FitnessName = "cross_entropy"
    """What candidates are judged by."""
    population: Count = 50
    """The number of candidates in a round."""
    sigma: Positive = 0.05
    """The width that every weight starts with."""
    centre_lr: Positive = 1.0
    """The learning rate of the weights, η_w."""
    width_lr: Positive | None = None
    """The learning rate of the widths, η_s. By default, (3 + ln d) / (5 √d) for d weights."""

    @model_validator(mode="after")
    def _several(self) -> SNES:
        if self.population < 2:
            raise InputError(f"The 'population' of snes must be at least 2. Got {self.population}.")
        return self

    def init(self, task: Task, model: Tree) -> Groups:
        widths = map_leaves(lambda leaf: torch.full_like(leaf, self.sigma), select(model, task.trainable))
        return {"model": model, "widths": widths}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        seed = torch.tensor(cohort.key("directions") >> 1)
        fitness = cohort.reduce(self.judge, {**state, "now": {"seed": seed}})["fitness"]["fitness"]
        centre = select(state["model"], state["widths"])
        steps = self._directions(centre, int(seed))
        utilities = natural_utilities(fitness)
        width = _flat(state["widths"])
        rate = self.width_lr or (3 + math.log(len(width))) / (5 * math.sqrt(len(width)))
        moved = _flat(centre) + self.centre_lr * width * weighted_sum(utilities, steps)
        widened = width * torch.exp(rate / 2 * weighted_sum(utilities, steps.square() - 1))
        cohort.note(fitness=float(fitness.max()), mean_fitness=float(fitness.mean()), width=float(widened.mean()))
        return {"model": {**state["model"], **_tree(moved, centre)}, "widths": _tree(widened, centre)}

    def judge(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        centre = select(shared["model"], shared["widths"])
        population = around(centre, _flat(shared["widths"]), self._directions(centre, int(shared["now"]["seed"])))
        fixed = {name: leaf for name, leaf in shared["model"].items() if name not in centre}
        return self.answer(task, population, fixed, data), own

    def _directions(self, centre: Tree, seed: int) -> torch.Tensor:
        return directions(seed, self.population, len(_flat(centre)), next(iter(centre.values())).dtype)


def _flat(one: Tree) -> torch.Tensor:
    return flatten({name: leaf.unsqueeze(0) for name, leaf in one.items()})[0]


def _tree(flat: torch.Tensor, like: Tree) -> Tree:
    return clone(row(unflatten(flat.unsqueeze(0), like), 0))
