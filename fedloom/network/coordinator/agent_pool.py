"""The agents of a run. The engine's thread opens a call and waits; agents' requests take it and answer it."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.errors import InputError
from fedloom.network.coordinator.connected_agent import HEARTBEAT, LATE, MISSED, STATES, ConnectedAgent
from fedloom.network.coordinator.event_log import EventLog
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.protocol.messages import Assignment, ClientAnswer, DataFormat, Failure, Hello
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.tensors import Parcel

Check = Callable[[Assignment, ClientAnswer], None]  # raises Rejected


@dataclass
class Call:
    """One question to some clients, open until the engine closes it: assignments, and the answers that have arrived."""

    title: str  # for people: what is being done
    assignments: dict[str, Assignment]  # by agent
    parcels: dict[str, Parcel]  # by SHA-256
    check: Check
    deadline: float
    ledger_key: tuple[str, int, int, str] | None = None  # cell, round, call, digest of what is stored in the ledger
    waiting: dict[int, str] = field(default_factory=dict)  # client → agent
    answers: dict[int, ClientAnswer] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)  # bytes, by agent
    received: dict[int, int] = field(default_factory=dict)  # bytes, by client
    hashes: dict[int, str] = field(default_factory=dict)  # of bodies: the same body again is not a second answer
    claimed: set[int] = field(default_factory=set)  # clients whose answers are being stored
    in_memory: int = 0  # bytes of answers that are not mapped from files
    needed: int = 0  # how many answers the round needs to count
    enough: int | None = None  # how many answers suffice, if more clients were asked
    hides_metrics: bool = False  # whether [privacy] lets no metric leave: what answers have of them is dropped
    open: bool = True
    opened: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        for agent, assignment in self.assignments.items():
            self.waiting.update({one.client: agent for one in assignment.clients})

    @property
    def complete(self) -> bool:
        """Whether enough clients have answered."""
        return not self.waiting or (self.enough is not None and len(self.answers) >= self.enough)

    def assignment(self, agent: str, id: str) -> Assignment | None:
        """Return an agent's assignment if it has this id."""
        found = self.assignments.get(agent)
        return found if found is not None and found.id == id else None

    def accept(self, answer: ClientAnswer, sha256: str, size: int) -> None:
        """Count an answer; `sha256` and `size` are those of its body."""
        client = answer.client
        self.waiting.pop(client, None)
        self.answers[client], self.hashes[client], self.received[client] = answer, sha256, size

    def fail(self, agent: str, failure: Failure) -> None:
        """Stop waiting for clients that an agent will not answer for in this call."""
        if failure.ask is not None and self.assignment(agent, failure.ask):
            for client in failure.clients:
                if self.waiting.get(client) == agent:
                    del self.waiting[client]
                    self.failures[client] = failure


class AgentPool:
    """The agents that have connected, the open call, and what all of them are told."""

    def __init__(
        self, ledger: Ledger, tell: Callable[[str], None] = lambda text: None, deadline: float = math.inf
    ) -> None:
        self.ledger = ledger
        self.tell = tell
        self.heartbeat = min(HEARTBEAT, deadline / 4)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.changed = threading.Condition()
        self.admitting = threading.Lock()  # while clients are fixed, no agent may say something new about itself
        self.check_data: Callable[[DataFormat], object] = lambda data: None  # raises InputError
        self.max_clients: float = math.inf  # of one agent
        self.no_late_joiners = ""  # why no agent can join after the first round
        self.agents: dict[str, ConnectedAgent] = {}
        self.call: Call | None = None  # the one that the engine waits for
        self.flights: dict[str, Call] = {}  # of clients at work across asynchronous rounds, by assignment, oldest first
        self.finished = ""  # what agents are told when there is no more work
        self.closing = False  # whether polls must end, because the port is about to close
        self.stage = "waiting for agents"
        self.run_plan: dict[str, Any] = {}  # what will be run, as agents are told
        self.initial_weights: dict[str, Path] = {}  # files by SHA-256
        self.largest = 64 << 20  # bytes of one answer
        self.most_tensors = 1000  # of one answer; more if it measures many clients
        self.accepted = 0
        self.rejected: Counter[str] = Counter()  # answers, by code
        self.events = EventLog(ledger, tell)

    # --- agents

    def mark_seen(self, agent: str, name: str, doing: str | None = None, process: str = "") -> ConnectedAgent:
        """Note that an agent has just been heard from; `process` has its number, and that of the one before it."""
        one = self.expect(agent, name)
        known = process.split(" ")
        if process and one.process and one.process not in known and not one.lost():
            raise Rejected(
                "twice",
                f"Another process uses the key of '{name}'. If its state folder was copied, stop one of the two. Each "
                "site needs its own state folder and token.",
            )
        one.process = known[0] or one.process
        if not one.contacted or one.lost():
            back = f"is back, after {one.silence():.0f} s without a word" if one.contacted else "has connected"
            one.contacted, one.missed = True, False
            self.log("agent", f"{name} {back}", agent)
        one.seen = time.monotonic()
        if doing is not None:
            one.doing = doing
        return one

    def expect(self, agent: str, name: str) -> ConnectedAgent:
        """Return an agent. One of an earlier process is not lost until it has had time to come back."""
        new = ConnectedAgent(agent, name, time.monotonic(), heartbeat=self.heartbeat)
        return self.agents.setdefault(agent, new)

    def ready(self) -> list[ConnectedAgent]:
        """Return the agents that said hello and are not lost."""
        return [one for one in list(self.agents.values()) if one.hello is not None and not one.lost()]

    def admit(self, one: ConnectedAgent, hello: Hello) -> None:
        """Admit an agent that is ready; raise `InputError` if its data does not fit the run or has changed."""
        with self.admitting:
            known = self.ledger.fact("data")
            if known is None:
                self.check_data(hello.data_format)
            elif different := hello.differences(DataFormat.model_validate(known)):
                raise InputError(f"its data does not fit the run's. {different}")
            if not hello.clients:
                raise InputError("it hosts no client")
            if len(hello.numbers) not in (0, len(hello.clients)):
                raise InputError("its [site] hosts must number every client, and each one once")
            for other in self.ready():
                if other is not one and other.hello is not None and (both := hello.numbers & other.hello.numbers):
                    raise InputError(f"client {min(both)} is hosted by {other.name} already")
            clients = self.ledger.clients()
            takes_part = any(row["agent"] == one.agent for row in clients)
            if not takes_part and len(hello.clients) > self.max_clients:
                raise InputError(
                    f"it hosts {len(hello.clients)} clients, and [cohort] max_clients = {self.max_clients}"
                )
            is_late = bool(clients) and not takes_part
            if is_late:
                self._check_late(one, hello, len(clients))
            row = self.ledger.agent(one.agent) or {}
            before = json.loads(row.get("hello") or "{}")
            if takes_part and before:
                replaced = row["mark"] == ""  # then it marks its data with another key
                if not replaced and (row["mark"] or before.get("data_mark")) != hello.data_mark:
                    raise InputError("its data has changed since the run began")
                if before["clients"] != hello.model_dump(mode="json")["clients"]:
                    raise InputError(
                        "its clients or the sizes of their splits are not those that the run began with. If its data "
                        "is the same, set [policy] min_examples at the site to what it was"
                    )
                if replaced:
                    self.ledger.set_mark(one.agent, hello.data_mark)
                    kept = "what its clients kept starts again, if it was lost"
                    self.log("agent", f"{one.name} was replaced; {kept}", one.agent)
            said = hello.model_dump(mode="json")
            if takes_part and before:  # a site may change its policy, but nothing else
                policy = ("min_cohort", "withheld", "sends_scores")
                said = {**before, **{name: said[name] for name in policy}}
            self.ledger.set_hello(one.agent, said)
            if is_late:
                self.ledger.add_clients(hello.numbered(one.agent, len(clients)), late=True)
                self.log("agent", f"{one.name} joins the run from the next round on", one.agent)
            one.hello, one.refused = hello, ""
        with self.changed:
            self.changed.notify_all()
        self.log("agent", f"{one.name} is ready, with {len(hello.clients)} client(s)", one.agent)
        if hello.withheld:
            names = ", ".join(hello.withheld)
            self.log("agent", f"{one.name} withholds {names}: its [policy] metrics must name what may leave", one.agent)
        if hello.sends_scores:
            what = "the scores and the true label of every single example that is measured"
            self.log("agent", f"{one.name} sends {what}: its [policy] says example_scores = true", one.agent)

    def min_cohort(self, agents: Collection[str]) -> int:
        """Return the fewest clients with which all of these agents let their updates be summed; 0 without agents."""
        return max(map(self._min_cohort, agents), default=0)

    def _min_cohort(self, agent: str) -> int:
        one = self.agents.get(agent)
        if one is not None and one.hello is not None:
            return one.hello.min_cohort
        row = self.ledger.agent(agent) or {}  # it answered, and is gone
        return int(json.loads(row.get("hello") or "{}").get("min_cohort", 1))

    def _check_late(self, one: ConnectedAgent, hello: Hello, clients: int) -> None:
        """Raise `InputError` if an agent cannot join a run that has begun with this many clients."""
        if not self.ledger.is_invited_late(one.agent):
            raise InputError(
                "the run began without it. With a token that `fedloom agents invite` makes now, it can join"
            )
        if self.no_late_joiners:
            raise InputError(f"the run began without it, and {self.no_late_joiners}")
        free = range(clients, clients + len(hello.clients))
        if hello.numbers and hello.numbers != frozenset(free):
            raise InputError(f"its [site] hosts must be the next free numbers, {free[0]} to {free[-1]}")

    def log(self, kind: str, message: str, agent: str | None = None) -> None:
        """Show something to the user and store it in the ledger, within the quota of the agent that caused it."""
        self.events.add(kind, message, agent)

    # --- the engine's side

    def open(self, call: Call) -> None:
        """Open a call: agents that poll receive it."""
        with self.changed:
            self.call = call
        self._wake(list(call.assignments))

    def start(self, flight: Call) -> None:
        """Open a call to one client that stays open across rounds."""
        ((agent, assignment),) = flight.assignments.items()
        with self.changed:
            self.flights[assignment.id] = flight
        self._wake([agent])

    def end(self, flight: Call) -> None:
        """Close a call to one client."""
        (assignment,) = flight.assignments.values()
        with self.changed:
            flight.open = False
            self.flights.pop(assignment.id, None)

    def _wake(self, agents: list[str]) -> None:
        def wake() -> None:
            for agent in agents:
                if agent in self.agents:
                    self.agents[agent].wake.set()

        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(wake)

    def finish(self, words: str) -> None:
        """Tell agents that there is no more work; busy ones learn it from their next heartbeat."""
        self.finished = words
        self._wake(list(self.agents))
        self.wait_until(lambda: all(one.told_to_stop for one in self.ready()), 1.5 * self.heartbeat)

    def end_polls(self) -> None:
        """Let agents' polls return: after an interruption, agents look for the coordinator until it is back."""
        self.closing = True
        self._wake(list(self.agents))

    def wait(self, call: Call, needed: int) -> None:
        """Wait until the call is complete, its deadline passes, or it has enough answers and the others are lost."""

        call.needed = needed

        def ended() -> bool:
            awaited = [self.agents[agent] for agent in set(call.waiting.values())]
            all_lost = all(one.lost() or one.refused for one in awaited)
            return call.complete or (all_lost and len(call.answers) >= needed)

        self.wait_until(ended, call.deadline - time.monotonic())
        with self.changed:
            call.open = False
            self.call = None

    def absences(self, call: Call) -> dict[int, str]:
        """Return the clients whose answers to a closed call do not count, and why."""
        found = {client: "refused" if one.kind == "refused" else "failed" for client, one in call.failures.items()}
        for client, agent in call.waiting.items():
            one = self.agents[agent]
            lost = "gone" if one.lost() else "refused" if one.refused else "late"
            found[client] = "surplus" if call.complete else lost
        return found | dict.fromkeys(list(call.answers)[call.enough :] if call.enough is not None else (), "surplus")

    def wait_until(self, condition: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Wait for a condition; return False when the time is up."""
        end = time.monotonic() + seconds
        with self.changed:
            while True:
                self._report_lost()
                if condition():
                    return True
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self.pause(min(left, 0.2))

    def _report_lost(self) -> None:
        """Tell the operator once of each agent that is gone; those that were sent away or stay out are known."""
        new = [one for one in list(self.agents.values()) if one.lost() and not one.missed]
        revoked = self.ledger.revoked() if new else ()
        for one in new:
            one.missed = True
            if not (one.agent in revoked or one.refused or one.told_to_stop):
                since = "nothing was heard from it" if one.contacted else "it did not come back"
                self.log(
                    "agent",
                    f"{one.name} is gone: {since} for {one.silence():.0f} s. Rounds that have enough answers do not "
                    "wait for it, and it can come back at any time",
                    one.agent,
                )

    def pause(self, seconds: float) -> None:
        """Let answers arrive on other threads."""
        self.changed.wait(seconds)

    # --- the agents' side

    def next_assignment(self, agent: str) -> tuple[Assignment, Call] | None:
        """Return an agent's assignment if some of its clients have not answered yet."""
        for call in self.open_calls:  # without the lock: an agent that takes a closing call answers too late
            assignment = call.assignments.get(agent)
            asked = assignment.clients if assignment is not None and call.open else ()
            left = tuple(one for one in asked if call.waiting.get(one.client) == agent)
            if assignment is not None and left:
                seconds = max(call.deadline - time.monotonic(), 0.0)
                return assignment.model_copy(update={"clients": left, "seconds": seconds}), call
        return None

    @property
    def open_calls(self) -> list[Call]:
        """All open calls, the oldest first."""
        call = self.call
        return [*list(self.flights.values()), *([call] if call is not None else [])]

    def find(self, agent: str, id: str) -> Call | None:
        """Return the open call in which an agent has this assignment."""
        call = self.flights.get(id, self.call)
        return call if call is not None and call.assignment(agent, id) else None

    def end_message(self, one: ConnectedAgent) -> str:
        """Return what an agent is told at the end; an empty string before that."""
        if self.finished:
            with self.changed:
                one.told_to_stop = True
                self.changed.notify_all()
        return self.finished

    def fail(self, agent: str, failure: Failure) -> None:
        """Note that an agent could not do its work, or refuses to."""
        one = self.agents[agent]
        with self.changed:
            if failure.ask is None:
                one.refused, one.hello = failure.message, None  # it gets work again after its next hello
            elif (call := self.find(agent, failure.ask)) is not None:
                call.fail(agent, failure)
            self.changed.notify_all()
        verb = "refuses" if failure.kind == "refused" else "failed"
        self.log(failure.kind, f"{one.name} {verb}: {failure.message}", agent)

    def counts(self) -> dict[str, Any]:
        """Return what anybody may know: numbers without names."""
        found = self.status()
        states = [one["state"] for one in found["agents"]]
        return {
            **{key: found[key] for key in ("awaited_clients", "seconds_left", "accepted", "rejected")},
            "agents": {state: states.count(state) for state in STATES},
        }

    def status(self) -> dict[str, Any]:
        """Return the stage of the run, the agents, and whom the coordinator is waiting for."""
        revoked = self.ledger.revoked()
        with self.changed:
            call = self.call
            awaited = {client: agent for one in self.open_calls for client, agent in one.waiting.items()}
            agents = [
                one.shown(one.agent in awaited.values()) | ({"state": "revoked"} if one.agent in revoked else {})
                for one in self.agents.values()
            ]
            return {
                "stage": self.finished or (call.title if call is not None else self.stage),
                "awaited_clients": len(awaited),
                "seconds_left": round(max(call.deadline - time.monotonic(), 0.0), 1) if call is not None else None,
                "accepted": self.accepted,
                "rejected": self.rejected.total(),
                "silent_after": LATE * self.heartbeat,
                "gone_after": MISSED * self.heartbeat,
                "agents": sorted(agents, key=lambda one: str(one["name"])),
            }
