"""Authenticates requests: an agent's request is signed, and its body must be the one that was signed."""

from __future__ import annotations

import hashlib
import hmac
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel

from fedloom.network.coordinator.agent_pool import AgentPool, ConnectedAgent
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.signatures import AGENT, BODY, Verifier

JSON_LIMIT = 16 << 20  # bytes
UNSIGNED_LIMIT = 16 << 10
Kind = TypeVar("Kind", bound=BaseModel)


class Authenticator:
    """Recognises enrolled agents and the operator; `operator` is the hash of the operator's token."""

    def __init__(self, pool: AgentPool, verifier: Verifier, operator: str = "") -> None:
        self.pool, self.verifier, self.operator = pool, verifier, operator

    def agent(self, request: Request) -> ConnectedAgent:
        """Return the agent that signed this request. `read` compares the body."""
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
        except Rejected as why:
            if why.code not in ("session", "clock"):  # the agent corrects those by itself
                name = row["name"] if row else headers.get(AGENT, "")[:64] or "nobody"
                host = request.client.host if request.client else "an unknown address"
                self.pool.log("denied", f"a request from {host} as '{name}' was rejected: {why.message}")
            raise
        return self.pool.mark_seen(row["agent"], row["name"])

    def is_operator(self, request: Request) -> bool:
        """Return whether the request carries the operator's token; reject a wrong one."""
        given = request.headers.get("authorization")
        if given is None:
            return False
        try:
            digest = hashlib.sha256(bytes.fromhex(given.removeprefix("Bearer "))).hexdigest()
        except ValueError:
            digest = ""
        if not self.operator or not hmac.compare_digest(digest, self.operator):
            raise Rejected("token", "This is not the operator's token.")
        return True

    async def read(self, request: Request, kind: type[Kind]) -> Kind:
        """Read a signed JSON body."""
        content = await _body(request, JSON_LIMIT)
        if hashlib.sha256(content).hexdigest() != request.headers.get(BODY):
            raise Rejected("body", "The body is not the one that was signed.")
        return _parsed(content, kind)

    async def read_unsigned(self, request: Request, kind: type[Kind]) -> Kind:
        """Read a JSON body of an agent that is not enrolled yet; it must be short."""
        return _parsed(await _body(request, UNSIGNED_LIMIT), kind)


async def _body(request: Request, limit: int) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > limit:
            raise Rejected("too-large", f"A JSON body may have {limit} bytes.")
    return bytes(content)


def _parsed(content: bytes, kind: type[Kind]) -> Kind:
    try:
        return kind.model_validate_json(content)
    except ValueError as error:
        raise Rejected("malformed", str(error)[:500]) from None
