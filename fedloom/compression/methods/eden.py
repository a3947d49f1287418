"""EDEN: one bit a number (Vargaftik et al., DRIVE, NeurIPS 2021, and EDEN, ICML 2022)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fedloom import keys
from fedloom.compression.method import VectorMethod, take
from fedloom.compression.random_bits import signs
from fedloom.tree import Tree

BLOCK = 4096  # numbers that are rotated together: a power of two
TOGETHER = 64  # blocks at a time, which fit into the processor's cache


class Eden(VectorMethod):
    """Rotates a change at random, and sends the sign of every number with one scale for 4,096 of them.

    After a random rotation R, the numbers of x are nearly normally distributed. The scale ‖x‖² / ‖R x‖₁ makes the
    result right on average; its squared error is then π/2 − 1 of ‖x‖².
    """

    name: ClassVar[str] = "eden"

    error_feedback: bool = False
    """Add what a client's change lost to its next one."""

    def encode(self, values: Tensor, key: int) -> Tree:
        blocks = pad(values, (0, -len(values) % BLOCK)).reshape(-1, BLOCK)
        rotated = _rotate(blocks, key)
        lengths = rotated.abs().sum(1)
        scales = blocks.square().sum(1) / torch.where(lengths > 0, lengths, 1.0)
        positive = np.packbits((rotated >= 0).numpy().reshape(-1))
        return {"scales": scales, "signs": torch.from_numpy(positive)}

    def decode(self, parts: Tree, count: int, kind: torch.dtype, key: int) -> Tensor:
        blocks = -(-count // BLOCK)
        scales, packed = take(parts, scales=(kind, blocks), signs=(torch.uint8, blocks * BLOCK // 8))
        positive = torch.from_numpy(np.unpackbits(packed.numpy())).to(kind).reshape(blocks, BLOCK)
        return (_rotate_back(positive * 2 - 1, key) * scales[:, None]).reshape(-1)[:count]


def _rotate(blocks: Tensor, key: int) -> Tensor:
    """Rotate every block: random signs and a Hadamard transform, twice, so that sparse changes spread out, too."""
    for turn in range(2):
        blocks = _hadamard(blocks * _signs(blocks, key, turn))
    return blocks


def _rotate_back(blocks: Tensor, key: int) -> Tensor:
    for turn in (1, 0):
        blocks = _hadamard(blocks) * _signs(blocks, key, turn)
    return blocks


def _signs(like: Tensor, key: int, turn: int) -> Tensor:
    return torch.from_numpy(signs(keys.key(key, "turn", turn), like.numel())).to(like.dtype).reshape(like.shape)


def _hadamard(blocks: Tensor) -> Tensor:
    """Return the orthonormal Hadamard transform of every row, by sums and differences: no library decides the bits."""
    pieces = [_transform(blocks[begin : begin + TOGETHER]) for begin in range(0, len(blocks), TOGETHER)]
    return torch.cat(pieces) if pieces else blocks


def _transform(blocks: Tensor) -> Tensor:
    columns = blocks.T.contiguous()  # so that neighbours in memory go through the same steps
    half = 1
    while half < BLOCK:
        pairs = columns.view(-1, 2, half, len(blocks))
        difference = pairs[:, 0] - pairs[:, 1]
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] = difference
        half *= 2
    scaled: Tensor = columns.T * BLOCK**-0.5
    return scaled
