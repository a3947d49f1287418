"""What a compression method is: it turns a change into parts, which are named tensors, and parts into a change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le
from pydantic import Strict
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.record import Record
from fedloom.tree import Tree, change

Form = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # the shape and dtype of every leaf
Fraction = Annotated[float, Strict(), Gt(0), Le(1)]
_DOUBLE = (torch.float64, torch.complex128)


class Damaged(FedloomError):
    """Parts that are not the encoding of a change of the expected form."""


@dataclass(frozen=True)
class Draws:
    """The keys of random choices: one for this client's change, and one that all clients of a call have in common."""

    own: int
    common: int


class Method(Record):
    """Base of compression methods."""

    name: ClassVar[str] = ""
    exact: ClassVar[bool] = False  # whether what arrives has the bits of what was sent
    goes_down: ClassVar[bool] = False  # whether it also compresses a model, which is not a change

    @property
    def feedback(self) -> bool:
        """Whether a client adds what its last message left out to its next change."""
        return bool(getattr(self, "error_feedback", False))

    @property
    def keeps(self) -> bool:
        """Whether clients keep something between rounds."""
        return self.feedback

    @property
    def scatters(self) -> bool:
        """Whether each client sends other numbers of a change, and zeros stand for the rest."""
        return False

    @property
    def commutes(self) -> bool:
        """Whether the sum of compressed changes is the compressed sum, so that masks can cover it."""
        return False

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether the method applies to a leaf of this shape. Others are sent as they are."""
        return True

    def check(self, form: Form) -> None:
        """Raise `InputError` if the method does not fit a model."""

    def difference(self, leaves: Tree, base: Tree) -> Tree:
        """Return what `pack` takes: how leaves differ from their base, or the leaves themselves if there is none."""
        return change(leaves, base) if base else leaves

    def apply(self, difference: Tree, form: Form, base: Tree) -> Tree:
        """Return the leaves that differ so from their base."""
        return {name: base[name] + leaf if name in base else leaf for name, leaf in difference.items()}

    def pack(self, change: Tree, draws: Draws, memory: Tree) -> tuple[Tree, Tree]:
        """Return the parts of one client's change, and what it keeps; `memory` is what it kept before, if anything."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def unpack(self, parts: Tree, form: Form, draws: Draws) -> Tree:
        """Return the change that parts stand for. Raise `Damaged` before anything is computed with wrong parts."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")


class VectorMethod(Method):
    """Base of methods that see a change as one long vector."""

    def pack(self, change: Tree, draws: Draws, memory: Tree) -> tuple[Tree, Tree]:
        return self.encode(vector(change), draws.own), {}

    def unpack(self, parts: Tree, form: Form, draws: Draws) -> Tree:
        return leaves_of(self.decode(parts, count_of(form), precision(form), draws.own), form)

    def encode(self, values: Tensor, key: int) -> Tree:
        """Return the parts of a vector."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def decode(self, parts: Tree, count: int, kind: torch.dtype, key: int) -> Tensor:
        """Return the vector of this length and dtype that parts stand for."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")


def form_of(leaves: Tree) -> Form:
    """Return the form of a tree."""
    return {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in leaves.items()}


def count_of(form: Form) -> int:
    """Return how many real numbers leaves of this form have."""
    return sum(numbers(shape, kind) for shape, kind in form.values())


def precision(form: Form) -> torch.dtype:
    """Return the dtype of the vector of all leaves: single precision unless a leaf has double precision."""
    return torch.float64 if any(kind in _DOUBLE for _, kind in form.values()) else torch.float32


def vector(leaves: Tree) -> Tensor:
    """Return all numbers of a tree, one leaf after another."""
    kind = precision(form_of(leaves))
    return torch.cat([real(leaf).reshape(-1).to(kind) for leaf in leaves.values()])


def leaves_of(values: Tensor, form: Form) -> Tree:
    """Return a vector as leaves of a form."""
    found, begin = {}, 0
    for name, (shape, kind) in form.items():
        count = numbers(shape, kind)
        found[name], begin = as_leaf(values[begin : begin + count], shape, kind), begin + count
    return found


def as_leaf(values: Tensor, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """Return real numbers as one leaf."""
    if not kind.is_complex:
        return values.reshape(shape).to(kind)
    pairs = values.reshape(*shape, 2)
    return torch.complex(pairs[..., 0], pairs[..., 1]).to(kind)


def numbers(shape: tuple[int, ...], kind: torch.dtype) -> int:
    """Return how many real numbers a leaf has."""
    return math.prod(shape) * (2 if kind.is_complex else 1)


def real(leaf: Tensor) -> Tensor:
    """Return a leaf's real numbers; a complex one has two."""
    return torch.view_as_real(leaf.contiguous()) if leaf.is_complex() else leaf


def take(parts: Tree, **expected: tuple[torch.dtype, int | None]) -> list[Tensor]:
    """Return the expected parts: vectors with this dtype and length, or of any length. There may be no others."""
    if parts.keys() != expected.keys():
        raise Damaged(f"a compressed change has the parts {', '.join(expected)}, and {len(parts)} parts came")
    for name, (kind, count) in expected.items():
        part = parts[name]
        if part.dim() != 1 or part.dtype != kind or count not in (None, len(part)):
            length = "any length" if count is None else f"length {count}"
            raise Damaged(f"the part '{name}' must be {kind} of {length}, and is {part.dtype} {tuple(part.shape)}")
    return [parts[name] for name in expected]


def kept(keep: float, count: int) -> int:
    """Return how many of `count` numbers are sent: at least one, if there are any.

    >>> [kept(0.01, count) for count in (0, 50, 1000)]
    [0, 1, 10]
    """
    return min(max(math.ceil(round(keep * count, 6)), 1), count)
