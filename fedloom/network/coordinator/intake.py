"""Takes in answers: each is read, checked, written to the disk, and only then counted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import ValidationError

from fedloom import faults
from fedloom.machine import cores
from fedloom.network.coordinator.agent_pool import AgentPool, Call
from fedloom.network.coordinator.ledger import AcceptedUpdate
from fedloom.network.coordinator.request_guard import RequestBody
from fedloom.network.protocol.messages import Answer, Assignment, ClientAnswer, Failure, read_answer, write_answer
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.tensors import WireError, open_parcel

MEMORY = 256 << 20  # bytes of answers that stay in memory until they are aggregated; others are mapped from their files
TENSORS_OF_CLIENT = 64  # of one client's measurements: scores and targets of every split
DESCRIPTION = 1 << 10  # bytes of JSON for each tensor, on average: its name and place, and its part of the message
NOT_AWAITED = ("late", "duplicate", "not-asked")  # rejections of answers that nothing waits for

Verdict = dict[str, str]


@dataclass
class ReceivedAnswer:
    """One client's answer: where it comes from, and what has become of it so far."""

    agent: str
    id: str  # of its assignment
    answer: ClientAnswer
    sha256: str  # of its body
    size: int  # bytes, its share of the body
    call: Call | None = None  # in which its client is reserved for this answer
    stored: AcceptedUpdate | None = None
    failure: Exception | None = None  # why it could not be stored
    why: Rejected | None = None

    @property
    def client(self) -> int:
        return self.answer.client


@contextmanager
def _malformed() -> Iterator[None]:
    """Reject a whole body that cannot be read."""
    try:
        yield
    except (WireError, ValidationError) as error:
        raise Rejected("malformed", str(error).splitlines()[0]) from None


@contextmanager
def _rejected_alone(one: ReceivedAnswer) -> Iterator[None]:
    """Reject one client's answer, unless it must be sent again."""
    try:
        yield
    except Rejected as why:
        if why.code == "busy":
            raise
        one.why = why


class Intake:
    """Answers arrive in parallel; those that arrive during a commit share the next one."""

    def __init__(self, pool: AgentPool) -> None:
        self.pool, self.ledger = pool, pool.ledger
        self._checking = ThreadPoolExecutor(max(cores(), 2), "check")  # more would compete for the processor
        self._writing = ThreadPoolExecutor(1, "commit")
        self._pending: deque[ReceivedAnswer] = deque()
        self._told: set[str] = set()  # agents that sent metrics which must not leave

    async def receive(self, agent: str, body: RequestBody) -> list[Verdict]:
        """Take in a whole body; return a verdict for each client."""
        loop = asyncio.get_running_loop()
        answers = await loop.run_in_executor(self._checking, self._read, agent, body)
        try:
            await loop.run_in_executor(self._checking, self._check, answers, body)
            if any(one.stored for one in answers):
                await loop.run_in_executor(self._writing, self._commit)
            return [self._count(one) for one in answers]
        finally:
            self._release(answers)

    def receive_now(self, agent: str, body: RequestBody) -> list[Verdict]:
        """Take in a whole body without an event loop."""
        answers = self._read(agent, body)
        try:
            self._check(answers, body)
            self._commit()
            return [self._count(one) for one in answers]
        finally:
            self._release(answers)

    # --- reading and checking, in a thread

    def _read(self, agent: str, body: RequestBody) -> list[ReceivedAnswer]:
        """Read what a body answers, without its tensors."""
        call, hello = self.pool.call, self.pool.agents[agent].hello
        assignment = call.assignments.get(agent) if call is not None else None
        clients = max(len(assignment.clients) if assignment is not None else 1, len(hello.clients) if hello else 1)
        tensors = self.pool.most_tensors + TENSORS_OF_CLIENT * clients
        with _malformed():
            header, names = body.description(DESCRIPTION * tensors)
            if len(names) > tensors:
                raise WireError(f"the answer may have {tensors} tensors, and has {len(names)}")
            sent = Answer.model_validate(header)
        if not 1 <= len(sent.results) <= clients:
            raise Rejected("malformed", f"the answer is about {len(sent.results)} clients, of at most {clients}")
        size = body.size // len(sent.results)
        return [ReceivedAnswer(agent, sent.ask, ClientAnswer(one.client), body.sha256, size) for one in sent.results]

    def _check(self, answers: list[ReceivedAnswer], body: RequestBody) -> None:
        """Check the answers that somebody waits for, and write them; the tensors of the others are not even read."""
        awaited: list[tuple[ReceivedAnswer, Call, Assignment]] = []
        for one in answers:
            with _rejected_alone(one), self.pool.changed:
                assignment = self._claim(one)
                if assignment is not None and one.call is not None:  # else the reply to the same body was lost
                    awaited.append((one, one.call, assignment))
        if not awaited:
            return
        with _malformed():
            found = read_answer(*body.content())[1]
        for one, call, assignment in awaited:
            with _rejected_alone(one):
                one.answer = found[one.client]
                if call.ledger_key is not None and len(answers) > 1:
                    raise Rejected("malformed", "an answer to this assignment must be about one client")
                if hidden := call.hides_metrics and one.answer.has_metrics:  # of an agent of an earlier version
                    one.answer = one.answer.without_metrics()
                    self._tell_of_metrics(one.agent)
                call.check(assignment, one.answer)
                self._store(one, call, body, hidden)
        self._pending.extend(one for one in answers if one.stored is not None)

    def _claim(self, one: ReceivedAnswer) -> Assignment | None:
        """Return the assignment that this answers if its client is awaited, and reserve the client for this answer."""
        call, client = self.pool.find(one.agent, one.id), one.client
        if call is None:
            raise Rejected("late", "the round is over, its deadline has passed, or it belongs to another attempt")
        assignment = call.assignments[one.agent]
        if client not in {asked.client for asked in assignment.clients}:
            raise Rejected("not-asked", f"this agent was not asked about client {client}")
        if client in call.answers:
            if call.hashes[client] == one.sha256:
                return None
            raise Rejected("duplicate", "another answer of this client was accepted")
        if client not in call.waiting:
            raise Rejected("duplicate", "an answer of this client was rejected: it has no second try in this round")
        if client in call.claimed:
            raise Rejected("busy", "Another answer of this client is being stored; try again.")
        call.claimed.add(client)
        one.call = call
        return assignment

    def _release(self, answers: list[ReceivedAnswer]) -> None:
        """Let other answers of the same clients in."""
        with self.pool.changed:
            for one in answers:
                if one.call is not None:
                    one.call.claimed.discard(one.client)

    def _store(self, one: ReceivedAnswer, call: Call, body: RequestBody, hidden: bool) -> None:
        """Write the body to the file where it stays until it is aggregated, if the call's answers are stored.

        If something of it must stay `hidden`, write what is left of the answer instead.
        """
        if call.ledger_key is None:
            return
        cell, round, number, digest = call.ledger_key
        file = f"{cell}-{round}-{number}-{one.client}-{one.sha256[:12]}.safetensors"
        faults.point("update.received")
        sha256 = one.sha256
        if hidden:
            left = write_answer(one.id, [one.answer])
            (self.ledger.updates / file).write_bytes(b"".join(left.pieces()))
            sha256 = left.sha256
        else:
            body.keep(self.ledger.updates / file)
        one.stored = AcceptedUpdate(cell, round, number, one.client, digest, file, sha256)
        with self.pool.changed:
            held = sum(open_call.in_memory for open_call in self.pool.open_calls)
            crowded = body.in_memory and held + body.size > MEMORY
            call.in_memory += body.size if body.in_memory and not crowded else 0
        if crowded:
            one.answer = read_answer(*open_parcel(self.ledger.updates / file))[1][one.client]

    def _tell_of_metrics(self, agent: str) -> None:
        """Tell the operator once that an agent sends what it should keep."""
        if agent not in self._told:
            self._told.add(agent)
            text = (
                "sent losses or metrics, which [privacy] does not let leave. They are not stored. Update fedloom there"
            )
            self.pool.log("agent", f"{self.pool.agents[agent].name} {text}", agent)

    def _commit(self) -> None:
        """Write everything that has arrived in one commit: a request that waits for its own may find it done."""
        batch = [self._pending.popleft() for _ in range(len(self._pending))]
        try:
            if batch:
                self.ledger.accept([one.stored for one in batch if one.stored is not None])
        except Exception as error:  # each answer's own request reports it
            for one in batch:
                one.failure = error

    # --- counting

    def _count(self, one: ReceivedAnswer) -> Verdict:
        """Count an answer that passed its check, if its call is still open; return the verdict."""
        if one.failure is not None:
            raise one.failure
        if one.why is None and one.call is not None:
            with self.pool.changed:
                if one.call.open and one.client in one.call.waiting:
                    one.call.accept(one.answer, one.sha256, one.size)
                    self.pool.accepted += 1
                    if one.call.complete:
                        self.pool.changed.notify_all()
                else:
                    one.why = Rejected("late", "the round ended before this answer was on the disk")
            if one.why is not None and one.stored is not None:
                self.ledger.drop(one.stored)
        if one.why is None:
            return {"client": str(one.client), "status": "accepted"}
        self._reject(one, one.why)
        return {"client": str(one.client), "status": "rejected", "code": one.why.code, "message": one.why.message}

    def _reject(self, one: ReceivedAnswer, why: Rejected) -> None:
        """Reject an answer. If it was awaited, its client is left out of the round."""
        message = f"{why.code}: {why.message}"
        with self.pool.changed:
            self.pool.rejected[why.code] += 1
            call = self.pool.find(one.agent, one.id)
            if call is not None and why.code not in NOT_AWAITED:
                failure = Failure(ask=one.id, clients=(one.client,), kind="refused", message=message)
                call.fail(one.agent, failure)
                self.pool.changed.notify_all()
        name = self.pool.agents[one.agent].name
        self.pool.log("rejected", f"{name}: the answer of client {one.client} was rejected ({message})", one.agent)
