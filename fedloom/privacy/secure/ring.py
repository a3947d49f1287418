"""Fixed-point numbers: a client's groups and weights become one vector of whole numbers modulo 2^32 or 2^64.

A group with weight w and values Δ becomes w and w · round(scale · Δ). Sums wrap around and are exact, so they do not
depend on any order. The scale is the largest power of two with which the sum of all clients cannot overflow.

With noise that clients add together, a change has a length of at most 1 after rounding, too, and every floating-point
number gets noise. The ring then has room for the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import InputError, RoundAbandoned, nearest
from fedloom.privacy.dp.clipping import COUNT
from fedloom.privacy.dp.distributed import FEWEST_STEPS, NoiseShare, discrete_gaussian
from fedloom.privacy.dp.noise import derive
from fedloom.privacy.secure.masks import Vector
from fedloom.privacy.secure.session import Refusal
from fedloom.tree import Groups, Tree, change, is_whole

Bits = Literal["auto", 32, 64]
FINE = 20  # 32 bits suffice if the scale is at least 2^20
FINEST = 40  # a larger scale would only add noise of rounding
KEY = "[privacy] secure_aggregation"


@dataclass(frozen=True)
class RingConfig:
    """What clients and server must know alike: how large values, weights and cohorts can be."""

    range: float | dict[str, float]  # the largest absolute value of a change, for all groups or for each
    clients: int
    weight_bound: int
    bits: Bits = "auto"
    noise: NoiseShare | None = None  # what clients add to the sum together

    def range_of(self, group: str) -> float:
        if group == COUNT:
            return 0.5
        if self.noise is not None:
            return 1.0
        if not isinstance(self.range, dict):
            return self.range
        if group not in self.range:
            raise InputError(
                f"{KEY} has no range for the group '{group}'. Known: {', '.join(sorted(self.range))}."
                f"{nearest(group, self.range)}"
            )
        return self.range[group]

    def scale(self, group: str, bits: int, tail: Callable[[float], int] = lambda scale: 0) -> float:
        """Return the largest power of two for which clients · weight_bound · ⌈range · scale⌉ + tail < 2^(bits − 1).

        `tail` returns the room that noise needs at a scale.

        >>> RingConfig(1.0, clients=100, weight_bound=1).scale("model", 32) == 2**24
        True
        """
        most, scale = self.clients * self.weight_bound, 2.0**FINEST
        range, room = self.range_of(group), 2 ** (bits - 1)
        while most * math.ceil(range * scale) + tail(scale) >= room and scale > 2.0**-FINEST:
            scale /= 2
        return scale


@dataclass(frozen=True)
class Ring:
    """The vector of one kind of update. `like` is an update of one client, for its names, shapes and dtypes."""

    config: RingConfig
    like: Groups

    @cached_property
    def bits(self) -> int:
        if self.config.bits != "auto":
            return self.config.bits
        scales = [self._scale(group, 32) for group in self.like]
        return 32 if min(scales, default=1.0) >= 2.0**FINE else 64

    @cached_property
    def scales(self) -> dict[str, float]:
        scales = {group: self._scale(group, self.bits) for group in self.like}
        for group, scale in scales.items():
            if self.config.noise is not None:
                self._check_noise(self.config.noise, group, scale)
            elif scale < 1:
                raise InputError(
                    f"{KEY} bits = {self.bits} is too few for {self.config.clients} clients with weights up to "
                    f"{self.config.weight_bound} and the range {self.config.range_of(group):g} of '{group}': use "
                    "bits = 64, or a smaller range."
                )
        return scales

    def _scale(self, group: str, bits: int) -> float:
        return self.config.scale(group, bits, partial(self._tail, group))

    def _tail(self, group: str, scale: float) -> int:
        noise = self.config.noise
        return 0 if noise is None else noise.tail(group, scale, self.noised)

    def _check_noise(self, noise: NoiseShare, group: str, scale: float) -> None:
        """Raise `InputError` if steps are so coarse that ½ is not a whole number of them, or noise is not Gaussian."""
        if scale < 2 or noise.deviation(group, scale) < FEWEST_STEPS:
            raise InputError(
                f"{KEY} bits = {self.bits} is too few for the sum of {self.config.clients} clients with {self.noised} "
                f"numbers and noise of {noise.change_multiplier:.3g} times the clip: use bits = 64, fewer clients, or "
                "less noise."
            )

    @cached_property
    def noised(self) -> int:
        """How many numbers a change has that get noise: all floating-point ones."""
        changes = [tree for group, tree in self.like.items() if group != COUNT]
        return sum(leaf.numel() for tree in changes for leaf in tree.values() if not is_whole(leaf))

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def size(self) -> int:
        leaves = (leaf for tree in self.like.values() for leaf in tree.values())
        return len(self.like) + sum(leaf.numel() * (2 if leaf.is_complex() else 1) for leaf in leaves)

    def _limits(self, group: str, leaf: Tensor) -> tuple[float, float, int]:
        """Return the scale of a leaf, its largest value, and the largest whole number that stands for a value."""
        if is_whole(leaf):
            largest = (int(2 ** (self.bits - 1)) - 1) // (self.config.clients * self.config.weight_bound)
            return 1.0, float(largest), largest
        scale, range = self.scales[group], self.config.range_of(group)
        return scale, range, math.ceil(range * scale)

    @property
    def rounding(self) -> float:
        """How far rounding can move an update, as a Euclidean length."""
        scaled = ((sum(leaf.numel() for leaf in tree.values()), self.scales[g]) for g, tree in self.like.items())
        return 0.5 * math.sqrt(sum(count / scale**2 for count, scale in scaled))

    # --- at a client

    def encode(
        self, groups: Groups, weights: Mapping[str, float], bases: Groups, secret: bytes | None = None
    ) -> Vector:
        """Return one client's update as a vector. Groups with a base are positions, and what changed is sent.

        With noise, `secret` is 32 random bytes that the client uses once.
        """
        if {g: [*tree] for g, tree in groups.items()} != {g: [*tree] for g, tree in self.like.items()}:
            raise Refusal("the update has other groups or leaves than were agreed")
        parts, length = [], 0.0
        for group, tree in groups.items():
            weight = self._weight(group, float(weights[group]))
            parts.append(np.array([weight], dtype=np.int64))
            for name, leaf in _changes(tree, bases.get(group)).items():
                whole = self._whole(group, name, leaf) * weight
                if self.config.noise is not None and not is_whole(leaf):
                    assert secret is not None
                    deviation = self.config.noise.deviation(group, self.scales[group])
                    if group != COUNT:
                        length = math.hypot(length, float(np.linalg.norm(whole / self.scales[group])))
                    whole = whole + discrete_gaussian(derive(secret, group, name), deviation, len(whole))
                parts.append(whole)
        if self.config.noise is not None and length > 1:
            raise Refusal("the change is longer than its clip, so its noise would not hide it")
        return np.concatenate(parts or [np.zeros(0, np.int64)]).astype(self.dtype)

    def _weight(self, group: str, weight: float) -> int:
        bound = self.config.weight_bound
        if not (weight.is_integer() and 1 <= weight <= bound):
            raise Refusal(
                f"the weight of '{group}' must be a whole number from 1 to {bound}: a client without weight would make "
                "the sum that of fewer clients, and a larger one could overflow",
                f"it is {weight:g}",
            )
        return int(weight)

    def _whole(self, group: str, name: str, leaf: Tensor) -> NDArray[np.int64]:
        """Return a leaf's numbers times the scale, rounded, if they are finite and in range."""
        scale, range, _ = self._limits(group, leaf)
        values = _real(leaf).to(torch.float64).numpy().reshape(-1)
        worst = float(np.abs(values).max(initial=0.0))
        if not worst <= range:
            raise Refusal(
                f"a number of '{group}' ({name}) is out of the range {range:g}: nothing was sent. A smaller lr, a clip "
                f"or a larger range in {KEY} may help",
                f"it is {worst:g}",
            )
        return np.rint(values * scale).astype(np.int64)

    # --- at the server

    def sums(self, total: Vector, clients: int) -> tuple[Groups, dict[str, Tensor]]:
        """Return the weighted sums of all changes in double precision, and the sums of weights."""
        signed = total.astype(self.dtype, copy=False).view(f"<i{self.bits // 8}")
        sums: Groups = {}
        weights: dict[str, Tensor] = {}
        begin = 0
        for group, tree in self.like.items():
            weight, begin = int(signed[begin]), begin + 1
            if not clients <= weight <= clients * self.config.weight_bound:
                raise RoundAbandoned(f"The sum of the weights of '{group}' is {weight} for {clients} clients: {WRONG}")
            weights[group] = torch.tensor(float(weight), dtype=torch.float64)
            sums[group] = {}
            for name, leaf in tree.items():
                count = leaf.numel() * (2 if leaf.is_complex() else 1)
                values, begin = signed[begin : begin + count].astype(np.float64), begin + count
                scale, _, largest = self._limits(group, leaf)
                tail = 0 if is_whole(leaf) else self._tail(group, scale)
                if np.abs(values).max(initial=0) > largest * weight + tail:
                    raise RoundAbandoned(f"The sum of '{group}' ({name}) is larger than its clients' range: {WRONG}")
                found = torch.from_numpy(values / scale)
                sums[group][name] = (
                    torch.view_as_complex(found.reshape(*leaf.shape, 2))
                    if leaf.is_complex()
                    else found.reshape(leaf.shape)
                )
        return sums, weights


WRONG = "a client or a share is wrong."
Dtypes = dict[str, torch.dtype]


def _changes(tree: Tree, base: Tree | None) -> Tree:
    """Return what a client sends: its changes, or how far its positions are from their base."""
    if base is None:
        return tree
    whole = {name: leaf.to(torch.int64) if is_whole(leaf) else leaf for name, leaf in tree.items()}
    start = {name: base[name].to(leaf.dtype) for name, leaf in whole.items()}
    return change(whole, start)


def _real(leaf: Tensor) -> Tensor:
    return torch.view_as_real(leaf.contiguous()) if leaf.is_complex() else leaf


def means(sums: Groups, weights: Mapping[str, Tensor], bases: Groups, dtypes: Mapping[str, Dtypes]) -> Groups:
    """Return base + Σ w Δ / Σ w for every leaf, in its dtype."""
    found: Groups = {}
    for group, tree in sums.items():
        base = bases.get(group)
        found[group] = {}
        for name, total in tree.items():
            dtype = dtypes[group][name]
            mean = total / weights[group]
            if not (dtype.is_floating_point or dtype.is_complex):
                mean = mean.round()
            found[group][name] = (mean if base is None else base[name].to(mean.dtype) + mean).to(dtype)
    return found


def dtypes_of(groups: Groups) -> dict[str, Dtypes]:
    """Return the dtype of every leaf."""
    return {group: {name: leaf.dtype for name, leaf in tree.items()} for group, tree in groups.items()}
