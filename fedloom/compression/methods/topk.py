"""Top-k: only the largest numbers of a change (Stich et al., Sparsified SGD with Memory, NeurIPS 2018)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.compression.method import Damaged, Fraction, VectorMethod, kept, take
from fedloom.tree import Tree

SAMPLE = 1 << 16  # numbers from which a threshold is guessed


class TopK(VectorMethod):
    """Sends the numbers of a change with the largest absolute values, and where they are.

    With error feedback, which you should keep, a client adds the numbers that it did not send to its next change.
    """

    name: ClassVar[str] = "topk"

    keep: Fraction = 0.01
    """The share of numbers that is sent."""
    error_feedback: bool = True
    """Add what was not sent to the client's next change."""

    @property
    def scatters(self) -> bool:
        return True

    @property
    def _gap(self) -> torch.dtype:
        """The dtype of a distance between two numbers that are sent."""
        return torch.uint8 if self.keep >= 1 / 512 else torch.int16

    def encode(self, values: Tensor, key: int) -> Tree:
        chosen = largest(values.numpy(), kept(self.keep, len(values)))
        kind = np.dtype(str(self._gap).removeprefix("torch."))
        return {"values": values[torch.from_numpy(chosen)], "gaps": torch.from_numpy(gaps(chosen, kind))}

    def decode(self, parts: Tree, count: int, kind: torch.dtype, key: int) -> Tensor:
        sent = kept(self.keep, count)
        values, stream = take(parts, values=(kind, sent), gaps=(self._gap, None))
        chosen = places(stream.numpy(), sent, count)
        found = torch.zeros(count, dtype=kind)
        found[torch.from_numpy(chosen)] = values
        return found


def largest(values: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return the places of the numbers with the largest absolute values, in order. Of equal ones, the first count.

    A sample gives a threshold that a few more numbers reach than needed, so that only those are compared exactly.

    >>> largest(np.array([1.0, -3.0, 2.0, 3.0, -2.0]), 3)
    array([1, 2, 3])
    """
    sizes = np.abs(values)
    places = None
    sample = sizes[:: max(len(sizes) // SAMPLE, 1)]
    expected = len(sample) * count / max(len(sizes), 1)
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if len(sample) < len(sizes) and rank < len(sample):
        places = np.flatnonzero(sizes >= np.partition(sample, len(sample) - rank)[len(sample) - rank])
    if places is None or len(places) < count:
        places = np.arange(len(sizes))
    found = sizes[places]
    if len(found) <= count:
        return places
    threshold = np.partition(found, len(found) - count)[len(found) - count]
    chosen = found > threshold
    equal = np.flatnonzero(found == threshold)
    chosen[equal[: count - int(chosen.sum())]] = True
    return np.asarray(places[chosen])


def gaps(places: NDArray[np.int64], kind: np.dtype[Any]) -> NDArray[Any]:
    """Return increasing places as the numbers of places between them. The largest number of `kind` means: and more.

    >>> gaps(np.array([0, 3, 300]), np.dtype(np.uint8))
    array([  0,   2, 255,  41], dtype=uint8)
    """
    most = np.iinfo(kind).max
    jumps, rest = np.divmod(np.diff(places, prepend=-1) - 1, most)
    stream = np.full(len(places) + int(jumps.sum()), most, dtype=kind)
    stream[np.cumsum(jumps + 1) - 1] = rest
    return stream


def places(stream: NDArray[Any], count: int, length: int) -> NDArray[np.int64]:
    """Return the places that `gaps` was given; raise `Damaged` unless there are `count` of them below `length`."""
    most = np.iinfo(stream.dtype).max
    ends = stream != most
    if len(stream) > count + length // most or int(ends.sum()) != count or (stream < 0).any():
        raise Damaged(f"the places of a compressed change are not those of {count} numbers among {length}")
    found: NDArray[np.int64] = np.cumsum(stream, dtype=np.int64)[ends] + np.arange(count)
    if count and found[-1] >= length:
        raise Damaged(f"a compressed change has a number at place {found[-1]} of {length}")
    return found
