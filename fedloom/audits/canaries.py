"""Canaries: made-up clients whose updates point in random directions, and the evidence that they took part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedloom import keys
from fedloom.audits.epsilon import Coins, Floats

COORDINATES = 500  # of a direction; all others are zero, which saves memory and hides no better
NORMAL = 1.4826  # the standard deviation of normal numbers is this many times their median distance from the median


@dataclass(frozen=True)
class Canaries:
    """The coins that decide which canaries take part, and the key of their directions."""

    included: Coins
    key: int

    @staticmethod
    def draw(count: int, key: int) -> Canaries:
        """Toss the coins."""
        return Canaries(keys.generator(keys.key(key, "coins")).random(count) < 0.5, key)

    def directions(self, numbers: NDArray[np.int64], size: int) -> Floats:
        """Return the directions of some canaries as rows of length 1, for updates with `size` numbers."""
        places, signs = _directions(len(self.included), size, self.key)
        rows = np.zeros((len(numbers), size))
        np.put_along_axis(rows, places[numbers], signs[numbers], axis=1)
        return rows

    def project(self, released: Floats) -> Floats:
        """Return how far what the server released goes into the direction of each canary."""
        places, signs = _directions(len(self.included), len(released), self.key)
        along: Floats = (released[places] * signs).sum(axis=1)
        return along


@lru_cache(maxsize=2)
def _directions(count: int, size: int, key: int) -> tuple[NDArray[np.int64], Floats]:
    """Draw the places where each direction is not zero, and its numbers there."""
    draw, width = keys.generator(keys.key(key, "directions")), min(size, COORDINATES)
    places = np.stack([draw.choice(size, width, replace=False, shuffle=False) for _ in range(count)])
    return places, draw.choice([-1.0, 1.0], places.shape) / np.sqrt(width)


def evidence(projections: Floats, rate: float, clips: Floats) -> Floats:
    """Return the logarithm of the likelihood ratio of each canary: it took part, against it did not.

    `projections` has a row for each release. An included canary adds its clip to a release with probability `rate`. The
    rest is noise, whose size is measured, so a mechanism with a bug is judged by the noise it has.
    """
    centre = np.median(projections, axis=1, keepdims=True)
    noise = NORMAL * np.median(np.abs(projections - centre), axis=1, keepdims=True).clip(min=1e-12)
    clip = clips[:, None]
    with_it = clip * (projections - clip / 2) / noise**2
    total: Floats = np.logaddexp(np.log1p(-rate) if rate < 1 else -np.inf, np.log(rate) + with_it).sum(axis=0)
    return total
