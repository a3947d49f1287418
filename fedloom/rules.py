"""Pure aggregation. Every averaging rule is a mixing matrix: rows of weights times the stacked clients.

All sums are pairwise sums over the clients' positions: position 0 with 1, 2 with 3, those pairs with each other, and so
on. The brackets depend on positions alone, so arrival order and the number of processes cannot change a bit, and a
process that holds a range of clients sends few partial sums instead of one tree per client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedloom.tree import Tree, add, map_leaves, row

Node = tuple[int, int]  # (level, index): the sum of positions index·2^level … (index + 1)·2^level − 1


class PairwiseSum:
    """A sum of trees whose bits depend only on which positions took part.

    >>> total = PairwiseSum()
    >>> for position in (2, 0, 1):
    ...     total.add({"w": torch.tensor(float(position))}, position)
    >>> total.total()
    {'w': tensor(3.)}
    """

    def __init__(self) -> None:
        self.nodes: dict[Node, Tree] = {}

    def add(self, value: Tree, index: int, level: int = 0) -> None:
        while (sibling := self.nodes.pop((level, index ^ 1), None)) is not None:
            value, level, index = add(sibling, value), level + 1, index >> 1
        self.nodes[level, index] = value

    def extend(self, nodes: dict[Node, Tree]) -> None:
        """Partial sums that another process made."""
        for (level, index), value in nodes.items():
            self.add(value, index, level)

    def total(self) -> Tree:
        """All nodes, added from left to right."""
        ordered: Iterator[Tree] = iter(self.nodes[node] for node in sorted(self.nodes, key=lambda n: n[1] << n[0]))
        value = next(ordered)
        for other in ordered:
            value = add(value, other)
        return value


def weighted(stacked: Tree, weights: Tensor, index: int) -> Tree:
    """One client's tree times its weight; whole numbers are summed in double precision."""

    def leaf(value: Tensor) -> Tensor:
        value = value if value.is_floating_point() else value.to(torch.float64)
        return value * weights[index].to(value.dtype)

    return map_leaves(leaf, row(stacked, index))


def finalise(total: Tree, weight: Tensor, whole: Mapping[str, torch.dtype]) -> Tree:
    """A weighted sum divided by the sum of weights; leaves in `whole` (counters) are rounded to the nearest number."""
    means = {name: value / weight.to(value.dtype) for name, value in total.items()}
    return {name: mean.round().to(whole[name]) if name in whole else mean for name, mean in means.items()}


def mean(stacked: Tree, weights: Tensor) -> Tree:
    """Σ w_i x_i / Σ w_i over the leading dimension.

    >>> mean({"w": torch.tensor([[1.0], [4.0]])}, torch.tensor([2.0, 1.0]))
    {'w': tensor([2.])}
    """
    total, weight = PairwiseSum(), PairwiseSum()
    for index in range(len(weights)):
        total.add(weighted(stacked, weights, index), index)
        weight.add({"": weights[index].to(torch.float64)}, index)
    return finalise(total.total(), weight.total()[""], whole_leaves(stacked))


def whole_leaves(tree: Tree) -> dict[str, torch.dtype]:
    """The leaves that hold whole numbers, such as a batch counter, and of which kind."""
    return {name: leaf.dtype for name, leaf in tree.items() if not leaf.is_floating_point()}


def mix(stacked: Tree, matrix: Tensor) -> Tree:
    """One average per row of the matrix: `matrix @ stacked`, each row as a weighted mean."""
    averages = [mean(stacked, weights) for weights in matrix]
    return {name: torch.stack([average[name] for average in averages]) for name in stacked}
