"""The guard that every request passes: its size is bounded, its sender is authenticated, and its body is read.

An agent's request is signed, and its body must be the one that was signed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel

from fedloom.network.coordinator.agent_pool import AgentPool
from fedloom.network.coordinator.connected_agent import ConnectedAgent
from fedloom.network.coordinator.connections import one_address
from fedloom.network.protocol.messages import Hello
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.signatures import AGENT, BODY, PROCESS, Verifier
from fedloom.network.protocol.tensors import (
    CompressionError,
    ParcelContent,
    decompress_into,
    open_parcel,
    read_description,
    read_parcel,
)

HELLO_LIMIT = 16 << 20  # bytes of the message that lists an agent's clients
JSON_LIMIT = 2 << 20  # of any other signed message
UNSIGNED_LIMIT = 16 << 10
BODIES = 4  # messages of one agent that are received at the same time: it sends two
SILENCE, GRACE, RATE = 30.0, 10.0, 1000.0  # how long a body may pause; after GRACE seconds it must average RATE bytes/s
GUESSES, ALL_GUESSES, GUESS_WINDOW = 10, 200, 60.0  # wrong tokens from one address, and in all, within these seconds
SMALL = 1 << 20  # bytes: up to this, a body stays in memory
Kind = TypeVar("Kind", bound=BaseModel)


class Guesses:
    """The wrong tokens of the last minute. An address that guesses too often must wait.

    When many addresses guess, each has one try, so that an agent elsewhere can still enrol.
    """

    def __init__(self) -> None:
        self._wrong: deque[tuple[float, str]] = deque(maxlen=10 * ALL_GUESSES)

    def check(self, request: Request) -> None:
        """Raise `Rejected` if too many wrong tokens came from this request's address."""
        now = time.monotonic()
        while self._wrong and self._wrong[0][0] <= now - GUESS_WINDOW:
            self._wrong.popleft()
        address, most = _address(request), GUESSES if len(self._wrong) < ALL_GUESSES else 1
        times = [when for when, guesser in self._wrong if guesser == address]
        if len(times) >= most:
            seconds = math.ceil(times[-most] + GUESS_WINDOW - now)
            raise Rejected("guesses", f"Too many wrong tokens came from this address. Try again in {seconds} s.")

    def add(self, request: Request) -> None:
        """Note that a request had a wrong token."""
        self._wrong.append((time.monotonic(), _address(request)))


class RequestGuard:
    """Recognises enrolled agents and the operator, and reads bodies; `operator` is the hash of the operator's token."""

    def __init__(self, pool: AgentPool, verifier: Verifier, operator: str = "") -> None:
        self.pool, self.verifier, self.operator = pool, verifier, operator
        self.guesses = Guesses()
        self._receiving: Counter[str] = Counter()  # messages that are on their way in, by agent

    async def agent(self, request: Request) -> ConnectedAgent:
        """Return the agent that signed this request. The functions that read a body compare it with the signature."""
        headers = {name: value for name, value in request.headers.items() if name.startswith("fedloom-")}
        row = self.pool.ledger.agent(headers.get(AGENT, "")[:64])
        sent = [name for name, _ in request.headers.raw if name.startswith(b"fedloom-")]
        path, query = request.scope["raw_path"].decode("latin-1"), request.scope["query_string"].decode("latin-1")
        try:
            if len(sent) != len(headers):
                raise Rejected("unsigned", "A header of the signature was sent twice.")
            if row is None:
                raise Rejected("unknown", "This agent is not enrolled here.")
            if row["revoked"] is not None:
                raise Rejected("revoked", "This agent was revoked.")
            self.verifier.check(row["key"], request.method, f"{path}?{query}" if query else path, headers)
            one = self.pool.mark_seen(row["agent"], row["name"], process=headers.get(PROCESS, "")[:64])
        except Rejected as why:
            if why.code not in ("session", "clock"):  # the agent corrects those by itself
                name = row["name"] if row else headers.get(AGENT, "")[:64] or "nobody"
                self.pool.log("denied", f"a request from {_address(request)} as '{name}' was rejected: {why.message}")
            raise
        if "recognise" in request.scope:
            request.scope["recognise"](row["agent"])
        return one

    def is_operator(self, request: Request) -> bool:
        """Return whether the request carries the operator's token; reject a wrong one."""
        given = request.headers.get("authorization")
        if given is None:
            return False
        try:
            digest = hashlib.sha256(bytes.fromhex(given.removeprefix("Bearer "))).hexdigest()
        except ValueError:
            digest = "none"
        self._check_token(request, digest, "This is not the operator's token.")
        return True

    def check_reader(self, request: Request) -> None:
        """Reject a request for metrics without the token for them, which is the hash of the operator's."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        message = "Metrics need the content of the run's network/metrics.token as a bearer token."
        self._check_token(request, given, message)

    def _check_token(self, request: Request, given: str, message: str) -> None:
        """Compare a hash with that of the operator's token in constant time; a wrong one counts as a guess."""
        self.guesses.check(request)
        if not self.operator or not hmac.compare_digest(given.encode(), self.operator.encode()):
            if given:
                self.guesses.add(request)
            raise Rejected("token", message)

    @contextmanager
    def receiving(self, agent: str) -> Iterator[None]:
        """Bound how many messages of one agent are received at the same time, and so the memory that they take."""
        if self._receiving[agent] >= BODIES:
            raise Rejected("busy", "Other messages of this agent are being received; try again.")
        self._receiving[agent] += 1
        try:
            yield
        finally:
            self._receiving[agent] -= 1

    def signed(self, kind: type[Kind]) -> Callable[..., Awaitable[Kind]]:
        """Return a dependency that reads an agent's JSON message, after its signature was verified."""

        async def read(request: Request, agent: ConnectedAgent = Depends(self.agent)) -> Kind:
            with self.receiving(agent.agent):
                limit = HELLO_LIMIT if kind is Hello else JSON_LIMIT
                return await _message(request, kind, limit, request.headers.get(BODY, ""))

        return read

    def unsigned(self, kind: type[Kind]) -> Callable[..., Awaitable[Kind]]:
        """Return a dependency that reads a JSON message of an agent that is not enrolled yet; it must be short."""

        async def read(request: Request) -> Kind:
            self.guesses.check(request)
            return await _message(request, kind, UNSIGNED_LIMIT)

        return read

    def answer(self, request: Request) -> RequestBody:
        """Return where the body of an answer goes."""
        encoding = request.headers.get("content-encoding", "")
        if encoding not in ("", "identity", "zstd"):
            raise Rejected("encoding", "A body may be compressed with zstd, or not at all.")
        return RequestBody(self.pool.ledger.updates, self.pool.largest, encoding, request.headers.get(BODY))


def _address(request: Request) -> str:
    return one_address(request.client.host) if request.client else "an unknown address"


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the pieces of a body. Reject one that is sent too slowly to be worth a connection."""
    stream, waited, received = aiter(request.stream()), 0.0, 0
    while True:
        began = time.monotonic()
        try:
            piece = await asyncio.wait_for(anext(stream), SILENCE)
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            raise Rejected("slow", f"Nothing of the body came for {SILENCE:g} s.") from None
        waited += time.monotonic() - began  # not the time that we take for a piece
        received += len(piece)
        if waited > GRACE and received < RATE * waited:
            raise Rejected("slow", f"A body must come at {RATE:g} bytes a second or more.")
        yield piece


async def _message(request: Request, kind: type[Kind], limit: int, sha256: str | None = None) -> Kind:
    """Read a JSON body, whose SHA-256 must be the one that was signed."""
    content = bytearray()
    async for piece in _pieces(request):
        content += piece
        if len(content) > limit:
            raise Rejected("too-large", f"A JSON body may have {limit} bytes.")
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise Rejected("body", "The body is not the one that was signed.")
    try:
        if len(content) <= UNSIGNED_LIMIT:
            return kind.model_validate_json(content)
        return await run_in_threadpool(kind.model_validate_json, content)  # without holding up other requests
    except ValueError as error:
        raise Rejected("malformed", str(error)[:500]) from None


class RequestBody:
    """The body of an answer on its way in, decompressed and measured piece by piece; a large one goes to a file.

    `signed` is the SHA-256 that was signed.
    """

    def __init__(self, folder: Path, limit: int, encoding: str = "", signed: str | None = None) -> None:
        self.path, self.limit, self.signed = folder / f"{secrets.token_hex(8)}.part", limit, signed
        self.size, self.sha256 = 0, ""
        self._pieces: list[bytes] = []
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._is_compressed = encoding == "zstd"
        self._receive = decompress_into(self._take) if self._is_compressed else self._take

    @property
    def in_memory(self) -> bool:
        return self._file is None

    async def receive(self, request: Request) -> None:
        """Add everything that a request sends, without holding up other requests."""
        async for piece in _pieces(request):
            if self.in_memory and not self._is_compressed:
                self.add(piece)
            else:
                await run_in_threadpool(self.add, piece)

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
            self._file = open(self.path, "wb")  # noqa: SIM115 (closed by description or discard)
            piece, self._pieces = b"".join([*self._pieces, piece]), []
        if self._file is None:
            self._pieces.append(bytes(piece))
        else:
            self._digest.update(piece)
            self._file.write(piece)

    def description(self, limit: int) -> tuple[dict[str, Any], list[str]]:
        """Return the header and the names of the tensors, if the whole body is the one that was signed."""
        if self._file is not None:
            self._file.close()
        else:
            self._pieces = [b"".join(self._pieces)]
            self._digest.update(self._pieces[0])
        self.sha256 = self._digest.hexdigest()
        if self.sha256 != self.signed:
            raise Rejected("body", "The body is not the one that was signed.")
        with io.BytesIO(self._pieces[0]) if self.in_memory else open(self.path, "rb") as file:
            return read_description(file, limit)

    def content(self) -> ParcelContent:
        """Read everything, after the description."""
        return read_parcel(self._pieces[0]) if self.in_memory else open_parcel(self.path)

    def keep(self, path: Path) -> None:
        """Put the body into a file that stays."""
        if self.in_memory:
            path.write_bytes(self._pieces[0])
        else:
            self.path.replace(path)

    def discard(self) -> None:
        """Delete what has not been kept."""
        self._receive = self._take  # a decompressor that refers to this object would never be freed
        if self._file is not None:
            self._file.close()
            self.path.unlink(missing_ok=True)
