"""Virtual time without rounds to wait for: clients in flight on a deterministic queue of events."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fedloom import keys
from fedloom.clock.clock import ClientTime, Clock, RoundTime, Status
from fedloom.clock.in_flight import InFlight, WorkOf, leaves_of, versions_of
from fedloom.errors import QuorumError, RoundAbandoned
from fedloom.federation.sampling import choose
from fedloom.tree import Groups, Tree

if TYPE_CHECKING:
    from fedloom.backends.protocol import Backend

STATUSES: tuple[Status, ...] = ("counted", "late", "surplus", "vanished", "left")
FLIGHTS = "flights"  # the name of a leaf that the clock remembers


class Flight(NamedTuple):
    """A client at work. Flights are ordered by their ends, then by client: the order of events."""

    ends: float
    client: int
    began: float
    computing: float
    version: int  # the round in which it started: the version of the state that it has
    status: Status  # what its end will be

    def time(self) -> ClientTime:
        return ClientTime(self.client, self.status, self.began, self.ends, self.computing, self.version)


@dataclass
class AsyncClock(Clock, InFlight):
    """Keeps `concurrency` clients at work, and ends a round when `buffer` of them have answered.

    A client that starts has the state of that moment, and is not drawn again until its answer is in a round. All events
    of one instant happen before anyone starts, in the order of the clients' numbers.
    """

    flights: list[Flight] = field(default_factory=list)  # a heap
    arrived: list[Flight] = field(default_factory=list)  # answers that no round has taken yet
    versions: dict[int, Groups] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.slots = self.sampling.slots(len(self.fleet))
        self._busy = np.zeros(len(self.fleet), dtype=bool)

    def begin(self, round: int) -> tuple[int, ...]:
        """Begin a round. Which clients it has is known when they arrive."""
        available = int((self.fleet.windows.until(self.everyone, self.now) > self.now).sum())
        self._round = replace(self._round, began=self.now, available=available, clients=())
        self._busy[:] = False
        self._busy[[flight.client for flight in (*self.flights, *self.arrived)]] = True
        return ()

    @property
    def found_clients(self) -> bool:
        return True

    @property
    def state(self) -> Tree:
        queue = [*sorted(self.flights), *self.arrived]
        numbers = [[*flight[:5], STATUSES.index(flight.status), flight in self.arrived] for flight in queue]
        leaves = {FLIGHTS: torch.tensor(numbers, dtype=torch.float64).reshape(-1, 7)}
        return {**super().state, **leaves_of(self.versions), **leaves}

    def restore(self, state: Tree) -> None:
        super().restore(state)
        self.flights, self.arrived, self.versions = [], [], {}
        for ends, client, began, computing, version, status, has_arrived in state[FLIGHTS].tolist():
            flight = Flight(ends, int(client), began, computing, int(version), STATUSES[int(status)])
            (self.arrived if has_arrived else self.flights).append(flight)
            self.versions[flight.version] = {}
        self.versions |= versions_of(state)

    def arrivals(self, round: int, shared: Groups, work_of: WorkOf, backend: Backend) -> list[Flight]:
        """Let time pass until enough clients have answered; return their flights."""
        taken: list[Flight] = []
        block, progress = 0, self.now
        while True:
            while self.arrived and len(taken) < self.sampling.buffer:
                taken.append(self.arrived.pop(0))
                progress = self.now
            if len(taken) == self.sampling.buffer:
                break
            if len(self.flights) < self.slots:
                self._start(round, block, shared, work_of, backend)
                block += 1
            moment = self.flights[0].ends if self.flights else self._somebody(round)
            if moment > progress + self._wait:
                self.now, self.arrived = progress + self._wait, taken
                raise RoundAbandoned(f"Round {round}: nobody answered for {self.sampling.deadline} of virtual time.")
            self.now = moment
            while self.flights and self.flights[0].ends <= moment:
                flight = heapq.heappop(self.flights)
                if flight.status == "counted":
                    self.arrived.append(flight)
                else:
                    self._busy[flight.client] = False
                    self._add(flight)
        for flight in taken:
            self._add(flight)
        return taken

    def in_use(self) -> set[int]:
        return {flight.version for flight in (*self.flights, *self.arrived)}

    def end(self) -> RoundTime:
        self.drop_versions()
        return super().end()

    def _start(self, round: int, block: int, shared: Groups, work_of: WorkOf, backend: Backend) -> None:
        """Start clients in all free slots. The first block of a round is drawn as a cohort of FedAvg is."""
        windows, now = self.fleet.windows, self.now
        ids = choose(
            keys.key(self.seed, "cohort", round - 1, *([block] if block else [])),
            self.slots - len(self.flights),
            len(self.fleet),
            lambda some: ~self._busy[some] & (windows.until(some, now) > now),
        )
        if not ids:
            return
        self.versions[round] = shared
        some = np.array(ids, dtype=np.int64)
        taken, computing = self.seconds(work_of(round, ids), backend)
        lost, status = self.losses(some, round, block, now, taken)
        late = np.minimum(lost, now + taken) > now + self._wait
        status[late] = "late"
        ends = np.where(late, now + self._wait, np.minimum(lost, now + taken))
        self._busy[some] = True
        for client, end, busy, what in zip(ids, ends.tolist(), computing.tolist(), status, strict=True):
            heapq.heappush(self.flights, Flight(end, client, now, busy, round, what))

    def _somebody(self, round: int) -> float:
        """Return when a client that is not at work is available, if nobody is at work."""
        moment = self.fleet.windows.next(self.now, np.flatnonzero(~self._busy))
        if math.isinf(moment):
            raise QuorumError(
                f"Round {round}: after {self.now:,.0f} virtual seconds nobody is at work, and by the file of [system] "
                "availability nobody will be available. Add times to it, or set 'repeat' to start again."
            )
        return moment

    def _add(self, flight: Flight) -> None:
        known = {one.client: one for one in self._round.clients} | {flight.client: flight.time()}
        self._round = replace(self._round, clients=tuple(known[client] for client in sorted(known)))
