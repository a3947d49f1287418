"""Lossless compression: differences of bits, their bytes sorted by place, and zstd."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedloom.compression.method import Damaged, Draws, Form, Method, real, take
from fedloom.discovery import optional
from fedloom.tree import Tree

LEVEL = 3
WINDOW = 8 << 20  # bytes of memory that a received stream may request


class Lossless(Method):
    """What arrives has the bits of what was sent.

    The bits of a number and of its base are subtracted as whole numbers. Numbers that hardly changed then have zeros in
    their upper bytes, which are brought together, and zstd compresses the rest.
    """

    name: ClassVar[str] = "lossless"
    exact: ClassVar[bool] = True
    goes_down: ClassVar[bool] = True

    def difference(self, leaves: Tree, base: Tree) -> Tree:
        start = {name: bits(leaf.to(leaves[name].dtype)) for name, leaf in base.items()}
        return {name: bits(leaf) - start.get(name, 0) for name, leaf in leaves.items()}

    def apply(self, difference: Tree, form: Form, base: Tree) -> Tree:
        start = {name: bits(leaf.to(form[name][1])) for name, leaf in base.items()}
        return {name: from_bits(leaf + start.get(name, 0), form[name][1]) for name, leaf in difference.items()}

    def pack(self, change: Tree, draws: Draws, memory: Tree) -> tuple[Tree, Tree]:
        planes = b"".join(_planes(leaf) for leaf in change.values())
        packed = _zstd().ZstdCompressor(level=LEVEL).compress(planes)
        return {"bytes": torch.frombuffer(bytearray(packed), dtype=torch.uint8)}, {}

    def unpack(self, parts: Tree, form: Form, draws: Draws) -> Tree:
        (packed,) = take(parts, bytes=(torch.uint8, None))
        sizes = {name: math.prod(shape) * kind.itemsize for name, (shape, kind) in form.items()}
        total, zstd = sum(sizes.values()), _zstd()
        try:
            stream = zstd.ZstdDecompressor(max_window_size=WINDOW).stream_reader(packed.numpy().tobytes())
            planes = stream.read(total + 1)  # never more, whatever the stream says about its size
        except zstd.ZstdError:
            raise Damaged("a compressed change is not valid zstd data") from None
        if len(planes) != total:
            raise Damaged(f"a compressed change must have {total} bytes, and has more or fewer")
        found, begin = {}, 0
        for name, (shape, kind) in form.items():
            sides, width = (*shape, 2) if kind.is_complex else shape, kind.itemsize // (2 if kind.is_complex else 1)
            found[name] = _whole(planes[begin : begin + sizes[name]], width).reshape(sides)
            begin += sizes[name]
        return found


def _zstd() -> Any:
    return optional("zstandard", "Lossless compression needs zstandard", "network")


def bits(leaf: Tensor) -> Tensor:
    """Return a leaf's bits as signed whole numbers; a complex number has two.

    >>> bits(torch.tensor([1.0, 1.0000001])).diff()
    tensor([1], dtype=torch.int32)
    """
    values = real(leaf).contiguous()
    return values.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def from_bits(whole: Tensor, kind: torch.dtype) -> Tensor:
    """Return the leaf with these bits and this dtype."""
    if kind.is_complex:
        return torch.view_as_complex(whole.view(torch.float32 if kind == torch.complex64 else torch.float64))
    return whole.view(kind)


def _planes(leaf: Tensor) -> bytes:
    """Return the bytes of whole numbers: first all lowest bytes, then all second ones. Signs go to the lowest bit."""
    values = leaf.reshape(-1).numpy()
    folded = (values << 1) ^ (values >> (8 * values.itemsize - 1))
    return bytes(folded.view(np.uint8).reshape(-1, values.itemsize).T.tobytes())


def _whole(planes: bytes, size: int) -> Tensor:
    """Return the whole numbers of `size` bytes that `_planes` was given."""
    folded = np.frombuffer(planes, np.uint8).reshape(size, -1).T.copy().view(f"<u{size}").reshape(-1)
    return torch.from_numpy(((folded >> 1) ^ (0 - (folded & 1))).astype(f"<u{size}").view(f"<i{size}"))
