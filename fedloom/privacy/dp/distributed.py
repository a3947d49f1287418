"""Noise that clients add together, in whole numbers, so that they need not trust the server.

Each client divides its clipped change by the clip, rounds it to the numbers of the ring and adds discrete Gaussian
noise before it masks it. Rounding is deterministic, and the clip leaves room for it, so that a rounded change has a
length of at most 1. The noise of the fewest honest clients of a sum is enough: its deviation is z. More clients add
more noise, which costs accuracy and no privacy.

A sum of independent discrete Gaussians costs what one Gaussian costs in Rényi accounting, up to a term of about
10 · clients · exp(−π² deviation²) for each number (Kairouz et al. 2021, "The distributed discrete Gaussian mechanism").
With a deviation of at least 8 steps of the ring it is below 1e-260, and is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError
from fedloom.privacy.dp import accounting, clipping
from fedloom.privacy.dp.accounting import Mechanism
from fedloom.privacy.dp.noise import derive
from fedloom.privacy.secure.masks import add_stream

if TYPE_CHECKING:
    from fedloom.federation.sampling import Sampling
    from fedloom.privacy.table import DpTable, PrivacyTable

FEWEST_STEPS = 8.0  # the smallest deviation of a client's noise in whole numbers
OVERFLOW = 2.0**-40  # the probability that the noise of a sum leaves the ring, in any of its numbers
MARGIN = 1 + 1e-6  # more than floating-point numbers add to the length of a clipped change
BATCH = 1 << 17  # candidates to draw at a time


@dataclass(frozen=True)
class NoiseShare:
    """What each client of a round must know about its noise. It is part of what all of them agree on."""

    noise_multiplier: float  # z, of all that a round releases
    clients: int  # in the round
    honest: int  # the fewest of them in a sum that add their noise and keep it secret
    adaptive: bool  # whether they also count short changes

    @staticmethod
    def of(table: PrivacyTable, noise_multiplier: float, clients: int) -> NoiseShare:
        """Return the share of a round of this many clients, or raise `InputError` if too few of them are honest."""
        dp, secure = table.dp, table.secure_aggregation
        assert dp is not None
        assert secure is not None
        needed, colluders = secure.needed(clients), dp.most_colluders(clients)
        if needed <= colluders:
            raise InputError(
                f'[privacy] dp noise = "distributed": {needed} of {clients} clients must stay, and {colluders} may '
                "work with the server, so nobody may be left to add noise. Use a smaller dp colluders, more clients, "
                "or a larger threshold in secure_aggregation."
            )
        return NoiseShare(noise_multiplier, clients, needed - colluders, dp.clip == "adaptive")

    @property
    def change_multiplier(self) -> float:
        """The deviation of the noise on changes of length 1."""
        z = self.noise_multiplier
        return clipping.change_multiplier(z, self.clients) if self.adaptive else z

    @property
    def mechanism(self) -> Mechanism:
        """What a sum releases."""
        return Mechanism(self.noise_multiplier, discrete=True)

    def deviation(self, group: str, scale: float) -> float:
        """Return the deviation of one client's noise, where `scale` stands for 1."""
        wanted = clipping.indicator_deviation(self.clients) if group == clipping.COUNT else self.change_multiplier
        return wanted * scale / math.sqrt(self.honest)

    def tail(self, group: str, scale: float, numbers: int) -> int:
        """Return what the noise of all clients together exceeds with a probability of at most 2^-40 in a round.

        `numbers` is the size of a change. A discrete Gaussian is sub-Gaussian with its own parameter (Canonne et al.
        2020), so the noise of n of them exceeds t with a probability of at most 2 exp(−t² / (2 n deviation²)).
        """
        widths = math.sqrt(2 * math.log(2 * (numbers + 1) / OVERFLOW))
        return math.ceil(self.deviation(group, scale) * math.sqrt(self.clients) * widths)

    @property
    def excess(self) -> float:
        """How much larger the noise is than it must be, if no client is lost."""
        return math.sqrt(self.clients / self.honest)


def unit(clip: float) -> float:
    """Return what changes are divided by: a bit more than the clip, so that no rounding makes one longer than 1."""
    return clip * MARGIN


def multiplier(table: DpTable, rounds: int) -> float:
    """Return the noise multiplier of all planned rounds. Server and clients compute it alike, so it is rounded up."""
    if table.noise_multiplier is not None:
        return table.noise_multiplier
    assert table.epsilon is not None, "the table has one of the two"
    return math.ceil(accounting.noise_multiplier(table.epsilon, table.delta, rounds, discrete=True) * 1e4) / 1e4


def check_sampling(sampling: Sampling) -> None:
    """Raise `InputError` if rounds can have any number of clients, so that no share is right."""
    if sampling.sampling == "poisson":
        raise InputError(
            '[privacy] dp noise = "distributed" cannot be used with [cohort] sampling = "poisson": clients see who '
            "takes part, so drawing them at random hides nobody. Give count or fraction alone."
        )


def discrete_gaussian(key: bytes, deviation: float, count: int) -> NDArray[np.int64]:
    """Return `count` whole numbers with probabilities proportional to exp(−x² / (2 deviation²)).

    Rejection from discrete Laplace numbers (Canonne, Kamath and Steinke 2020), a batch at a time. The key's stream is
    that of a cipher. The numbers are exact integers. Their probabilities are compared in double precision, so they are
    right up to about 2^-50.

    >>> discrete_gaussian(bytes(32), 3.0, 8)
    array([-2,  3, -4, -1,  4,  4,  1,  6])
    """
    found, missing, batch = [], count, 0
    while missing > 0:
        drawn = _candidates(derive(key, batch), deviation, min(BATCH, 2 * missing + 64))[:missing]
        found.append(drawn)
        missing -= len(drawn)
        batch += 1
    return np.concatenate(found or [np.zeros(0, np.int64)])


def _candidates(key: bytes, deviation: float, tries: int) -> NDArray[np.int64]:
    """Return those of some candidates that are accepted: about half."""
    words = np.zeros(4 * tries, "<u8")
    add_stream(key, (words, 1))
    step, low, high, last = words.reshape(4, tries)
    scale = math.floor(deviation) + 1
    accepted = step <= np.uint64(2**64 - 1 - 2**64 % scale)  # otherwise some remainders would be more likely
    below = (step % np.uint64(scale)).astype(np.int64)  # a part below the scale, and whole multiples of it
    multiples = np.floor(-np.log1p(-_uniform(high)))
    size, length = below + scale * multiples.astype(np.int64), below + scale * multiples  # the same, but for overflows
    negative = (low & np.uint64(1)).astype(bool)  # `_uniform` does not use this bit
    accepted &= _uniform(low) < np.exp(-(below / scale))
    accepted &= ~(negative & (size == 0))  # zero must not count twice
    accepted &= _uniform(last) < np.exp(-((length - deviation**2 / scale) ** 2) / (2 * deviation**2))
    signed: NDArray[np.int64] = np.where(negative, -size, size)[accepted]
    return signed


def _uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found
