"""PowerSGD: low-rank approximations of matrices (Vogels et al., PowerSGD, NeurIPS 2019)."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch

from fedloom import keys
from fedloom.compression.method import Damaged, Draws, Form, Method
from fedloom.errors import InputError
from fedloom.record import Count
from fedloom.tree import Tree


class PowerSGD(Method):
    """Sends two thin matrices for each matrix of a change.

    P ← orthonormal basis of M Q, Q ← Mᵀ P, and M is about P Qᵀ. Clients start the next time with the Q that they have.
    A leaf with more than two dimensions is a matrix with its first one as rows. Vectors, and matrices that have fewer
    numbers than P and Q, are sent as they are.
    """

    name: ClassVar[str] = "powersgd"

    rank: Count = 2
    """The number of columns of P and Q."""
    error_feedback: bool = True
    """Add what a client's change lost to its next one."""

    @property
    def keeps(self) -> bool:
        return True

    def takes(self, shape: tuple[int, ...]) -> bool:
        rows, columns = _sides(shape)
        return self.rank * (rows + columns) < rows * columns

    def check(self, form: Form) -> None:
        sides = [min(_sides(shape)) for shape, _ in form.values() if len(shape) > 1]
        if not sides:
            raise InputError("PowerSGD compresses matrices, and the model has none.")
        if self.rank > max(sides):
            raise InputError(
                f"The 'rank' of PowerSGD must be at most {max(sides)}, the smaller side of the model's largest matrix. "
                f"Got {self.rank} instead."
            )

    def pack(self, change: Tree, draws: Draws, memory: Tree) -> tuple[Tree, Tree]:
        parts: Tree = {}
        bases: Tree = {}
        for name, leaf in change.items():
            matrix = leaf.reshape(_sides(tuple(leaf.shape))).to(_wide(leaf.dtype))
            before = memory.get(name)
            if before is None or not bool(before.any()):
                generator = keys.generator(keys.key(draws.own, name))
                before = torch.from_numpy(generator.standard_normal((matrix.shape[1], self.rank), dtype=np.float32))
            left = torch.linalg.qr(matrix @ before.to(matrix.dtype))[0]
            right = matrix.mH @ left
            parts |= {f"left/{name}": left, f"right/{name}": right}
            bases[name] = right
        return parts, bases

    def unpack(self, parts: Tree, form: Form, draws: Draws) -> Tree:
        if parts.keys() != {f"{side}/{name}" for name in form for side in ("left", "right")}:
            raise Damaged("a compressed change lacks matrices, or has too many")
        found: Tree = {}
        for name, (shape, kind) in form.items():
            for side, count in zip(("left", "right"), _sides(shape), strict=True):
                part = parts[f"{side}/{name}"]
                if tuple(part.shape) != (count, self.rank) or part.dtype != _wide(kind):
                    raise Damaged(f"the {side} matrix of '{name}' is {part.dtype} {tuple(part.shape)}")
            found[name] = (parts[f"left/{name}"] @ parts[f"right/{name}"].mH).reshape(shape).to(kind)
        return found


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def _wide(kind: torch.dtype) -> torch.dtype:
    """Return the dtype of the matrices: half precision has no QR decomposition."""
    return torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
