"""Federated neuroevolution: a genetic algorithm in which clients measure the fitness."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from fedloom import keys
from fedloom.algorithm import Cohort, Groups, InputError, Task
from fedloom.algorithms.evolution import operators
from fedloom.algorithms.evolution.fitness import Search
from fedloom.record import AtLeastOne, AtLeastTwo, Count, NonNegative, Share
from fedloom.tree import Tree, clone, row, select, stack

NEVER = float("inf")  # a value that no generation has


class Neuroevolution(Search):
    """Breeds models that clients judge; needs no gradients.

    P ← best ∪ mutate(cross(best)). A round is a generation. Clients answer with one fitness for each individual. The
    server takes the mean over all their examples, keeps the `parents` − 1 fittest and one random other unchanged, and
    fills the population with mutated children of random pairs. If the validation accuracy of a generation's fittest
    equals one of the last `stuck_check_length`, mutation grows by `stuck_evasion_rate` a generation, up to
    `stuck_multiplier_max` times (the number of mutated values by its square root). The global model is the fittest of
    the last generation. Use it for models of a few thousand weights whose gradients must stay secret or do not exist.
    """

    reference: ClassVar[str] = "Szegedi, Algorithms and Models for Federated Machine Learning, ELTE 2019"

    population: Count = 50
    """The number of models in a generation."""
    parents: Count = 8
    """How many models survive and are bred: the fittest ones and one random other."""
    crossover: operators.CrossoverName = "kernelwise"
    """How two parents make a child."""
    mutation: operators.MutationName = "multiplication"
    """How a value is mutated."""
    mutation_chance: Share = 0.01
    """The share of values that are mutated."""
    mutation_rate: NonNegative = 3.0
    """How much a mutated value changes."""
    mutation_draw: Literal["layer", "value"] = "layer"
    """Whether a random number is drawn for every layer or for every value."""
    stuck_check_length: Count = 30
    """How many generations to look back to see whether the search is stuck."""
    stuck_evasion_rate: AtLeastOne = 1.25
    """The factor by which mutation grows in each generation while the search is stuck."""
    stuck_multiplier_max: AtLeastOne = 5.0
    """The most that mutation grows by."""

    @model_validator(mode="after")
    def _sizes(self) -> Neuroevolution:
        if not 2 <= self.parents < self.population:
            raise InputError(
                "The 'parents' of neuroevolution must be at least 2 and fewer than the population, so that there are "
                f"pairs and children. Got parents = {self.parents} with population = {self.population}."
            )
        return self

    def init(self, task: Task, model: Tree) -> Groups:
        return {
            "model": model,
            "population": newcomers(task, self.population, keys.key(task.seed, "population"), first=model),
            "stuck": {
                "multiplier": torch.ones((), dtype=torch.float64),
                "recent": torch.full((self.stuck_check_length,), NEVER, dtype=torch.float64),
            },
        }

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        population = state["population"]
        fitness = self.ask(cohort, population, state["model"])
        fittest = int(fitness.argmax())
        model = {**state["model"], **clone(row(population, fittest))}
        multiplier = float(state["stuck"]["multiplier"])
        chance, rate = self.mutation_chance * multiplier**0.5, self.mutation_rate * multiplier
        mutation = partial(operators.mutate, kind=self.mutation, chance=chance, rate=rate, each=self.mutation_draw)
        crossover, random = operators.CROSSOVERS[self.crossover], keys.generator(cohort.key("breeding"))
        bred = operators.next_generation(population, fitness, self.parents, random, crossover, mutation)
        seen = cohort.validate(model)
        watched = fitness[fittest] if seen is None else torch.tensor(seen, dtype=torch.float64)
        cohort.note(fitness=float(fitness[fittest]), mean_fitness=float(fitness.mean()), multiplier=multiplier)
        cohort.note(diversity=float(operators.diversity(population)), **({} if seen is None else {"validation": seen}))
        return {"model": model, "population": bred, "stuck": self._stuck(state["stuck"], watched)}

    def _stuck(self, stuck: Tree, watched: Tensor) -> Tree:
        """Return the multiplier for the next generation, and the values that the next one is compared with."""
        grown = (stuck["multiplier"] * self.stuck_evasion_rate).clamp(max=self.stuck_multiplier_max)
        multiplier = torch.where((stuck["recent"] == watched).any(), grown, torch.ones_like(grown))
        return {"multiplier": multiplier, "recent": torch.cat([stuck["recent"][1:], watched.reshape(1)])}


class RandomSearch(Search):
    """Tries random models and keeps the fittest: a baseline.

    w ← the fittest of w and new draws. The best of all rounds is judged again beside the new models, so a round costs
    `population` evaluations.
    """

    name: ClassVar[str] = "random_search"
    reference: ClassVar[str] = "Brooks, A Discussion of Random Methods for Seeking Maxima, Operations Research 1958"

    population: AtLeastTwo = 50
    """The number of models judged in a round. One of them is the best so far."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        best = select(state["model"], cohort.task.trainable)
        population = newcomers(cohort.task, self.population, cohort.key("newcomers"), first=best)
        fitness = self.ask(cohort, population, state["model"])
        fittest = int(fitness.argmax())
        cohort.note(fitness=float(fitness[fittest]), mean_fitness=float(fitness.mean()))
        return {"model": {**state["model"], **clone(row(population, fittest))}}


def newcomers(task: Task, count: int, key: int, first: Tree) -> Tree:
    """Return a population of trainable weights: `first`, and others initialised like it, each from its own seed."""
    others = (replace(task, seed=keys.key(key, number) >> 1).initial() for number in range(1, count))
    return stack([select(tree, task.trainable) for tree in (first, *others)])
