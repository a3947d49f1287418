"""Random directions that server and clients can rebuild from a seed, and weights from the ranks of fitness."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedloom import keys
from fedloom.tree import Tree, clone, expand, flatten, row, unflatten


@lru_cache(maxsize=1)  # every client of a round asks for the same directions
def directions(key: int, count: int, size: int, dtype: torch.dtype) -> Tensor:
    """Draw standard normal numbers, one row for each direction. A row depends only on the key and its number."""
    kind = np.float64 if dtype == torch.float64 else np.float32
    drawn = [keys.generator(keys.key(key, "direction", row)).standard_normal(size, dtype=kind) for row in range(count)]
    return torch.from_numpy(np.stack(drawn)).to(dtype)


def directions_from(centre: Tree, seed: Tensor, count: int) -> Tensor:
    """Draw directions that fit a model."""
    vector = to_vector(centre)
    return directions(int(seed), count, len(vector), vector.dtype)


def to_vector(tree: Tree) -> Tensor:
    """Return a tree as one vector of numbers, leaf after leaf."""
    return flatten(expand(tree, 1))[0]


def to_tree(vector: Tensor, like: Tree) -> Tree:
    """Return a vector as a tree with the leaves of `like`."""
    return clone(row(unflatten(vector.unsqueeze(0), like), 0))


def around(centre: Tree, spread: Tensor, steps: Tensor) -> Tree:
    """Return a population: the centre plus `spread` times each row of `steps`."""
    return unflatten(to_vector(centre) + spread * steps, centre)


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Return Σ weight · row, added in order: unlike a product, its bits do not depend on the number of threads."""
    total = torch.zeros_like(rows[0])
    for weight, direction in zip(weights.tolist(), rows, strict=True):
        total.add_(direction, alpha=weight)
    return total


def centred_ranks(fitness: Tensor) -> Tensor:
    """Return ranks from −½ for the worst to ½ for the best. Ties share the mean of their ranks.

    >>> centred_ranks(torch.tensor([3.0, -100.0, 3.0]))
    tensor([ 0.2500, -0.5000,  0.2500], dtype=torch.float64)
    """
    below = (fitness[:, None] > fitness[None, :]).sum(1)
    equal = (fitness[:, None] == fitness[None, :]).sum(1) - 1
    return (below + equal / 2.0).to(torch.float64) / (len(fitness) - 1) - 0.5


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
