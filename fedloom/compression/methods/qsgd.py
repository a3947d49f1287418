"""QSGD: random rounding to a few values (Alistarh et al., QSGD, NeurIPS 2017)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Le
from numpy.typing import NDArray
from pydantic import Strict
from torch import Tensor
from torch.nn.functional import pad

from fedloom.compression.method import VectorMethod, take
from fedloom.compression.random_bits import words
from fedloom.record import Count
from fedloom.tree import Tree

AT_A_TIME = 1 << 20  # numbers whose bits are packed together


class QSGD(VectorMethod):
    """Rounds every number to one of 2^bits values, up or down at random, so that it is right on average.

    The values are evenly spaced between −s and s, where s is the largest number in a bucket of consecutive ones.
    """

    name: ClassVar[str] = "qsgd"

    bits: Annotated[int, Strict(), Ge(1), Le(8)] = 4
    """The bits of a number."""
    bucket: Count = 512
    """How many numbers share a scale."""

    def encode(self, values: Tensor, key: int) -> Tree:
        table = pad(values, (0, -len(values) % self.bucket)).reshape(-1, self.bucket)
        scales = table.abs().amax(1)
        relative = table / torch.where(scales > 0, scales, 1.0)[:, None]
        drawn = torch.from_numpy(words(key, len(values)).astype(np.float32)) * 2.0**-32
        steps = 2**self.bits - 1
        levels = (relative.reshape(-1)[: len(values)].float() + 1) * (steps / 2) + drawn
        rounded = levels.floor().clamp(0, steps).to(torch.uint8).numpy()
        return {"scales": scales, "levels": torch.from_numpy(packed(rounded, self.bits))}

    def decode(self, parts: Tree, count: int, kind: torch.dtype, key: int) -> Tensor:
        buckets, steps = -(-count // self.bucket), 2**self.bits - 1
        scales, levels = take(parts, scales=(kind, buckets), levels=(torch.uint8, -(-count * self.bits // 8)))
        relative: Tensor = torch.from_numpy(unpacked(levels.numpy(), self.bits, count)).to(kind) * (2 / steps) - 1
        return relative * scales.repeat_interleave(self.bucket)[:count]


def packed(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return numbers below 2^bits, one after another without gaps.

    >>> packed(np.array([1, 0, 3, 2], np.uint8), 2)
    array([78], dtype=uint8)
    """
    pieces = [
        np.packbits(np.unpackbits(values[begin : begin + AT_A_TIME, None], axis=1)[:, 8 - bits :])
        for begin in range(0, len(values), AT_A_TIME)
    ]
    return np.concatenate(pieces or [values])


def unpacked(data: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """Return the numbers that `packed` was given."""
    pieces = []
    for begin in range(0, count, AT_A_TIME):
        some = min(AT_A_TIME, count - begin)
        found = np.unpackbits(data[begin * bits // 8 :][: -(-some * bits // 8)], count=some * bits).reshape(-1, bits)
        pieces.append(np.packbits(np.pad(found, ((0, 0), (8 - bits, 0))), axis=1)[:, 0])
    return np.concatenate(pieces or [data[:0]])
