"""Draws the clients of a round."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from pydantic import Strict, model_validator

from fedloom import keys
from fedloom.errors import InputError
from fedloom.record import Count, Duration, NonNegative, Positive, Record, Share


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
    """How long a round may take. Clients that have not answered by then are left out. Only on a network."""
    over_select: NonNegative = 0.0
    """Invite this fraction of extra clients; the first to answer count. Only on a network."""
    outlier_factor: Positive | Literal["off"] = 10.0
    """Leave out an update whose change is longer than this times the median of the round, if there are five updates or
    more and the server sums them. Changes shorter than 5 % of the model count as that long, and a client with more
    examples than the median may change it further by as much. Among two to four updates, only one that is longer than
    a million, and than a million times the median, is left out. `off` accepts any length.
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

    def needed(self, population: int) -> int:
        """Return the fewest clients for a round to count."""
        size = self.size(population)
        return int(np.ceil(self.quorum * size if self.quorum <= 1 else self.quorum))

    def identity(self) -> dict[str, Any]:
        """Return the values that decide the result: no waiting times, and network keys only if they were changed."""
        values = self.model_dump(
            mode="json", exclude_none=True, exclude={"start_when", "deadline", "max_abandoned", "max_clients"}
        )
        plain = {
            name: type(self).model_fields[name].default for name in ("over_select", "weight_cap", "outlier_factor")
        }
        return {name: value for name, value in values.items() if name not in plain or value != plain[name]}

    def check(self, population: int) -> None:
        """Raise an error if the population is too small for these values."""
        if self.count is not None and self.count > population:
            raise InputError(
                f"cohort.count = {self.count}, but there are only {population} clients. Allowed: 1 to {population}."
            )
        if self.needed(population) > self.size(population):
            raise InputError(
                f"cohort.quorum = {self.quorum:g} can never be met: a round has {self.size(population)} of "
                f"{population} clients."
            )

    def is_for_everyone(self, round: int) -> bool:
        """Return whether all clients take part in this round, whatever the other values say."""
        return self.everyone_every is not None and round % self.everyone_every == 0

    def draw(self, population: int, round: int, seed: int) -> tuple[int, ...]:
        """Draw the clients of a round, in ascending order.

        >>> Sampling(count=3).draw(1_000_000, round=1, seed=7) == Sampling(count=3).draw(1_000_000, round=1, seed=7)
        True
        """
        if self.is_for_everyone(round):
            return tuple(range(population))
        period = (round - 1) // self.redraw_every
        size = self.size(population)
        if self.sampling == "window":
            return tuple(sorted((period + offset) % population for offset in range(size)))
        key = keys.key(seed, "cohort", period)
        if self.sampling == "poisson":
            chosen = keys.hashes(key, population) < self.fraction * 2**32
            return tuple(int(client) for client in np.flatnonzero(chosen))
        if size == population:
            return tuple(range(population))
        if size * 2 > population:
            return tuple(sorted(int(client) for client in keys.permutation(key, population)[:size]))
        # a few of many: draw with repetition until enough are different, so the cost does not grow with the population
        chosen_ids: dict[int, None] = {}
        draws = size
        while len(chosen_ids) < size:
            draws *= 2
            chosen_ids = dict.fromkeys(int(client) for client in keys.hashes(key, draws) * population >> 32)
        return tuple(sorted(list(chosen_ids)[:size]))
