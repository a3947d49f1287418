"""Random directions that anybody can rebuild from one number, and what ranks make of fitness."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedloom.algorithm import Tree, keys
from fedloom.algorithms.evolution.operators import flatten, unflatten


@lru_cache(maxsize=1)  # every client of a round asks for the same directions
def directions(key: int, count: int, size: int, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers, one row for each direction; each row depends on the key and its number alone."""
    kind = np.float64 if dtype == torch.float64 else np.float32
    drawn = [keys.generator(keys.key(key, "direction", row)).standard_normal(size, dtype=kind) for row in range(count)]
    return torch.from_numpy(np.stack(drawn)).to(dtype)


def around(centre: Tree, spread: Tensor, steps: Tensor) -> Tree:
    """A population: the centre plus `spread` times each row of `steps`."""
    flat = flatten({name: leaf.unsqueeze(0) for name, leaf in centre.items()})
    return unflatten(flat + spread * steps, centre)


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Σ weight · row, added in order: its bits do not depend on the number of threads, as a product's may."""
    total = torch.zeros_like(rows[0])
    for weight, row in zip(weights.tolist(), rows, strict=True):
        total.add_(row, alpha=weight)
    return total


def centred_ranks(fitness: Tensor) -> Tensor:
    """From −½ for the worst to ½ for the best; equals share the mean of their ranks.

    >>> centred_ranks(torch.tensor([3.0, -100.0, 3.0]))
    tensor([ 0.2500, -0.5000,  0.2500], dtype=torch.float64)
    """
    below = (fitness[:, None] > fitness[None, :]).sum(1)
    equal = (fitness[:, None] == fitness[None, :]).sum(1) - 1
    return (below + equal / 2.0).to(torch.float64) / (len(fitness) - 1) - 0.5


def natural_utilities(fitness: Tensor) -> Tensor:
    """max(0, ln(λ/2 + 1) − ln k) for rank k from 1 for the best, scaled to a sum of 1, less 1/λ; equals share a mean.

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
