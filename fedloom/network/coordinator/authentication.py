"""Who may come in: every request of an agent is signed, and its body is the one that was signed."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel

from fedloom.network.coordinator.calls import Connection, Hub
from fedloom.network.protocol.identity import AGENT, BODY, Refused, Verifier

JSON_LIMIT = 16 << 20  # bytes
UNSIGNED_LIMIT = 16 << 10
Kind = TypeVar("Kind", bound=BaseModel)


class Denied(Exception):
    """A request that is answered with an error status and a code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Door:
    """Lets enrolled agents in, and the operator."""

    def __init__(self, hub: Hub, verifier: Verifier, operator: str = "") -> None:
        self.hub, self.verifier, self.operator = hub, verifier, operator

    def agent(self, request: Request) -> Connection:
        """The agent that made this request, if its signature says so; the body is compared when it is read."""
        headers = {name: value for name, value in request.headers.items() if name.startswith("fedloom-")}
        row = self.hub.ledger.agent(headers.get(AGENT, "")[:64])
        sent = [name for name, _ in request.headers.raw if name.startswith(b"fedloom-")]
        path, query = request.scope["raw_path"].decode("latin-1"), request.scope["query_string"].decode("latin-1")
        try:
            if len(sent) != len(headers):
                raise Refused("unsigned", "A header of the signature was sent twice.")
            if row is None:
                raise Refused("unknown", "This agent is not enrolled here.")
            if row["revoked"] is not None:
                raise Refused("revoked", "This agent was revoked.")
            self.verifier.check(row["key"], request.method, f"{path}?{query}" if query else path, headers)
        except Refused as why:
            if why.code not in ("session", "clock"):  # those mend themselves
                name = row["name"] if row else headers.get(AGENT, "")[:64] or "nobody"
                who = request.client.host if request.client else "somebody"
                self.hub.log("denied", f"a request from {who} as '{name}' was refused: {why.message}")
            raise Denied(401, why.code, why.message) from None
        return self.hub.seen(row["agent"], row["name"])

    def is_operator(self, request: Request) -> bool:
        """Whether the request carries the operator's token; a wrong one is refused."""
        given = request.headers.get("authorization")
        if given is None:
            return False
        try:
            digest = hashlib.sha256(bytes.fromhex(given.removeprefix("Bearer "))).hexdigest()
        except ValueError:
            digest = ""
        if not self.operator or not hmac.compare_digest(digest, self.operator):
            raise Denied(401, "token", "This is not the operator's token.")
        return True

    async def read(self, request: Request, kind: type[Kind]) -> Kind:
        """A signed request's JSON body, if it is what was signed and what it must be."""
        content = await _body(request, JSON_LIMIT)
        if hashlib.sha256(content).hexdigest() != request.headers.get(BODY):
            raise Denied(401, "body", "The body is not the one that was signed.")
        return _parsed(content, kind)

    async def read_unsigned(self, request: Request, kind: type[Kind]) -> Kind:
        """A JSON body of somebody who is not known yet, and may not say much."""
        return _parsed(await _body(request, UNSIGNED_LIMIT), kind)


async def _body(request: Request, limit: int) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > limit:
            raise Denied(413, "too-large", f"A JSON body may have {limit} bytes.")
    return bytes(content)


def _parsed(content: bytes, kind: type[Kind]) -> Kind:
    try:
        return kind.model_validate_json(content)
    except ValueError as error:
        raise Denied(422, "malformed", str(error)[:500]) from None


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """A JSON body for the OpenAPI description: it is read by `Door.read`, after its signature."""
    schema = kind.model_json_schema()
    content = {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, known: Mapping[str, Any]) -> Any:
    """A schema that needs no others: references would have to be in the description's own list of schemas."""
    if isinstance(schema, list):
        return [_inlined(one, known) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(known[schema["$ref"].rpartition("/")[2]], known)
    return {key: _inlined(value, known) for key, value in schema.items()}
