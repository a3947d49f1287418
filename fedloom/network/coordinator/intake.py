"""What becomes of an answer: it is read, checked, put on the disk, and only then counted."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pydantic import ValidationError

from fedloom import faults
from fedloom.machine import cores
from fedloom.network.coordinator.calls import Call, Hub
from fedloom.network.coordinator.ledger import Accepted
from fedloom.network.coordinator.request_body import Body
from fedloom.network.coordinator.update_checks import Rejected
from fedloom.network.protocol.messages import Ask, ClientAnswer, Failure, read_answer
from fedloom.network.protocol.tensors import WireError, open_parcel

MEMORY = (
    256 << 20
)  # bytes of answers that are kept in memory until they are added up; others are mapped from their files

Verdict = dict[str, str]


class Busy(Exception):
    """The same client's answer is being taken in at this moment."""


class Forged(Exception):
    """A body that is not the one that was signed."""


@dataclass
class Judged:
    """One client's answer, once it was looked at."""

    client: int
    call: Call | None = None
    answer: ClientAnswer | None = None
    kept: Accepted | None = None
    why: Rejected | None = None


class Intake:
    """Answers come in side by side; those that arrive while others are being committed share the next commit."""

    def __init__(self, hub: Hub) -> None:
        self.hub, self.ledger = hub, hub.ledger
        self._checking = ThreadPoolExecutor(
            max(cores(), 2), "check"
        )  # more would only take the processor from each other
        self._writing = ThreadPoolExecutor(1, "commit")
        self._pending: list[tuple[Accepted, asyncio.Future[None]]] = []
        self._committer: asyncio.Task[None] | None = None

    async def receive(self, agent: str, body: Body, expected: str | None) -> list[Verdict]:
        """A whole body: what becomes of each client in it. `expected` is the SHA-256 that was signed."""
        loop = asyncio.get_running_loop()
        sha256, ask_id, judged = await loop.run_in_executor(self._checking, self._judge, agent, body, expected)
        try:
            await asyncio.gather(*(self._commit(one.kept) for one in judged if one.kept is not None))
            return [self._settle(agent, ask_id, one, sha256, body.size // len(judged)) for one in judged]
        finally:
            self._release(judged)

    def receive_now(self, agent: str, body: Body, expected: str | None) -> list[Verdict]:
        """The same without an event loop, one after another."""
        sha256, ask_id, judged = self._judge(agent, body, expected)
        try:
            if kept := [one.kept for one in judged if one.kept is not None]:
                self.ledger.accept(kept)
            return [self._settle(agent, ask_id, one, sha256, body.size // len(judged)) for one in judged]
        finally:
            self._release(judged)

    # --- reading and checking, in a thread

    def _judge(self, agent: str, body: Body, expected: str | None) -> tuple[str, str, list[Judged]]:
        sha256 = body.finish()
        if sha256 != expected:
            raise Forged("The body is not the one that was signed.")
        try:
            header, tensors = body.open()
            answer, clients = read_answer(header, tensors)
        except (WireError, ValidationError) as error:
            raise Rejected("malformed", str(error).splitlines()[0]) from None
        if not clients:
            raise Rejected("malformed", "the answer is about no client")
        judged: list[Judged] = []
        try:
            for one in clients.values():
                judged.append(Judged(one.client))
                self._judge_one(judged[-1], agent, answer.ask, one, body, sha256, len(clients))
        except BaseException:
            self._release(judged)
            raise
        return sha256, answer.ask, judged

    def _judge_one(
        self, judged: Judged, agent: str, ask_id: str, one: ClientAnswer, body: Body, sha256: str, together: int
    ) -> None:
        try:
            with self.hub.changed:
                ask = self._claim(judged, agent, ask_id, sha256)
            if ask is None:  # the same body was accepted before, and the reply was lost
                return
            call = judged.call
            assert call is not None
            if call.keep is not None and together != 1:
                raise Rejected("malformed", "an answer to this question is about one client")
            call.check(ask, one)
            judged.answer = one
            if call.keep is not None:
                judged.kept, judged.answer = self._write(call, one, body, sha256)
        except Rejected as why:
            judged.why = why

    def _claim(self, judged: Judged, agent: str, ask_id: str, sha256: str) -> Ask | None:
        """The ask that this answers, if its client is awaited; from now on nobody else answers for it."""
        call, client = self.hub.call, judged.client
        if call is None or agent not in call.asks or call.asks[agent].id != ask_id:
            raise Rejected("late", "nobody waits for this answer: the round is over, or belongs to another attempt")
        ask = call.asks[agent]
        if client not in {one.client for one in ask.clients}:
            raise Rejected("not-asked", f"this agent was not asked about client {client}")
        if client in call.answers:
            if call.hashes[client] == sha256:
                return None
            raise Rejected("duplicate", "another answer of this client was accepted")
        if client not in call.waiting:
            raise Rejected("duplicate", "an answer of this client was refused: it has no second try in this round")
        if client in call.claimed:
            raise Busy
        call.claimed.add(client)
        judged.call = call
        return ask

    def _release(self, judged: list[Judged]) -> None:
        with self.hub.changed:
            for one in judged:
                if one.call is not None:
                    one.call.claimed.discard(one.client)

    def _write(self, call: Call, one: ClientAnswer, body: Body, sha256: str) -> tuple[Accepted, ClientAnswer]:
        """Put the body where it stays until it is added up."""
        assert call.keep is not None
        cell, round, number, digest = call.keep
        file = f"{cell}-{round}-{number}-{one.client}-{sha256[:12]}.safetensors"
        faults.point("update.received")
        body.keep(self.ledger.updates / file)
        update = Accepted(cell, round, number, one.client, digest, file, sha256)
        with self.hub.changed:
            crowded = body.in_memory and call.in_memory + body.size > MEMORY
            call.in_memory += body.size if body.in_memory and not crowded else 0
        return update, self.reopen(update) if crowded else one

    def reopen(self, update: Accepted) -> ClientAnswer:
        """An accepted answer, from its file."""
        _, found = read_answer(*open_parcel(self.ledger.updates / update.file))
        return found[update.client]

    # --- one commit for all that have arrived

    async def _commit(self, update: Accepted) -> None:
        """Wait until an update is on the disk."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._pending.append((update, done))
        if self._committer is None or self._committer.done():
            self._committer = loop.create_task(self._commit_all())  # of its own: whoever began it need not wait for all
        await done

    async def _commit_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            batch, self._pending = self._pending, []
            error: Exception | None = None
            try:
                await loop.run_in_executor(self._writing, self.ledger.accept, [one for one, _ in batch])
            except Exception as failed:  # each answer's own request says so
                error = failed
            for _, future in batch:
                if not future.done():
                    future.set_exception(error) if error is not None else future.set_result(None)

    # --- counting

    def _settle(self, agent: str, ask_id: str, one: Judged, sha256: str, size: int) -> Verdict:
        call = one.call
        if one.why is None and call is not None and one.answer is not None:
            with self.hub.changed:
                if call.open and one.client in call.waiting:
                    call.accept(one.client, one.answer, one.kept, sha256, size)
                    self.hub.accepted += 1
                    if call.complete:
                        self.hub.changed.notify_all()
                else:
                    one.why = Rejected("late", "the round was closed before this answer was on the disk")
            if one.why is not None and one.kept is not None:
                self.ledger.drop(one.kept)
        if one.why is None:
            return {"client": str(one.client), "status": "accepted"}
        self._reject(agent, ask_id, one.client, one.why)
        return {"client": str(one.client), "status": "rejected", "code": one.why.code, "message": one.why.message}

    def _reject(self, agent: str, ask_id: str, client: int, why: Rejected) -> None:
        """A bad answer costs its client the round; one that nobody waits for costs nothing."""
        name = self.hub.connections[agent].name
        with self.hub.changed:
            self.hub.rejected += 1
            call = self.hub.call
            mine = call is not None and agent in call.asks and call.asks[agent].id == ask_id
            if call is not None and mine and why.code not in ("late", "duplicate", "not-asked"):
                call.waiting.pop(client, None)
                message = f"{why.code}: {why.message}"
                call.failures[client] = Failure(ask=ask_id, clients=(client,), kind="refused", message=message)
                self.hub.changed.notify_all()
        self.hub.log(
            "rejected", f"{name}: the answer of client {client} was rejected ({why.code}: {why.message})", agent
        )
