"""Where the engine's thread and the agents' requests meet: one call at a time is open, agents take it and answer it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.errors import StoreError
from fedloom.network.coordinator.ledger import Accepted, Ledger
from fedloom.network.protocol.messages import Ask, ClientAnswer, Failure, Hello
from fedloom.network.protocol.tensors import Parcel

BEAT = 3.0  # seconds between an agent's signs of life, unless the deadline is short
DENIALS = 100  # so many refused requests are told within a minute
MISSED = 5  # silent for so many, an agent is lost: not waited for if the round can do without it


@dataclass
class Connection:
    """An agent, as it is seen now."""

    agent: str
    name: str
    seen: float
    hello: Hello | None = None  # said when it is ready to work
    doing: str = ""
    refused: str = ""  # why it does not take part
    beating: bool = False  # whether it was seen by this process at all
    heard_the_end: bool = False  # whether it was told that there is nothing more to do
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    beat: float = BEAT

    def lost(self) -> bool:
        return time.monotonic() - self.seen > MISSED * self.beat

    @property
    def state(self) -> str:
        if self.lost() or not self.beating:
            return "gone"
        return "ready" if self.hello is not None else "refused" if self.refused else "joining"

    def shown(self, awaited: bool) -> dict[str, Any]:
        """This agent, for the operator."""
        return {
            "name": self.name,
            "state": self.state,
            "doing": self.doing,
            "clients": len(self.hello.clients) if self.hello else 0,
            "seconds_since_seen": round(time.monotonic() - self.seen, 1),
            "awaited": awaited,
            "why": self.refused,
        }


@dataclass
class Call:
    """One question to some clients, open until the engine closes it."""

    title: str  # for people: what is being done
    asks: dict[str, Ask]  # by agent
    parts: dict[str, Parcel]
    check: Callable[[Ask, ClientAnswer], None]  # raises Rejected
    deadline: float
    keep: tuple[str, int, int, str] | None = None  # where accepted answers belong in the ledger, if they are kept
    waiting: dict[int, str] = field(default_factory=dict)  # client → agent
    answers: dict[int, ClientAnswer] = field(default_factory=dict)
    kept: dict[int, Accepted] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)  # bytes, by agent
    received: dict[int, int] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)  # of the bodies: the same one again is no second answer
    claimed: set[int] = field(default_factory=set)  # clients whose answers are being taken in
    in_memory: int = 0  # bytes of answers that are not mapped from files
    enough: int | None = None  # how many answers will do, if more were asked for
    open: bool = True

    def __post_init__(self) -> None:
        for agent, ask in self.asks.items():
            self.waiting.update({one.client: agent for one in ask.clients})

    @property
    def complete(self) -> bool:
        """Whether nobody need be waited for."""
        return not self.waiting or (self.enough is not None and len(self.answers) >= self.enough)

    def accept(self, client: int, answer: ClientAnswer, kept: Accepted | None, sha256: str, size: int) -> None:
        """An answer that counts."""
        self.waiting.pop(client)
        self.answers[client], self.hashes[client], self.received[client] = answer, sha256, size
        if kept is not None:
            self.kept[client] = kept


class Hub:
    """All that the coordinator knows at the moment. Agents' requests come in on one side, the engine on the other."""

    def __init__(
        self, ledger: Ledger, tell: Callable[[str], None] = lambda text: None, deadline: float = math.inf
    ) -> None:
        self.ledger = ledger
        self.tell = tell
        self.beat = min(BEAT, deadline / 4)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.changed = threading.Condition()
        self.welcoming = threading.Lock()  # the first agent's data decides what the others' must be
        self.connections: dict[str, Connection] = {}
        self.call: Call | None = None
        self.finished = ""  # what agents are told when there will be no more work
        self.stage = "waiting for agents"
        self.offer: dict[str, Any] = {}
        self.lasting: dict[str, Path] = {}  # files with initial weights
        self.largest = 64 << 20  # bytes of one answer
        self.accepted = 0
        self.rejected = 0
        self._denied: deque[float] = deque(maxlen=DENIALS)

    # --- agents

    def seen(self, agent: str, name: str, doing: str | None = None) -> Connection:
        """An agent gave a sign of life."""
        connection = self.connections.get(agent)
        if connection is None:
            connection = self.connections[agent] = Connection(agent, name, time.monotonic(), beat=self.beat)
        if not connection.beating or connection.lost():
            connection.beating = True
            self.log("agent", f"{name} is here", agent)
        connection.seen = time.monotonic()
        if doing is not None:
            connection.doing = doing
        return connection

    def expect(self, agent: str, name: str) -> None:
        """Somebody who was there before this process began: not lost until it has had time to come back."""
        self.connections.setdefault(agent, Connection(agent, name, time.monotonic(), beat=self.beat))

    def ready(self) -> list[Connection]:
        """Agents that said hello and are not lost."""
        return [one for one in list(self.connections.values()) if one.hello is not None and not one.lost()]

    def log(self, kind: str, message: str, agent: str | None = None) -> None:
        """Something the user should know: on the console and in the ledger."""
        if kind == "denied" and self._too_often():
            return
        message = "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in message)  # others wrote it
        self.tell(message)
        with contextlib.suppress(StoreError):  # a full disk must not keep people from being told
            self.ledger.note(kind, message, agent)

    def _too_often(self) -> bool:
        """Whether strangers were refused so often lately that telling it again would only fill the disk."""
        now, times = time.monotonic(), self._denied
        if len(times) == times.maxlen and now - times[0] < 60:
            return True
        times.append(now)
        if len(times) == times.maxlen and now - times[0] < 60:
            self.tell("Many requests are refused; for a minute, further ones are not shown.")
        return False

    # --- the engine's side

    def ask(self, call: Call) -> None:
        """Open a call: agents that poll are given it."""
        with self.changed:
            self.call = call
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._wake, list(call.asks))

    def _wake(self, agents: list[str]) -> None:
        for agent in agents:
            if agent in self.connections:
                self.connections[agent].wake.set()

    def wake_all(self) -> None:
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._wake, list(self.connections))

    def end(self, words: str) -> None:
        """Tell agents that there is nothing more to do; those who are busy hear it with their next sign of life."""
        self.finished = words
        self.wake_all()
        self.wait_until(lambda: all(one.heard_the_end for one in self.ready()), 1.5 * self.beat)

    def wait(self, call: Call, needed: int) -> None:
        """Until enough answered, the deadline passed, or those who are left cannot be expected back."""
        with self.changed:
            while not call.complete:
                now = time.monotonic()
                if now >= call.deadline:
                    break
                gone = all(self.connections[agent].lost() for agent in set(call.waiting.values()))
                if gone and len(call.answers) >= needed:
                    break
                self.pause(min(call.deadline - now, 0.5))
            call.open = False
            self.call = None

    def wait_until(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait for something about the agents; false when the time is up."""
        end = None if seconds is None else time.monotonic() + seconds
        with self.changed:
            while not condition():
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self.pause(0.2 if left is None else min(left, 0.2))
        return True

    def pause(self, seconds: float) -> None:
        """Let answers arrive: they come on other threads."""
        self.changed.wait(seconds)

    # --- the agents' side

    def next_ask(self, agent: str) -> tuple[Ask, Call] | None:
        """What an agent should do now, if anything: an ask that still has unanswered clients."""
        call = self.call  # read once, without the lock: whoever is told of a call that is just closing answers too late
        if call is None or not call.open or agent not in call.asks:
            return None
        left = tuple(one for one in call.asks[agent].clients if call.waiting.get(one.client) == agent)
        if not left:
            return None
        seconds = max(call.deadline - time.monotonic(), 0.0)
        return call.asks[agent].model_copy(update={"clients": left, "seconds": seconds}), call

    def farewell(self, connection: Connection) -> str:
        """What an agent is told at the end; empty before."""
        if self.finished:
            with self.changed:
                connection.heard_the_end = True
                self.changed.notify_all()
        return self.finished

    def fail(self, agent: str, failure: Failure) -> None:
        """An agent could not or would not do what it was asked."""
        connection = self.connections[agent]
        with self.changed:
            call = self.call
            if failure.ask is None:
                connection.refused = failure.message
            elif call is not None and agent in call.asks and call.asks[agent].id == failure.ask:
                for client in failure.clients:
                    if call.waiting.get(client) == agent:
                        del call.waiting[client]
                        call.failures[client] = failure
            self.changed.notify_all()
        words = "refuses" if failure.kind == "refused" else "failed"
        self.log(failure.kind, f"{connection.name} {words}: {failure.message}", agent)

    def counts(self) -> dict[str, Any]:
        """What anybody may know: numbers, but nobody's name."""
        found = self.status()
        states = [one["state"] for one in found["agents"]]
        return {
            **{key: found[key] for key in ("awaited_clients", "seconds_left", "accepted", "rejected")},
            "agents": {state: states.count(state) for state in ("ready", "joining", "refused", "gone")},
        }

    def status(self) -> dict[str, Any]:
        """Who is there, what is being done, who is awaited and why."""
        with self.changed:
            call = self.call
            awaited: Mapping[int, str] = dict(call.waiting) if call is not None else {}
            agents = [one.shown(one.agent in awaited.values()) for one in self.connections.values()]
            return {
                "stage": self.finished or (call.title if call is not None else self.stage),
                "awaited_clients": len(awaited),
                "seconds_left": round(max(call.deadline - time.monotonic(), 0.0), 1) if call is not None else None,
                "accepted": self.accepted,
                "rejected": self.rejected,
                "agents": sorted(agents, key=lambda one: str(one["name"])),
            }
