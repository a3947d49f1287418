"""Weighted means of clients' trees, with the same bits on every backend.

All sums are pairwise sums over the clients' positions: position 0 with 1, 2 with 3, those pairs with each other, and so
on. The brackets depend only on positions, so the order of arrival and the number of processes cannot change a bit. A
process that holds a range of clients sends a few partial sums instead of one tree per client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedloom.tree import Tree, add, is_whole

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
        """Add the tree of one position, or the sum of a node, and merge it with its sibling if that is there."""
        while (sibling := self.nodes.pop((level, index ^ 1), None)) is not None:
            value, level, index = add(sibling, value), level + 1, index >> 1
        self.nodes[level, index] = value

    def extend(self, nodes: dict[Node, Tree]) -> None:
        """Add partial sums that another process made."""
        for (level, index), value in nodes.items():
            self.add(value, index, level)

    def total(self) -> Tree:
        """Return the sum of all nodes, added from left to right."""
        ordered: Iterator[Tree] = iter(self.nodes[node] for node in sorted(self.nodes, key=lambda n: n[1] << n[0]))
        value = next(ordered)
        for other in ordered:
            value = add(value, other)
        return value


_HALF = (torch.float16, torch.bfloat16)
BLOCK = 800_000  # numbers to sum at a time, so that partial sums stay in the cache
ROWS_BLOCK = 200_000  # the same for separate rows, which are copied into a stack first


Rows = Tensor | Sequence[Tensor]  # a stack, or separate rows, which saves a copy of large ones


def partial_sums(stacked: Mapping[str, Rows], weights: Tensor, first: int = 0) -> dict[Node, Tree]:
    """Return weighted sums over the leading dimension, whose rows are the positions `first`, `first + 1`, …

    The brackets and the bits are those of `PairwiseSum`. Whole numbers are summed in double precision.
    """
    found: dict[Node, Tree] = {}
    for begin, level in _aligned(first, len(weights)):
        rows = slice(begin - first, begin - first + (1 << level))
        found[level, begin >> level] = {name: _pairwise(leaf[rows], weights[rows]) for name, leaf in stacked.items()}
    return found


def _aligned(first: int, count: int) -> Iterator[tuple[int, int]]:
    """Divide a range of positions into the fewest nodes; yield where each begins, and its level.

    >>> list(_aligned(5, 5))
    [(5, 0), (6, 1), (8, 1)]
    """
    end = first + count
    while first < end:
        level = (first & -first).bit_length() - 1 if first else (end - first).bit_length() - 1
        level = min(level, (end - first).bit_length() - 1)
        yield first, level
        first += 1 << level


def _pairwise(rows: Rows, weights: Tensor) -> Tensor:
    """Return the weighted sum of 2^k rows, pair by pair, one block of columns after the other."""
    first, count = rows[0], len(rows)
    kind = _summed_as(first)
    factors = weights.to(kind).unsqueeze(1)
    if count == 1:
        return (first.to(kind) * factors[0]).reshape(first.shape)
    flat = rows.reshape(count, -1) if isinstance(rows, Tensor) else [row.reshape(-1) for row in rows]
    total = torch.empty(first.numel(), dtype=kind, device=first.device)
    width = max((BLOCK if isinstance(rows, Tensor) else ROWS_BLOCK) // count, 1)
    for begin in range(0, len(total), width):
        block = slice(begin, begin + width)
        level = flat[:, block] if isinstance(flat, Tensor) else torch.stack([row[block] for row in flat])
        level = level.to(kind) * factors
        while len(level) > 1:
            level = level[0::2] + level[1::2]
        total[block] = level[0]
    return total.reshape(first.shape)


def finalise(total: Tree, weight: Tensor, whole: Mapping[str, torch.dtype]) -> Tree:
    """Divide a weighted sum by the sum of weights; leaves in `whole` get back their dtype, and counters are rounded."""
    means = {name: value / weight.to(value.dtype) for name, value in total.items()}
    return {name: _back(mean, whole[name]) if name in whole else mean for name, mean in means.items()}


def _summed_as(leaf: Tensor) -> torch.dtype:
    """Return the dtype in which to sum a leaf: half precision would lose too much."""
    return torch.float64 if is_whole(leaf) else torch.float32 if leaf.dtype in _HALF else leaf.dtype


def _back(mean: Tensor, kind: torch.dtype) -> Tensor:
    """Return a mean in the dtype of its leaf."""
    return mean.to(kind) if kind.is_floating_point else mean.round().to(kind)


def mean(stacked: Tree, weights: Tensor) -> Tree:
    """Return Σ w_i x_i / Σ w_i over the leading dimension.

    >>> mean({"w": torch.tensor([[1.0], [4.0]])}, torch.tensor([2.0, 1.0]))
    {'w': tensor([2.])}
    """
    total, weight = PairwiseSum(), PairwiseSum()
    total.extend(partial_sums(stacked, weights))
    weight.extend(partial_sums({"": torch.ones(len(weights), dtype=torch.float64)}, weights))
    return finalise(total.total(), weight.total()[""], other_dtypes(stacked))


def other_dtypes(tree: Tree) -> dict[str, torch.dtype]:
    """Return the leaves that are summed in another dtype: whole numbers, such as batch counters, and half precision."""
    return {name: leaf.dtype for name, leaf in tree.items() if _summed_as(leaf) != leaf.dtype}
