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
Groups = dict[str, Tree]  # named trees: what the server knows, what it sends, what a client keeps


def map_leaves(fn: Callable[..., Tensor], *trees: Tree) -> Tree:
    """Apply `fn` to every leaf, across the given trees."""
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
    """Reshape one number per client so that it broadcasts over a stacked leaf."""
    return values.to(leaf.dtype).reshape(values.shape + (1,) * (leaf.dim() - values.dim()))


def is_whole(leaf: Tensor) -> bool:
    """Whether a leaf holds whole numbers or truth values, such as a counter or a mask."""
    return not (leaf.is_floating_point() or leaf.is_complex())


def zeros_like(tree: Tree) -> Tree:
    """Return zeros of the same shapes."""
    return map_leaves(torch.zeros_like, tree)


def norm(tree: Tree) -> Tensor:
    """Return the Euclidean norm of all floating leaves.

    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    squares = [leaf.abs().square().sum() for leaf in tree.values() if not is_whole(leaf)]
    return torch.stack(squares).sum().sqrt()


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack several trees into one with a leading client dimension."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def concat(stacks: Sequence[Tree]) -> Tree:
    """Join stacked trees into one longer stack. A single one is not copied."""
    if len(stacks) == 1:
        return dict(stacks[0])
    return {name: torch.cat([tree[name] for tree in stacks]) for name in stacks[0]}


def expand(tree: Tree, clients: int) -> Tree:
    """Repeat a tree for every client, as a stacked view that copies nothing."""
    return map_leaves(lambda leaf: leaf.expand(clients, *leaf.shape), tree)


def row(stacked: Tree, index: int) -> Tree:
    """Return one client's tree of a stack, as a view."""
    return map_leaves(lambda leaf: leaf[index], stacked)


def rows(stacked: Tree, index: Tensor | slice) -> Tree:
    """Return some clients' trees of a stack: as a copy, or for a range as a view."""
    return map_leaves(lambda leaf: leaf[index], stacked)


def select(tree: Tree, names: Iterable[str]) -> Tree:
    """Return the named leaves, in the tree's own order."""
    wanted = set(names)
    return {name: leaf for name, leaf in tree.items() if name in wanted}


def flatten(stacked: Tree) -> Tensor:
    """Return a stack as one row of numbers per client, leaf after leaf.

    >>> flatten({"w": torch.ones(2, 1, 2), "b": torch.zeros(2, 1)})
    tensor([[1., 1., 0.],
            [1., 1., 0.]])
    """
    return torch.cat([leaf.reshape(len(leaf), -1) for leaf in stacked.values()], 1)


def unflatten(flat: Tensor, like: Tree) -> Tree:
    """Return rows of numbers as a stack, in views; `like` is one tree with the leaves' names and shapes."""
    parts = torch.split(flat, [leaf.numel() for leaf in like.values()], 1)
    return {name: part.reshape(len(flat), *leaf.shape) for part, (name, leaf) in zip(parts, like.items(), strict=True)}


def clone(tree: Tree) -> Tree:
    """Return a copy that shares no memory."""
    return map_leaves(lambda leaf: leaf.detach().clone(memory_format=torch.contiguous_format), tree)


def to(tree: Tree, device: str) -> Tree:
    """Move a tree to a device."""
    return map_leaves(lambda leaf: leaf.to(device), tree)


def size(tree: Tree) -> int:
    """Return the bytes of all leaves."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.values())


def is_sound(tree: Tree, learnt: Iterable[str]) -> bool:
    """Whether the `learnt` leaves are finite and no other leaf has a NaN. Buffers may hold infinities, as masks do."""
    for name, leaf in tree.items():
        if bool(torch.isfinite(leaf.sum())):  # the usual case, at a fraction of the cost
            continue
        if bool((~torch.isfinite(leaf) if name in learnt else torch.isnan(leaf)).any()):
            return False
    return True


def sha256(tree: Tree) -> str:
    """Return a fingerprint of names, shapes, dtypes and bits."""
    digest = hashlib.sha256()
    for name in sorted(tree):
        leaf = tree[name]
        digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
        digest.update(_bytes(leaf).numpy().tobytes())
    return digest.hexdigest()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two leaves have the same bits, so that NaN is the same as itself."""
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(_bytes(one), _bytes(other))


def _bytes(leaf: Tensor) -> Tensor:
    return leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def sha256_of_groups(groups: Groups) -> str:
    """Return a fingerprint of several trees and their names."""
    return sha256({f"{group}/{name}": leaf for group, tree in groups.items() for name, leaf in tree.items()})
