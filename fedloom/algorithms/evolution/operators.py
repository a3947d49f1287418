"""Selection, crossover and mutation: pure functions on a stacked population, whose first dimension is individuals.

All random numbers come from a NumPy generator that the caller makes from a key (`keys.generator`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.tree import Tree, concat, flatten, map_leaves, row, rows, unflatten

Random = np.random.Generator
CrossoverName = Literal["kernelwise", "filterwise", "halving", "interleave", "mean"]
MutationName = Literal["multiplication", "uniform_multiplication", "offset"]


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
