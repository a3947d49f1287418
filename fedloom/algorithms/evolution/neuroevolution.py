"""Federated neuroevolution: a genetic algorithm in which clients measure the fitness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import model_validator
from torch import Tensor

from fedloom import keys
from fedloom.algorithm import Cohort, Groups, InputError, Task
from fedloom.algorithms.evolution.fitness import Search
from fedloom.record import AtLeastOne, AtLeastTwo, Count, NonNegative, Share
from fedloom.tree import Tree, clone, concat, flatten, map_leaves, row, rows, select, stack, unflatten

Random = np.random.Generator
CrossoverName = Literal["kernelwise", "filterwise", "halving", "interleave", "mean"]
MutationName = Literal["multiplication", "uniform_multiplication", "offset"]


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
    crossover: CrossoverName = "kernelwise"
    """How two parents make a child."""
    mutation: MutationName = "multiplication"
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
        population = newcomers(task, self.population, keys.key(task.seed, "population"), first=model)
        never = torch.full((self.stuck_check_length,), torch.inf, dtype=torch.float64)  # what no generation has
        stuck = {"multiplier": torch.ones((), dtype=torch.float64), "recent": never}
        return {"model": model, "population": population, "stuck": stuck}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        population = state["population"]
        fitness = self.ask(cohort, population, state["model"])
        fittest = int(fitness.argmax())
        model = {**state["model"], **clone(row(population, fittest))}
        multiplier = float(state["stuck"]["multiplier"])
        chance, rate = self.mutation_chance * multiplier**0.5, self.mutation_rate * multiplier
        mutation = partial(mutate, kind=self.mutation, chance=chance, rate=rate, each=self.mutation_draw)
        crossover, random = CROSSOVERS[self.crossover], keys.generator(cohort.key("breeding"))
        bred = next_generation(population, fitness, self.parents, random, crossover, mutation)
        seen = cohort.validate(model)
        watched = fitness[fittest] if seen is None else torch.tensor(seen, dtype=torch.float64)
        cohort.note(fitness=float(fitness[fittest]), mean_fitness=float(fitness.mean()), multiplier=multiplier)
        cohort.note(diversity=float(diversity(population)), **({} if seen is None else {"validation": seen}))
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


# --- selection, crossover and mutation: pure functions on a stacked population, whose first dimension is individuals


def choose_parents(fitness: Tensor, parents: int, random: Random) -> Tensor:
    """Return the numbers of the `parents` − 1 fittest, best first, and of one random other. Ties keep their order.

    >>> choose_parents(torch.tensor([0.1, 0.9, 0.5]), 2, np.random.default_rng(0))[0]
    tensor(1)
    """
    order = torch.argsort(fitness, descending=True, stable=True)
    other = int(random.integers(parents - 1, len(order)))
    return torch.cat([order[: parents - 1], order[other : other + 1]])


def choose_pairs(parents: int, offspring: int, random: Random) -> tuple[Tensor, Tensor]:
    """Draw two different parents for each child."""
    first = random.integers(parents, size=offspring)
    second = (first + random.integers(1, parents, size=offspring)) % parents
    return torch.from_numpy(first), torch.from_numpy(second)


# --- crossover: `a` and `b` are the first and second parents of all children, stacked


def halving(a: Tree, b: Tree, random: Random) -> Tree:
    """Take the first half of all values (rounded down) from the first parent and the rest from the second."""
    return _from_first(a, b, lambda place, count: place < count // 2)


def interleave(a: Tree, b: Tree, random: Random) -> Tree:
    """Number all values from 1; take the even ones from the first parent and the odd ones from the second."""
    return _from_first(a, b, lambda place, count: place % 2 == 1)


def mean(a: Tree, b: Tree, random: Random) -> Tree:
    """Take the mean of the parents for every value."""
    return map_leaves(lambda one, other: (one + other) / 2, a, b)


def kernelwise(a: Tree, b: Tree, random: Random) -> Tree:
    """Choose a parent for each kernel; all outputs (dimension 0) share the choice. A bias comes from one parent whole.

    This is what the published listing computes in Keras's layout, in which outputs are the last dimension.
    """
    return map_leaves(lambda one, other: _chosen(one, other, (len(one), 1, *one.shape[2:]), random), a, b)


def filterwise(a: Tree, b: Tree, random: Random) -> Tree:
    """Choose a parent for each output (dimension 0), so for whole filters, as the published text says."""
    return map_leaves(lambda one, other: _chosen(one, other, one.shape[:2] + (1,) * (one.dim() - 2), random), a, b)


CROSSOVERS = {crossover.__name__: crossover for crossover in (kernelwise, filterwise, halving, interleave, mean)}


def _from_first(a: Tree, b: Tree, rule: Callable[[Tensor, int], Tensor]) -> Tree:
    """Take the places that `rule` chooses from the first parent and the others from the second."""
    one, other = flatten(a), flatten(b)
    chosen = rule(torch.arange(one.shape[1]), one.shape[1])
    return unflatten(torch.where(chosen, one, other), row(a, 0))


def _chosen(one: Tensor, other: Tensor, shape: tuple[int, ...], random: Random) -> Tensor:
    shape = shape if one.dim() > 1 else one.shape  # a single number has neither inputs nor outputs
    return torch.where(torch.from_numpy(random.integers(2, size=shape).astype(bool)), one, other)


# --- mutation


def mutate(
    offspring: Tree,
    random: Random,
    kind: MutationName = "multiplication",
    chance: float = 0.01,
    rate: float = 3.0,
    each: Literal["layer", "value"] = "layer",
) -> Tree:
    """Change exactly `int(size · chance)` values of each leaf of each child.

    - `multiplication`: w ← w (1 + ε), ε from N(0, 0.01 · rate);
    - `uniform_multiplication`: the same with ε uniform in ± 0.01 · rate;
    - `offset`: w ← w + ε, ε uniform in ± rate.

    There is one ε for each child and leaf, as published (`each = "layer"`), or one for each value (`"value"`).
    """

    def leaf(values: Tensor) -> Tensor:
        flat = values.reshape(len(values), -1)
        count, size = flat.shape
        share = min(int(size * chance), size)
        if share == 0:
            return values
        places = torch.from_numpy(_some(count, size, share, random))
        change = torch.from_numpy(_changes(kind, rate, (count, share if each == "value" else 1), random)).to(flat.dtype)
        before = flat.gather(1, places)
        after = before + change if kind == "offset" else before * (1 + change)
        return flat.scatter(1, places, after).reshape(values.shape)

    return map_leaves(leaf, offspring)


def _some(count: int, size: int, share: int, random: Random) -> NDArray[np.int64]:
    """Draw `share` different places out of `size` for each of `count` children; each set is equally likely."""
    if share * 8 > size:
        order: NDArray[np.int64] = np.argsort(random.random((count, size)), axis=1)
        return order[:, :share]
    # Floyd's algorithm for all children at once: its cost grows with the share, not with the size
    children = np.arange(count)
    drawn = random.integers(np.arange(size - share + 1, size + 1), size=(count, share))
    taken = np.zeros((count, size), dtype=bool)
    for step in range(share):
        drawn[:, step] = np.where(taken[children, drawn[:, step]], size - share + step, drawn[:, step])
        taken[children, drawn[:, step]] = True
    return drawn


def _changes(kind: str, rate: float, shape: tuple[int, int], random: Random) -> NDArray[np.float64]:
    """Draw the ε of `mutate`."""
    if kind == "multiplication":
        return random.normal(0.0, 0.01 * rate, size=shape)
    widest = rate if kind == "offset" else 0.01 * rate
    return random.uniform(-widest, widest, size=shape)


# --- a generation


def next_generation(
    population: Tree,
    fitness: Tensor,
    parents: int,
    random: Random,
    crossover: Callable[[Tree, Tree, Random], Tree],
    mutation: Callable[[Tree, Random], Tree],
) -> Tree:
    """Return the parents unchanged, then mutated children of random pairs of them. The size stays the same."""
    kept = rows(population, choose_parents(fitness, parents, random))
    first, second = choose_pairs(parents, len(fitness) - parents, random)
    children = mutation(crossover(rows(kept, first), rows(kept, second), random), random)
    return concat([kept, children])


def diversity(population: Tree) -> Tensor:
    """Return the root mean square distance of individuals from their mean, divided by their root mean square norm.

    >>> diversity({"w": torch.tensor([[1.0], [-1.0]])}), diversity({"w": torch.tensor([[2.0], [2.0]])})
    (tensor(1.), tensor(0.))
    """
    flat = flatten(population)
    norm, spread = torch.linalg.vector_norm(flat), torch.linalg.vector_norm(flat - flat.mean(0))
    return spread / norm if norm > 0 else torch.zeros(())
