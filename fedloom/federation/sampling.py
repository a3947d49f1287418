"""Draws the clients of a round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray
from pydantic import Strict, model_validator

from fedloom import keys
from fedloom.errors import InputError
from fedloom.record import Count, Duration, NonNegative, Positive, Record, Share

REMOTE_FACTOR = 10.0  # the outlier_factor of a network that sets none
ANYBODY = 1e-9  # the quorum of a round that needs one client
_ASYNC = ("buffer", "concurrency", "staleness", "staleness_exponent")  # keys that only asynchronous rounds use
Allowed = Callable[[NDArray[np.int64]], NDArray[np.bool_]]  # which of these clients can take part


class Sampling(Record):
    """Which clients take part in a round.

    Give the number of clients as `fraction`, C in the papers (0 means one client), or directly as `count`. Sampling is
    `fixed` (exactly this many, at random), `poisson` (each client independently with probability `fraction`) or
    `window` (moves by one client at a time).
    """

    fraction: Share = 1.0
    """The fraction of clients in a round, C in the papers. 0 means one client."""
    count: Count | None = None
    """The number of clients in a round, instead of `fraction`."""
    sampling: Literal["fixed", "poisson", "window"] = "fixed"
    """How clients are drawn: `fixed` draws exactly this many, `poisson` draws each client with probability `fraction`,
    and `window` moves on by one client at a time.
    """
    redraw_every: Count = 1
    """Draw a new cohort every this many rounds."""
    everyone_every: Count | None = None
    """All clients take part in every round that is a multiple of this."""
    quorum: NonNegative = 0.0
    """The fewest clients for a round to count: a fraction of the cohort, or a number above 1."""
    max_abandoned: Annotated[int, Strict(), Ge(0)] | None = None
    """End the run with an error when more rounds than this did not count."""
    start_when: Count | tuple[str, ...] = 2
    """How many agents to wait for before the first round, or their names. Only on a network."""
    deadline: Duration = "10m"
    """How long a round may take. Clients that have not answered by then are left out. On a network, and in the virtual
    time of `[system]`.
    """
    over_select: NonNegative = 0.0
    """Invite this fraction of extra clients; the first to answer count. On a network, and in the virtual time of
    `[system]`.
    """
    outlier_factor: Positive | Literal["off"] | None = None
    """Leave out an update whose change is longer than this times the median of the round, if there are five updates or
    more and the server sums them. By default this is 10 on a network, against a broken site, and off in a simulation,
    where algorithms are those of their papers. Changes shorter than 5 % of the model count as that long, and a client
    with more examples than the median may change it further by as much. Among two to four updates, only one that is
    longer than a million, and than a million times the median, is left out. `off` accepts any length.
    """
    norm_bound: Positive | None = None
    """Refuse an update whose change has a larger norm than this. Only on a network."""
    weight_cap: Positive = 1e9
    """Refuse an update that claims a larger weight than this. Each algorithm sets a smaller bound: usually the number
    of training examples that the client's agent announced. Only on a network.
    """
    max_examples: Count | None = None
    """Weigh a client with more training examples as if it had this many. It still trains with all of them."""
    max_clients: Count = 100
    """Refuse an agent that hosts more clients than this. Only on a network."""

    mode: Literal["sync", "async"] = "sync"
    """`sync` rounds wait for their clients. In `async` rounds, `concurrency` clients are at work all the time, and a
    round is over the next `buffer` answers. In a simulation, this needs `[system]`.
    """
    buffer: Count = 10
    """The answers of an asynchronous round, K."""
    concurrency: Count | None = None
    """The clients that are at work at any time, M. By default, as many as a cohort has."""
    staleness: Literal["polynomial", "constant"] = "polynomial"
    """How much the change of a client counts that started τ rounds ago: `polynomial` is (1 + τ)^−`staleness_exponent`,
    and `constant` is 1.
    """
    staleness_exponent: NonNegative = 0.5
    """The exponent of a polynomial staleness."""

    @model_validator(mode="after")
    def _fits_mode(self) -> Sampling:
        fields = type(self).model_fields
        if self.mode == "sync":
            given = next((key for key in _ASYNC if getattr(self, key) != fields[key].default), None)
            if given is not None:
                raise InputError(f'[cohort] {given} is for mode = "async". Got mode = "sync".')
            return self
        for key in ("sampling", "redraw_every", "everyone_every", "over_select", "quorum"):
            if getattr(self, key) != fields[key].default:
                raise InputError(
                    f'[cohort] {key} is for rounds that wait for their clients. Leave it out of mode = "async".'
                )
        return self

    @model_validator(mode="after")
    def _fits(self) -> Sampling:
        if self.count is not None and "fraction" in self.model_fields_set and self.fraction != 1.0:
            raise InputError(
                f"A cohort takes either a count or a fraction. Got count = {self.count} and fraction = {self.fraction}."
            )
        if self.sampling == "poisson" and self.count is not None:
            raise InputError(
                "Poisson sampling draws each client independently: give cohort.fraction, not cohort.count."
            )
        if self.sampling == "poisson" and self.fraction == 0:
            raise InputError("Poisson sampling with cohort.fraction = 0 never draws a client. Use a larger fraction.")
        return self

    def size(self, population: int) -> int:
        """Return how many clients a round has (the expected number for Poisson sampling)."""
        return self.count or max(int(self.fraction * population + 0.5), 1)

    def steady_size(self, population: int) -> int | None:
        """Return how many clients every round has; None if chance decides."""
        return None if self.sampling == "poisson" else self.size(population)

    def answers(self, population: int) -> int:
        """Return how many answers a round is over, if all clients answer."""
        return self.buffer if self.mode == "async" else self.size(population)

    def slots(self, population: int) -> int:
        """Return how many clients are at work at any time in asynchronous rounds."""
        return self.concurrency or self.size(population)

    def freshness(self, staleness: int) -> float:
        """Return how much a change counts that started from a version this many rounds old.

        >>> Sampling(mode="async").freshness(0), Sampling(mode="async").freshness(3)
        (1.0, 0.5)
        """
        return 1.0 if self.staleness == "constant" else float((1 + staleness) ** -self.staleness_exponent)

    def longest(self, remote: bool) -> float | None:
        """Return how many medians long a change may be, or None if any length counts; clients may be `remote`.

        >>> Sampling().longest(remote=False), Sampling().longest(remote=True), Sampling(outlier_factor=3).longest(False)
        (None, 10.0, 3.0)
        """
        if self.outlier_factor is None:
            return REMOTE_FACTOR if remote else None
        return None if self.outlier_factor == "off" else self.outlier_factor

    def needed(self, population: int) -> int:
        """Return the fewest clients for a round to count."""
        size = self.size(population)
        return int(np.ceil(self.quorum * size if self.quorum <= 1 else self.quorum))

    def identity(self, in_virtual_time: bool = False) -> dict[str, Any]:
        """Return the values that decide the result: network keys only if they were changed.

        Waiting times decide nothing, except in virtual time.
        """
        nothing = {"start_when", "max_abandoned", "max_clients"}
        if not in_virtual_time:
            nothing.add("deadline")
        if self.mode == "sync":
            nothing |= {"mode", *_ASYNC}
        values = self.model_dump(mode="json", exclude_none=True, exclude=nothing)
        plain = {name: type(self).model_fields[name].default for name in ("over_select", "weight_cap")}
        return {name: value for name, value in values.items() if name not in plain or value != plain[name]}

    def check(self, population: int) -> None:
        """Raise an error if the population is too small for these values."""
        if self.count is not None and self.count > population:
            raise InputError(
                f"cohort.count = {self.count}, but there are only {population} clients. Allowed: 1 to {population}."
            )
        if self.mode == "async":
            slots = self.slots(population)
            if slots > population:
                raise InputError(
                    f"cohort.concurrency = {slots}, but there are only {population} clients. Allowed: 1 to "
                    f"{population}."
                )
            if self.buffer > slots:
                raise InputError(
                    f"cohort.buffer = {self.buffer}, but only {slots} clients are at work at any time "
                    f"(cohort.concurrency). Allowed: 1 to {slots}."
                )
        if self.needed(population) > self.size(population):
            raise InputError(
                f"cohort.quorum = {self.quorum:g} can never be met: a round has {self.size(population)} of "
                f"{population} clients."
            )

    def is_for_everyone(self, round: int) -> bool:
        """Return whether all clients take part in this round, whatever the other values say."""
        return self.everyone_every is not None and round % self.everyone_every == 0

    def enough(self, population: int, round: int) -> int | None:
        """Return how many answers suffice, if the round asks more clients than that."""
        return self.size(population) if self.over_select and not self.is_for_everyone(round) else None

    def draw(self, population: int, round: int, seed: int, allowed: Allowed | None = None) -> tuple[int, ...]:
        """Draw the clients of a round, in ascending order. `allowed` says which of some clients can take part.

        >>> Sampling(count=3).draw(1_000_000, round=1, seed=7) == Sampling(count=3).draw(1_000_000, round=1, seed=7)
        True
        """
        period = (round - 1) // self.redraw_every
        size = self.size(population)
        key = keys.key(seed, "cohort", period)
        if self.is_for_everyone(round) or (self.sampling == "fixed" and size == population):
            ids = np.arange(population)
        elif self.sampling == "window":
            ids = np.sort((period + np.arange(size)) % population)
        elif self.sampling == "poisson":
            ids = np.flatnonzero(keys.hashes(key, population) < self.fraction * 2**32)
        else:
            return choose(key, size, population, allowed)
        return tuple((ids if allowed is None else ids[allowed(ids)]).tolist())


def choose(key: int, size: int, population: int, allowed: Allowed | None = None) -> tuple[int, ...]:
    """Return the first `size` clients in a random order, or the first that are `allowed`: fewer if there are fewer.

    >>> choose(1, 2, 5), choose(1, 2, 5, lambda ids: ids != 3)
    ((0, 3), (0, 1))
    """
    # a few of many: draw with repetition until enough are different, so the cost does not grow with the population
    draws = size
    while size * 2 <= population and (allowed is None or draws < population):
        draws *= 2
        drawn = keys.hashes(key, draws) * population >> 32
        chosen = list(dict.fromkeys((drawn if allowed is None else drawn[allowed(drawn)]).tolist()))
        if len(chosen) >= size:
            return tuple(sorted(chosen[:size]))
    order = keys.permutation(key, population)
    return tuple(sorted((order if allowed is None else order[allowed(order)])[:size].tolist()))


class WideSampling(Sampling):
    """A sampling that draws extra clients."""

    def size(self, population: int) -> int:
        return min(population, math.ceil(super().size(population) * (1 + self.over_select)))


def widened(sampling: Sampling) -> Sampling:
    """Return the sampling that invites extra clients, if `over_select` asks for them."""
    if not sampling.over_select:
        return sampling
    quorum = min(sampling.quorum, ANYBODY)  # the code that counts the answers checks the rest
    if sampling.sampling == "poisson":
        fraction = min(1.0, sampling.fraction * (1 + sampling.over_select))
        return sampling.model_copy(update={"fraction": fraction, "quorum": quorum})
    return WideSampling(**{**sampling.model_dump(exclude_unset=True), "quorum": quorum})
