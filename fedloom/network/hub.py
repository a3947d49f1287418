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

from pydantic import ValidationError

from fedloom import faults
from fedloom.errors import StoreError
from fedloom.network.checks import Rejected
from fedloom.network.ledger import Accepted, Ledger
from fedloom.network.messages import Ask, ClientAnswer, Failure, Hello, read_answer
from fedloom.network.wire import Parcel, WireError, open_parcel

BEAT = 3.0  # seconds between an agent's signs of life, unless the deadline is short
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
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    beat: float = BEAT

    def lost(self) -> bool:
        return time.monotonic() - self.seen > MISSED * self.beat


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
    open: bool = True

    def __post_init__(self) -> None:
        for agent, ask in self.asks.items():
            self.waiting.update({one.client: agent for one in ask.clients})


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
        self.connections: dict[str, Connection] = {}
        self.call: Call | None = None
        self.finished = ""  # what agents are told when there will be no more work
        self.stage = "waiting for agents"
        self.offer: dict[str, Any] = {}
        self.lasting: dict[str, Parcel] = {}  # initial weights
        self.largest = 64 << 20  # bytes of one answer
        self.accepted = 0
        self.rejected = 0
        self._pending: deque[Accepted] = deque()
        self._committing = threading.Lock()

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
        message = "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in message)  # others wrote it
        self.tell(message)
        with contextlib.suppress(StoreError):  # a full disk must not keep people from being told
            self.ledger.note(kind, message, agent)

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

    def wait(self, call: Call, needed: int, enough: int | None = None) -> None:
        """Until everybody answered or failed, the deadline passed, or those who are left cannot be expected back."""
        with self.changed:
            while call.waiting:
                now = time.monotonic()
                if now >= call.deadline or (enough is not None and len(call.answers) >= enough):
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
        with self.changed:
            call = self.call
            if call is None or not call.open or agent not in call.asks:
                return None
            left = tuple(one for one in call.asks[agent].clients if call.waiting.get(one.client) == agent)
            if not left:
                return None
            seconds = max(call.deadline - time.monotonic(), 0.0)
            return call.asks[agent].model_copy(update={"clients": left, "seconds": seconds}), call

    def receive(self, agent: str, path: Path, sha256: str, size: int) -> list[dict[str, str]]:
        """An answer that arrived in a file: what becomes of each client in it."""
        try:
            header, tensors = open_parcel(path)
            answer, clients = read_answer(header, tensors)
        except (WireError, ValidationError) as error:
            raise Rejected("malformed", str(error).splitlines()[0]) from None
        if not clients:
            raise Rejected("malformed", "the answer is about no client")
        found = [self._receive(agent, answer.ask, one, path, sha256, size, len(clients)) for one in clients.values()]
        path.unlink(missing_ok=True)
        return found

    def _receive(
        self, agent: str, ask_id: str, one: ClientAnswer, path: Path, sha256: str, size: int, together: int
    ) -> dict[str, str]:
        verdict = {"client": str(one.client), "status": "accepted"}
        try:
            with self.changed:
                call, ask = self._expecting(agent, ask_id, one.client, sha256)
            if call is None:  # the same body was accepted before, and the reply was lost
                return verdict
            if call.keep is not None and together != 1:
                raise Rejected("malformed", "an answer to this question is about one client")
            call.check(ask, one)
            update = None
            if call.keep is not None:
                update = self._keep(call, one.client, path, sha256)
            with self.changed:
                if not call.open or one.client not in call.waiting:
                    if update is not None:
                        self.ledger.drop(update)
                    raise Rejected("late", "the round was closed before this answer was on the disk")
                call.waiting.pop(one.client)
                call.answers[one.client] = one
                if update is not None:
                    call.kept[one.client] = update
                call.received[one.client] = size // together
                call.hashes[one.client] = sha256
                self.accepted += 1
                self.changed.notify_all()
        except Rejected as why:
            self._reject(agent, ask_id, one.client, why)
            return {"client": str(one.client), "status": "rejected", "code": why.code, "message": why.message}
        return verdict

    def _expecting(self, agent: str, ask_id: str, client: int, sha256: str) -> tuple[Call | None, Ask]:
        call = self.call
        if call is None or agent not in call.asks or call.asks[agent].id != ask_id:
            raise Rejected("late", "nobody waits for this answer: the round is over, or belongs to another attempt")
        ask = call.asks[agent]
        if client not in {one.client for one in ask.clients}:
            raise Rejected("not-asked", f"this agent was not asked about client {client}")
        if client in call.answers:
            if call.hashes[client] == sha256:
                return None, ask
            raise Rejected("duplicate", "another answer of this client was accepted")
        if client not in call.waiting:
            raise Rejected("duplicate", "an answer of this client was refused: it has no second try in this round")
        return call, ask

    def _reject(self, agent: str, ask_id: str, client: int, why: Rejected) -> None:
        name = self.connections[agent].name
        self.rejected += 1
        with self.changed:
            call = self.call
            mine = call is not None and agent in call.asks and call.asks[agent].id == ask_id
            if call is not None and mine and why.code not in ("late", "duplicate", "not-asked"):
                call.waiting.pop(client, None)
                call.failures[client] = Failure(
                    ask=ask_id, clients=(client,), kind="refused", message=f"{why.code}: {why.message}"
                )
                self.changed.notify_all()
        self.log("rejected", f"{name}: the answer of client {client} was rejected ({why.code}: {why.message})", agent)

    def _keep(self, call: Call, client: int, path: Path, sha256: str) -> Accepted:
        """Put an accepted answer on the disk; several that arrive at the same time share one commit."""
        assert call.keep is not None
        cell, round, number, digest = call.keep
        file = f"{cell}-{round}-{number}-{client}-{sha256[:12]}.safetensors"
        faults.point("update.received")
        path.replace(self.ledger.updates / file)
        update = Accepted(cell, round, number, client, digest, file, sha256)
        self._pending.append(update)
        with self._committing:
            batch = []
            while self._pending:
                batch.append(self._pending.popleft())
            try:
                if batch:
                    self.ledger.accept(batch)
            except StoreError:
                self._pending.extend(batch)  # those of other threads are not on the disk either: they find that out
                raise
        return update

    def fail(self, agent: str, failure: Failure) -> None:
        """An agent could not or would not do what it was asked."""
        connection = self.connections[agent]
        words = "refuses" if failure.kind == "refused" else "failed"
        self.log(failure.kind, f"{connection.name} {words}: {failure.message}", agent)
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

    def status(self) -> dict[str, Any]:
        """Who is there, what is being done, who is awaited and why."""
        with self.changed:
            call = self.call
            awaited: Mapping[int, str] = dict(call.waiting) if call is not None else {}
            agents = []
            for one in self.connections.values():
                state = "gone" if one.lost() or not one.beating else "ready" if one.hello else "refused"
                state = "joining" if state == "refused" and not one.refused else state
                agents.append(
                    {
                        "name": one.name,
                        "state": state,
                        "doing": one.doing,
                        "clients": len(one.hello.clients) if one.hello else 0,
                        "seconds_since_seen": round(time.monotonic() - one.seen, 1),
                        "awaited": one.agent in awaited.values(),
                        "why": one.refused,
                    }
                )
            return {
                "stage": self.finished or (call.title if call is not None else self.stage),
                "awaited_clients": len(awaited),
                "seconds_left": round(max(call.deadline - time.monotonic(), 0.0), 1) if call is not None else None,
                "accepted": self.accepted,
                "rejected": self.rejected,
                "agents": sorted(agents, key=lambda one: str(one["name"])),
            }
