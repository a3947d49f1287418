"""Takes in answers: each is read, checked, written to the disk, and only then counted."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from fedloom import faults
from fedloom.machine import cores
from fedloom.network.coordinator.agent_pool import AgentPool, Call
from fedloom.network.coordinator.ledger import AcceptedUpdate
from fedloom.network.protocol.messages import Assignment, ClientAnswer, Failure, read_answer
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.tensors import (
    CompressionError,
    ParcelContent,
    WireError,
    decompress_into,
    open_parcel,
    read_parcel,
)

SMALL = 1 << 20  # bytes: up to this, a body stays in memory
MEMORY = 256 << 20  # bytes of answers that stay in memory until they are aggregated; others are mapped from their files

Verdict = dict[str, str]


class RequestBody:
    """The body of an answer on its way in, decompressed and measured piece by piece; a large one goes to `path`."""

    def __init__(self, path: Path, limit: int, encoding: str = "") -> None:
        self.path, self.limit, self.size = path, limit, 0
        self._pieces: list[bytes] = []
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._receive = decompress_into(self._take) if encoding == "zstd" else self._take

    @property
    def in_memory(self) -> bool:
        return self._file is None

    def add(self, piece: bytes) -> None:
        """Add the next bytes, as they were sent. Raise `Rejected` as soon as there are too many."""
        try:
            self._receive(piece)
        except CompressionError:
            raise Rejected("malformed", "the body is not valid zstd data") from None

    def _take(self, piece: bytes) -> None:
        self.size += len(piece)
        if self.size > self.limit:
            raise Rejected("too-large", f"An answer may have {self.limit} bytes.")
        if self._file is None and self.size > SMALL:
            self._file = open(self.path, "wb")  # noqa: SIM115 (closed by finish or discard)
            for earlier in self._pieces:
                self._write(earlier)
            self._pieces = []
        if self._file is None:
            self._pieces.append(bytes(piece))
        else:
            self._write(piece)

    def _write(self, piece: bytes) -> None:
        assert self._file is not None
        self._digest.update(piece)
        self._file.write(piece)

    def finish(self) -> str:
        """Return the SHA-256 of the whole body."""
        if self._file is not None:
            self._file.close()
        else:
            self._pieces = [b"".join(self._pieces)]
            self._digest.update(self._pieces[0])
        return self._digest.hexdigest()

    def open(self) -> ParcelContent:
        """Read the body as a parcel."""
        return read_parcel(self._pieces[0]) if self.in_memory else open_parcel(self.path)

    def keep(self, path: Path) -> None:
        """Put the body into a file that stays."""
        if self.in_memory:
            path.write_bytes(self._pieces[0])
        else:
            self.path.replace(path)

    def discard(self) -> None:
        """Delete what has not been kept."""
        if self._file is not None:
            self._file.close()
            self.path.unlink(missing_ok=True)


@dataclass
class CheckedAnswer:
    """One client's answer after its check: the call it belongs to, where it was stored, or why it was rejected."""

    client: int
    call: Call | None = None
    answer: ClientAnswer | None = None
    stored: AcceptedUpdate | None = None
    why: Rejected | None = None


@dataclass
class CheckedBody:
    """A whole body after its check: the id of its assignment, its SHA-256, its size for each client, its answers."""

    id: str
    sha256: str
    size: int
    answers: list[CheckedAnswer]

    @property
    def updates(self) -> list[AcceptedUpdate]:
        return [one.stored for one in self.answers if one.stored is not None]


class Intake:
    """Answers arrive in parallel; those that arrive during a commit share the next one."""

    def __init__(self, pool: AgentPool) -> None:
        self.pool, self.ledger = pool, pool.ledger
        self._checking = ThreadPoolExecutor(max(cores(), 2), "check")  # more would compete for the processor
        self._writing = ThreadPoolExecutor(1, "commit")
        self._pending: list[tuple[AcceptedUpdate, asyncio.Future[None]]] = []
        self._committer: asyncio.Task[None] | None = None

    async def receive(self, agent: str, body: RequestBody, expected: str | None) -> list[Verdict]:
        """Take in a whole body; return a verdict for each client. `expected` is the SHA-256 that was signed."""
        loop = asyncio.get_running_loop()
        checked = await loop.run_in_executor(self._checking, self._check, agent, body, expected)
        try:
            await asyncio.gather(*(self._commit(update) for update in checked.updates))
            return self._count_all(agent, checked)
        finally:
            self._release(checked.answers)

    def receive_now(self, agent: str, body: RequestBody, expected: str | None) -> list[Verdict]:
        """Take in a whole body without an event loop."""
        checked = self._check(agent, body, expected)
        try:
            if checked.updates:
                self.ledger.accept(checked.updates)
            return self._count_all(agent, checked)
        finally:
            self._release(checked.answers)

    # --- reading and checking, in a thread

    def _check(self, agent: str, body: RequestBody, expected: str | None) -> CheckedBody:
        sha256 = body.finish()
        if sha256 != expected:
            raise Rejected("body", "The body is not the one that was signed.")
        try:
            header, clients = read_answer(*body.open())
        except (WireError, ValidationError) as error:
            raise Rejected("malformed", str(error).splitlines()[0]) from None
        if not clients:
            raise Rejected("malformed", "the answer has no client")
        checked = CheckedBody(header.ask, sha256, body.size // len(clients), [])
        try:
            for one in clients.values():
                checked.answers.append(CheckedAnswer(one.client))
                self._check_one(checked.answers[-1], agent, checked, one, body, alone=len(clients) == 1)
        except BaseException:
            self._release(checked.answers)
            raise
        return checked

    def _check_one(
        self, checked: CheckedAnswer, agent: str, whole: CheckedBody, one: ClientAnswer, body: RequestBody, alone: bool
    ) -> None:
        try:
            with self.pool.changed:
                assignment = self._claim(checked, agent, whole)
            if assignment is None:  # the same body was accepted before, and the reply was lost
                return
            call = checked.call
            assert call is not None
            if call.ledger_key is not None and not alone:
                raise Rejected("malformed", "an answer to this assignment must be about one client")
            call.check(assignment, one)
            checked.answer = one
            if call.ledger_key is not None:
                checked.stored, checked.answer = self._store(call, one, body, whole.sha256)
        except Rejected as why:
            if why.code == "busy":
                raise
            checked.why = why

    def _claim(self, checked: CheckedAnswer, agent: str, whole: CheckedBody) -> Assignment | None:
        """Return the assignment that this answers if its client is awaited, and reserve the client for this answer."""
        call, client = self.pool.call, checked.client
        assignment = call.assignment(agent, whole.id) if call is not None else None
        if call is None or assignment is None:
            raise Rejected("late", "the round is over, or belongs to another attempt")
        if client not in {one.client for one in assignment.clients}:
            raise Rejected("not-asked", f"this agent was not asked about client {client}")
        if client in call.answers:
            if call.hashes[client] == whole.sha256:
                return None
            raise Rejected("duplicate", "another answer of this client was accepted")
        if client not in call.waiting:
            raise Rejected("duplicate", "an answer of this client was rejected: it has no second try in this round")
        if client in call.claimed:
            raise Rejected("busy", "Another answer of this client is being stored; try again.")
        call.claimed.add(client)
        checked.call = call
        return assignment

    def _release(self, answers: list[CheckedAnswer]) -> None:
        with self.pool.changed:
            for one in answers:
                if one.call is not None:
                    one.call.claimed.discard(one.client)

    def _store(
        self, call: Call, one: ClientAnswer, body: RequestBody, sha256: str
    ) -> tuple[AcceptedUpdate, ClientAnswer]:
        """Write the body to the file where it stays until it is aggregated."""
        assert call.ledger_key is not None
        cell, round, number, digest = call.ledger_key
        file = f"{cell}-{round}-{number}-{one.client}-{sha256[:12]}.safetensors"
        faults.point("update.received")
        body.keep(self.ledger.updates / file)
        update = AcceptedUpdate(cell, round, number, one.client, digest, file, sha256)
        with self.pool.changed:
            crowded = body.in_memory and call.in_memory + body.size > MEMORY
            call.in_memory += body.size if body.in_memory and not crowded else 0
        if crowded:
            _, answers = read_answer(*open_parcel(self.ledger.updates / file))
            one = answers[one.client]
        return update, one

    # --- one commit for all that have arrived

    async def _commit(self, update: AcceptedUpdate) -> None:
        """Wait until an update is on the disk."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._pending.append((update, done))
        if self._committer is None or self._committer.done():
            self._committer = loop.create_task(self._commit_all())  # a task, so that no request waits for later ones
        await done

    async def _commit_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            batch, self._pending = self._pending, []
            error: Exception | None = None
            try:
                await loop.run_in_executor(self._writing, self.ledger.accept, [one for one, _ in batch])
            except Exception as failed:  # each answer's own request reports it
                error = failed
            for _, future in batch:
                if not future.done():
                    future.set_exception(error) if error is not None else future.set_result(None)

    # --- counting

    def _count_all(self, agent: str, checked: CheckedBody) -> list[Verdict]:
        return [self._count(agent, checked, one) for one in checked.answers]

    def _count(self, agent: str, checked: CheckedBody, one: CheckedAnswer) -> Verdict:
        call = one.call
        if one.why is None and call is not None and one.answer is not None:
            with self.pool.changed:
                if call.open and one.client in call.waiting:
                    call.accept(one.client, one.answer, checked.sha256, checked.size)
                    self.pool.accepted += 1
                    if call.complete:
                        self.pool.changed.notify_all()
                else:
                    one.why = Rejected("late", "the round ended before this answer was on the disk")
            if one.why is not None and one.stored is not None:
                self.ledger.drop(one.stored)
        if one.why is None:
            return {"client": str(one.client), "status": "accepted"}
        self._reject(agent, checked.id, one.client, one.why)
        return {"client": str(one.client), "status": "rejected", "code": one.why.code, "message": one.why.message}

    def _reject(self, agent: str, id: str, client: int, why: Rejected) -> None:
        """Reject an answer: a bad one costs its client the round, one that is not awaited costs nothing."""
        message = f"{why.code}: {why.message}"
        with self.pool.changed:
            self.pool.rejected += 1
            call = self.pool.call
            expected = why.code not in ("late", "duplicate", "not-asked")
            if expected and call is not None and call.assignment(agent, id) is not None:
                call.waiting.pop(client, None)
                call.failures[client] = Failure(ask=id, clients=(client,), kind="refused", message=message)
                self.pool.changed.notify_all()
        name = self.pool.agents[agent].name
        self.pool.log("rejected", f"{name}: the answer of client {client} was rejected ({message})", agent)
