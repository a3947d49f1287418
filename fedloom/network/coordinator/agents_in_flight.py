"""Asynchronous rounds with real agents: which clients are at work, who has answered, and what a round takes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom import keys
from fedloom.clock.in_flight import InFlight, WorkOf
from fedloom.federation.sampling import choose
from fedloom.federation.work import ClientWork
from fedloom.network.coordinator.agent_pool import Call
from fedloom.network.coordinator.ledger import REVOKED
from fedloom.network.protocol.messages import Assignment, Failure
from fedloom.network.protocol.tensors import Parcel
from fedloom.record import seconds
from fedloom.tree import Groups

if TYPE_CHECKING:
    from fedloom.backends.protocol import Backend
    from fedloom.network.coordinator.backend import NetworkBackend

LOOK = 1.0  # seconds between two looks at which agents came, left or were revoked


class Flight(NamedTuple):
    """A client at work, or its answer that no round has taken yet."""

    version: int
    client: int


class AgentsInFlight(InFlight):
    """Keeps `concurrency` clients at work, and ends a round when `buffer` of them have answered.

    The ledger has all flights and the rounds that took their answers. So after a restart, clients at work are asked
    again from their versions, no answer is lost, and a round that had begun to add up takes the same answers again.
    """

    def __init__(self, backend: NetworkBackend, seed: int) -> None:
        self.backend, self.pool, self.ledger = backend, backend.pool, backend.pool.ledger
        self.sampling, self.seed = backend.sampling, seed
        self.versions: dict[int, Groups] = {}
        self.calls: dict[Flight, Call] = {}
        self.arrived: list[Flight] = []  # in the order in which they answered
        self._taken: Sequence[Flight] = ()  # by this round
        self._parcels: dict[int, Parcel] = {}  # versions as they travel
        self._resting = False

    def busy_agents(self) -> set[str]:
        """Return the agents with clients at work. An agent does one thing at a time, and its oldest work first."""
        hosts = self.backend.roster.hosts  # after a restart, without clients that join in a later round
        at_work = () if self._resting else self.ledger.at_work(self.backend.cell.name)
        return {hosts[client][0] for client in at_work if client in hosts}

    def rest(self) -> None:
        """Let the agents stop. The ledger still has the flights: a run that goes on later asks those clients again."""
        self._resting = True
        for call in self.calls.values():
            self.pool.end(call)
        self.ledger.forget_untaken(self.backend.cell.name)

    def in_use(self) -> set[int]:
        return self.ledger.versions_in_use(self.backend.cell.name, self.backend.cell.round)

    def end(self) -> None:
        for flight in self._taken:
            self._close(flight)
        self._taken = ()
        self.drop_versions()
        self._parcels = {version: parcel for version, parcel in self._parcels.items() if version in self.versions}

    def arrivals(self, round: int, shared: Groups, work_of: WorkOf, backend: Backend) -> Sequence[Flight]:
        cell, needed = self.backend.cell, self.sampling.buffer
        self.versions[round] = shared
        self.backend.begin_attempt(round, needed)
        before = self._reopen(round, work_of)
        failures = self._sort()
        if len(before) == needed and {*before} <= {*self.arrived}:
            self._taken = before
        else:  # a new round, or one that was abandoned or lost answers: what followed from it no longer holds
            self.ledger.forget_after(cell.name, round)
            self.ledger.take(cell.name, None, before)
            self._taken = ()
            self._reopen(round, work_of)  # answers that later rounds had taken
            self._taken = self._wait(round, work_of, failures | self._sort())
            self.ledger.take(cell.name, round, self._taken)
        self.backend.end_attempt(round, len(self._taken), "accepted")
        return self._taken

    def _wait(self, round: int, work_of: WorkOf, failures: dict[int, Failure]) -> Sequence[Flight]:
        """Keep clients at work until enough have answered."""
        needed, patience = self.sampling.buffer, seconds(self.sampling.deadline)
        answered, progress, block = 0, time.monotonic(), 0
        while len(self.arrived) < needed:
            if len(self.arrived) > answered:
                answered, progress = len(self.arrived), time.monotonic()
            started = self._start(round, block, work_of, failures)
            block += started
            all_failed = failures and not started and not self._at_work() and self._able() <= failures.keys()
            if all_failed or time.monotonic() > progress + patience:
                self.backend.abandon(round, failures, len(self.calls) + len(failures), answered, needed)
            self.pool.stage = f"{self.backend.cell.label}: round {round}, {answered} of {needed} answers"
            self.pool.wait_until(self._has_news, LOOK)
            failures |= self._sort()
        return self.arrived[:needed]

    def _at_work(self) -> list[Call]:
        return [call for call in self.calls.values() if call.waiting]

    def _has_news(self) -> bool:
        return any(not call.waiting for flight, call in self.calls.items() if flight not in self.arrived)

    def _able(self) -> set[int]:
        """Return the clients that may start: their answers are not awaited, and nobody revoked their agents."""
        revoked, flying = self.ledger.revoked(), {flight.client for flight in self.calls}
        hosts = self.backend.roster.hosts.items()
        return {client for client, (agent, _) in hosts if agent not in revoked and client not in flying}

    def _sort(self) -> dict[int, Failure]:
        """Note who has answered, and end the flights that nobody waits for any more; return who failed."""
        cell, revoked = self.backend.cell, self.ledger.revoked()
        failures: dict[int, Failure] = {}
        with self.pool.changed:  # no answer may be accepted in between
            for flight, call in list(self.calls.items()):
                (agent,) = call.assignments
                is_late = bool(call.waiting) and time.monotonic() > call.deadline
                if is_late:
                    who = f"'{self.backend.roster.name(flight.client)}', at work since round {flight.version},"
                    late = f"{cell.label}: {who} has not answered within {self.sampling.deadline}"
                    self.pool.log("late", f"{late}: its place is free, and its answer will be rejected", agent)
                if agent in revoked or call.failures or is_late:
                    failures |= call.failures
                    why = {flight.client: REVOKED} if agent in revoked else self.pool.absences(call)
                    self.backend.absent |= why
                    self._close(flight)
                    self.ledger.end_flight(cell.name, *flight)
                elif call.answers and flight not in self.arrived:
                    self.arrived.append(flight)
                    self.backend.absent.pop(flight.client, None)  # it started again
        self.backend.failing = (self.backend.failing | failures.keys()) - {flight.client for flight in self.arrived}
        return failures

    def _close(self, flight: Flight) -> None:
        self.pool.end(self.calls.pop(flight))
        if flight in self.arrived:
            self.arrived.remove(flight)

    # --- from clients to calls

    def _start(self, round: int, block: int, work_of: WorkOf, failures: dict[int, Failure]) -> bool:
        """Start clients in free slots; return whether somebody started.

        The first block of a round is drawn as a cohort of FedAvg is. Clients that failed wait for the next round.
        """
        hosts, ready = self.backend.roster.hosts, {one.agent for one in self.pool.ready()}
        able = {client for client in self._able() - failures.keys() if hosts[client][0] in ready}
        free = self.sampling.slots(len(hosts)) - len(self._at_work())
        if free <= 0 or not able:
            return False

        def allowed(some: NDArray[np.int64]) -> NDArray[np.bool_]:
            return np.array([client in able for client in some.tolist()], dtype=bool)

        key = keys.key(self.seed, "cohort", round - 1, *([block] if block else []))
        work = work_of(round, choose(key, free, len(hosts), allowed))
        parcel = self._parcel(work)
        found = {client: self._assignment(work, position, parcel) for position, client in enumerate(work.ids)}
        texts = {client: text for client, text in found.items() if text}
        self.ledger.start_flights(self.backend.cell.name, round, texts)
        for text in texts.values():
            self._open(work, parcel, text)
        return True

    def _parcel(self, work: ClientWork) -> Parcel:
        if work.round not in self._parcels:
            self._parcels[work.round] = self.backend.shared_parcel(work)
        return self._parcels[work.round]

    def _assignment(self, work: ClientWork, position: int, parcel: Parcel) -> str:
        """Return the assignment of one client, as JSON; an empty text if its agent has just been revoked."""
        cell, client = self.backend.cell, work.ids[position]
        made = self.backend.training_assignments(work.part(position, position + 1), parcel, {})
        if not made:
            return ""
        (assignment,) = made.values()
        # what it kept before an answer that no checkpoint has yet may count again
        first = self.ledger.first_unsaved(cell.name, client, cell.durable)
        durable = cell.durable if first is None else min(cell.durable, first - 1)
        return assignment.model_copy(update={"cohort": self.sampling.buffer, "durable": durable}).model_dump_json()

    def _open(self, work: ClientWork, parcel: Parcel, text: str) -> None:
        """Open the call to one client, and count its answer if an earlier process accepted it."""
        assignment = Assignment.model_validate_json(text)
        (asked,) = assignment.clients
        cell, digest = self.backend.cell, hashlib.sha256(text.encode()).hexdigest()
        call = Call(
            f"{cell.label}: from round {work.round}",
            {self.backend.roster.hosts[asked.client][0]: assignment},
            {parcel.sha256: parcel},
            partial(self.backend.judge.check_trained, work, self.backend.expected_update(work)),
            self.backend.deadline(),
            ledger_key=(cell.name, work.round, 0, digest),
            needed=self.sampling.buffer,
            hides_metrics=self.backend.hides_metrics,
        )
        for update in self.ledger.accepted(cell.name, work.round, 0, digest):
            self.backend.reopen(call, update)
        self.calls[Flight(work.round, asked.client)] = call
        self.pool.start(call)

    def _reopen(self, round: int, work_of: WorkOf) -> list[Flight]:
        """Open what an earlier process left open, as far as its versions are known; return what this round took."""
        rows = {
            Flight(row["version"], row["client"]): row for row in self.ledger.flights(self.backend.cell.name, round)
        }
        new = [flight for flight in rows if flight not in self.calls and flight.version <= round]
        for version in sorted({flight.version for flight in new}):
            ids = tuple(flight.client for flight in new if flight.version == version)
            work = work_of(version, ids) if version in self.versions else None
            for client in ids:
                text = rows[Flight(version, client)]["assignment"]
                if work is not None and self._parcel(work).sha256 in text:
                    self._open(work, self._parcel(work), text)
                else:  # of another model, because something before it has changed
                    self.ledger.end_flight(self.backend.cell.name, version, client)
        return [flight for flight, row in rows.items() if row["taken"] == round]
