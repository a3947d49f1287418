"""Arithmetic on trees: a tree is a dict of tensors, and the trees of several clients are one stacked tree.

A stacked tree has a leading client dimension on every tensor. All functions return new trees and broadcast: a stacked
tree minus a shared one is stacked, and a vector with one number per client scales each client's tree by its own number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Tree = dict[str, Tensor]


def map_leaves(fn: Callable[..., Tensor], *trees: Tree) -> Tree:
    """`fn` applied to every leaf, leaf by leaf across the given trees."""
    return {name: fn(*(tree[name] for tree in trees)) for name in trees[0]}


def add(a: Tree, b: Tree, scale: float | Tensor = 1.0) -> Tree:
    """a + scale · b.

    >>> add({"w": torch.ones(2)}, {"w": torch.ones(2)}, scale=0.5)
    {'w': tensor([1.5000, 1.5000])}
    """
    if isinstance(scale, Tensor):
        return map_leaves(lambda x, y: x + y * per_client(scale, y), a, b)
    if scale == 1:
        return map_leaves(torch.add, a, b)
    return map_leaves(lambda x, y: torch.add(x, y, alpha=scale), a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a − b."""
    return map_leaves(torch.sub, a, b)


def change(a: Tree, b: Tree) -> Tree:
    """What changed from b to a: a − b, but 0 where both are the same infinity."""
    return map_leaves(lambda x, y: torch.where(x == y, torch.zeros_like(x), x - y), a, b)


def scale(tree: Tree, factor: float | Tensor) -> Tree:
    """factor · tree; a vector of factors scales each client of a stacked tree by its own."""
    if isinstance(factor, Tensor):
        return map_leaves(lambda x: x * per_client(factor, x), tree)
    return map_leaves(lambda x: x * factor, tree)


def per_client(values: Tensor, leaf: Tensor) -> Tensor:
    """One number per client, shaped to broadcast over a stacked leaf."""
    return values.to(leaf.dtype).reshape(values.shape + (1,) * (leaf.dim() - values.dim()))


def is_whole(leaf: Tensor) -> bool:
    """Whether a leaf holds whole numbers or truth values, such as a counter or a mask."""
    return not (leaf.is_floating_point() or leaf.is_complex())


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros of the same shapes."""
    return map_leaves(torch.zeros_like, tree)


def norm(tree: Tree) -> Tensor:
    """The Euclidean norm over all floating leaves.

    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    squares = [leaf.abs().square().sum() for leaf in tree.values() if not is_whole(leaf)]
    return torch.stack(squares).sum().sqrt()


def stack(trees: Sequence[Tree]) -> Tree:
    """Several trees as one, with a leading client dimension."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def concat(stacks: Sequence[Tree]) -> Tree:
    """Several stacked trees as one longer stack; a single one is not copied."""
    if len(stacks) == 1:
        return dict(stacks[0])
    return {name: torch.cat([tree[name] for tree in stacks]) for name in stacks[0]}


def expand(tree: Tree, clients: int) -> Tree:
    """The same tree for every client: a stacked view that copies nothing."""
    return map_leaves(lambda leaf: leaf.expand(clients, *leaf.shape), tree)


def row(stacked: Tree, index: int) -> Tree:
    """One client's tree out of a stack, as a view."""
    return map_leaves(lambda leaf: leaf[index], stacked)


def rows(stacked: Tree, index: Tensor) -> Tree:
    """Some clients' trees out of a stack, as a copy."""
    return map_leaves(lambda leaf: leaf[index], stacked)


def select(tree: Tree, names: Iterable[str]) -> Tree:
    """The named leaves, in the tree's own order."""
    wanted = set(names)
    return {name: leaf for name, leaf in tree.items() if name in wanted}


def clone(tree: Tree) -> Tree:
    """A copy that shares no memory."""
    return map_leaves(lambda leaf: leaf.detach().clone(memory_format=torch.contiguous_format), tree)


def to(tree: Tree, device: str) -> Tree:
    """The same tree on another device."""
    return map_leaves(lambda leaf: leaf.to(device), tree)


def size(tree: Tree) -> int:
    """Bytes of all leaves."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.values())


def is_finite(tree: Tree) -> bool:
    """Whether no leaf has a NaN or an infinity."""
    return all(bool(torch.isfinite(leaf).all()) for leaf in tree.values() if not is_whole(leaf))


def is_sound(tree: Tree, learnt: Iterable[str]) -> bool:
    """Whether what is learnt is finite and nothing else is NaN: a buffer may hold infinities, as masks do."""
    for name, leaf in tree.items():
        if bool(torch.isfinite(leaf.sum())):  # the usual case, at a fraction of the cost
            continue
        if bool((~torch.isfinite(leaf) if name in learnt else torch.isnan(leaf)).any()):
            return False
    return True


def sha256(tree: Tree) -> str:
    """A fingerprint of names, shapes, dtypes and bits."""
    digest = hashlib.sha256()
    for name in sorted(tree):
        leaf = tree[name].detach().cpu().contiguous()
        digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
        digest.update(leaf.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
