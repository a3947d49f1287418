"""When each client can be asked, and until when: always, in a cycle, or as a file says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom import keys
from fedloom.clock.table_file import read_columns
from fedloom.errors import InputError
from fedloom.record import seconds

Ids = NDArray[np.int64]
Times = NDArray[np.float64]


@dataclass(frozen=True)
class Cycle:
    """Each client is available for a share of every period, from a moment of its own; with a share of 1, always."""

    period: float
    share: float
    begins: Times  # of each client's time, as a share of the period

    @staticmethod
    def drawn(period: float, share: float, population: int, seed: int) -> Cycle:
        """Draw the moments."""
        return Cycle(period, share, keys.hashes(keys.key(seed, "availability"), population) / 2**32)

    @property
    def span(self) -> float:
        """How long it takes until all of it was seen once."""
        return self.period

    def _last(self, begins: Times, now: float) -> Times:
        """Return the number of each client's last turn that has begun."""
        turns = np.floor(now / self.period - begins)
        turns += self._start(begins, turns + 1) <= now  # rounding may miss a turn that begins now
        return turns - (self._start(begins, turns) > now)

    def _start(self, begins: Times, turns: Times) -> Times:
        return (begins + turns) * self.period

    def until(self, ids: Ids, now: float) -> Times:
        """Return when each client's present time ends; −∞ for a client that is not available now."""
        if self.share == 1:
            return np.full(len(ids), math.inf)
        begins = self.begins[ids]
        ends = self._start(begins, self._last(begins, now)) + self.share * self.period
        return np.where(ends > now, ends, -math.inf)

    def next(self, now: float, ids: Ids | None = None) -> float:
        """Return the first moment from now on at which a client, or one of some, is available; ∞ if there is none."""
        some = np.arange(len(self.begins)) if ids is None else ids
        if (self.until(some, now) > now).any():
            return now
        return float(self._start(self.begins[some], self._last(self.begins[some], now) + 1).min(initial=math.inf))


@dataclass(frozen=True)
class Trace:
    """Clients are available from one time to another, as a file says. Its methods are those of a cycle."""

    clients: Ids  # of each row
    begins: Times
    ends: Times
    repeat: float  # start again after this time; ∞: never

    @staticmethod
    def read(file: Path, names: dict[str, int], repeat: str | None) -> Trace:
        """Read a CSV file with the columns client, from and to."""
        rows = read_columns(file, ("from", "to"), names)
        clients = np.array([client for client, _ in rows], dtype=np.int64)
        begins, ends = np.array([values for _, values in rows], dtype=np.float64).reshape(-1, 2).T
        every = seconds(repeat) if repeat is not None else math.inf
        known = list(names)
        for row in np.flatnonzero((begins < 0) | (begins >= ends) | (ends > every)):
            what = f"from {begins[row]:g} to {ends[row]:g}"
            allowed = "0 ≤ from < to" + (f" ≤ {every:g}, the time of 'repeat'" if repeat else "")
            raise InputError(f"{file}: client '{known[clients[row]]}' is available {what}. Allowed: {allowed}.")
        order = np.lexsort((begins, clients))
        clients, begins, ends = clients[order], begins[order], ends[order]
        for row in np.flatnonzero((clients[1:] == clients[:-1]) & (begins[1:] < ends[:-1])):
            raise InputError(
                f"{file}: client '{known[clients[row]]}' is available twice at {begins[row + 1]:g} seconds. "
                "Make one row of the two."
            )
        absent = np.setdiff1d(np.arange(len(names)), clients)
        if len(absent):
            raise InputError(
                f"{file} has a gap: it has no row for {len(absent)} of {len(names)} clients, such as "
                f"'{known[absent[0]]}'. Give each client a time at which it is available."
            )
        return Trace(clients, begins, ends, every)

    @property
    def span(self) -> float:
        return float(self.ends.max()) if math.isinf(self.repeat) else self.repeat

    def _turn(self, now: float) -> float:
        """Return when the present turn of the file began."""
        return 0.0 if math.isinf(self.repeat) else math.floor(now / self.repeat) * self.repeat

    def until(self, ids: Ids, now: float) -> Times:
        turn = self._turn(now)
        found = np.full(int(self.clients[-1]) + 1, -math.inf)
        open_now = (turn + self.begins <= now) & (now < turn + self.ends)  # as `next` rounds: it must not stand still
        found[self.clients[open_now]] = turn + self.ends[open_now]
        return found[ids]

    def next(self, now: float, ids: Ids | None = None) -> float:
        turn = self._turn(now)
        mine = slice(None) if ids is None else np.isin(self.clients, ids)
        begins, ends = turn + self.begins[mine], turn + self.ends[mine]
        if ((begins <= now) & (now < ends)).any():
            return now
        later = begins[begins > now]
        if len(later):
            return float(later.min())
        again = turn + self.repeat + float(self.begins[mine].min(initial=math.inf))
        return max(again, math.nextafter(now, math.inf))
