"""Half precision: 16 bits a number."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedloom.compression.method import VectorMethod, take
from fedloom.tree import Tree


class _Half(VectorMethod):
    """Rounds every number to 16 bits."""

    goes_down: ClassVar[bool] = True
    half: ClassVar[torch.dtype]

    error_feedback: bool = False
    """Add what rounding left out of a client's change to its next one."""

    def encode(self, values: Tensor, key: int) -> Tree:
        return {"numbers": values.to(self.half)}

    def decode(self, parts: Tree, count: int, kind: torch.dtype, key: int) -> Tensor:
        (numbers,) = take(parts, numbers=(self.half, count))
        return numbers.to(kind)


class Float16(_Half):
    """Rounds every number to 16 bits: 11 of precision, and a largest number of 65,504."""

    name: ClassVar[str] = "float16"
    half: ClassVar[torch.dtype] = torch.float16


class BFloat16(_Half):
    """Rounds every number to 16 bits: 8 of precision, and the range of single precision."""

    name: ClassVar[str] = "bfloat16"
    half: ClassVar[torch.dtype] = torch.bfloat16
