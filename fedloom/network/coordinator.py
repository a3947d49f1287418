"""The coordinator's one HTTPS port: FastAPI, signed requests, long polls, tensors in and out."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse

from fedloom import __version__, faults
from fedloom.errors import FedloomError, InputError
from fedloom.network.checks import Rejected
from fedloom.network.hub import Connection, Hub
from fedloom.network.identity import AGENT, BODY, Refused, Verifier
from fedloom.network.messages import Beat, Enrolment, Failure, Hello
from fedloom.network.wire import PROTOCOL, Parcel

POLL = 20.0  # seconds that an agent's question for work stays open
WHOLE = 8 << 20  # parcels up to this size are sent in one piece
JSON_LIMIT = 16 << 20
BINARY = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}


class Denied(Exception):
    """A request that is answered with an error status and a code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def make_app(hub: Hub, authority: bytes = b"", verifier: Verifier | None = None) -> FastAPI:
    """The coordinator's application; `authority` is the certificate that agents pin."""
    verifier = verifier or Verifier()
    app = FastAPI(title="fedloom coordinator", version=str(PROTOCOL), docs_url=None, redoc_url=None)

    def denied(status: int, code: str, message: str) -> JSONResponse:
        content = {"code": code, "message": message, "time": faults.clock(), "session": verifier.session}
        return JSONResponse(content, status_code=status)

    @app.exception_handler(Denied)
    async def _denied(request: Request, why: Denied) -> JSONResponse:
        return denied(why.status, why.code, why.message)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return denied(422, "malformed", f"{place}: {first['msg']}")

    def identify(request: Request) -> Connection:
        """The agent that made this request, if its signature says so; the body is compared when it is read."""
        headers = {name: request.headers[name] for name in request.headers if name.startswith("fedloom-")}
        row = hub.ledger.agent(headers.get(AGENT, "")[:64])
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        who = request.client.host if request.client else "somebody"
        try:
            if row is None:
                raise Refused("unknown", "This agent is not enrolled here.")
            if row["revoked"] is not None:
                raise Refused("revoked", "This agent was revoked.")
            verifier.check(row["key"], request.method, path, headers)
        except Refused as why:
            if why.code not in ("session", "clock"):  # those mend themselves
                name = row["name"] if row else headers.get(AGENT, "")[:64] or "nobody"
                hub.log("denied", f"a request from {who} as '{name}' was refused: {why.message}")
            raise Denied(401, why.code, why.message) from None
        assert row is not None
        return hub.seen(row["agent"], row["name"])

    async def body_of(request: Request) -> bytes:
        """A signed request's JSON body, if it is what was signed."""
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > JSON_LIMIT:
                raise Denied(413, "too-large", f"A JSON body may have {JSON_LIMIT} bytes.")
        if hashlib.sha256(content).hexdigest() != request.headers.get(BODY):
            raise Denied(401, "body", "The body is not the one that was signed.")
        return bytes(content)

    def read(kind: Any, content: bytes) -> Any:
        try:
            return kind.model_validate_json(content)
        except ValueError as error:
            raise Denied(422, "malformed", str(error)[:500]) from None

    def schema(kind: Any) -> dict[str, Any]:
        return {
            "requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}
        }

    @app.get("/v1/ca", summary="The certificate to pin: compare its SHA-256 with the fingerprint in the token.")
    async def ca() -> Response:
        return Response(authority, media_type="application/x-pem-file")

    @app.get("/v1/status", summary="Who is there, what is being done, who is awaited.")
    async def status() -> dict[str, Any]:
        return {"protocol": PROTOCOL, "fedloom": __version__, **hub.status()}

    @app.post("/v1/enrol", summary="Exchange a one-time token for a place among the agents.")
    async def enrol(wanted: Enrolment) -> dict[str, str]:
        try:
            secret, key = bytes.fromhex(wanted.secret), bytes.fromhex(wanted.public_key)
            if len(key) != 32 or not wanted.name or not wanted.name.isprintable():
                raise InputError("the name or the key is not valid")
            digest = hashlib.sha256(secret).hexdigest()
            agent = await run_in_threadpool(hub.ledger.enrol, digest, wanted.name, wanted.public_key.lower())
        except (ValueError, InputError) as error:
            hub.log("denied", f"an enrolment as '{wanted.name}' was refused: {error}")
            raise Denied(401, "token", f"The enrolment was refused: {error}.") from None
        return {"agent": agent, "session": verifier.session}

    @app.get("/v1/plan", summary="What will be run: names and fields, and hashes of the code that must be installed.")
    async def plan(request: Request) -> dict[str, Any]:
        identify(request)
        return hub.offer

    @app.get(
        "/v1/tensors/{sha256}", summary="Tensors by their SHA-256.", responses={200: BINARY}, response_class=Response
    )
    async def tensors(request: Request, sha256: str) -> Response:
        identify(request)
        parcel = hub.lasting.get(sha256)
        if parcel is None:
            raise Denied(404, "unknown", "There are no such tensors.")
        return _send([parcel])

    @app.post("/v1/hello", summary="An agent is ready to work.", openapi_extra=schema(Hello))
    async def hello(request: Request) -> dict[str, Any]:
        connection = identify(request)
        said = read(Hello, await body_of(request))
        try:
            await run_in_threadpool(welcome, hub, connection, said)
        except InputError as error:
            connection.refused = str(error)
            hub.log("denied", f"{connection.name} cannot take part: {error}", connection.agent)
            raise Denied(409, "mismatch", str(error)) from None
        return {"beat": hub.beat}

    @app.post("/v1/heartbeat", summary="A sign of life.", openapi_extra=schema(Beat))
    async def heartbeat(request: Request) -> dict[str, Any]:
        connection = identify(request)
        said = read(Beat, await body_of(request))
        hub.seen(connection.agent, connection.name, said.doing)
        return {"finished": hub.finished}

    @app.get(
        "/v1/work",
        summary="What to do next; waits for it. A frame: 4 bytes with the header's length, the ask, tensors.",
        responses={200: BINARY, 204: {"description": "Nothing to do: ask again."}},
        response_class=Response,
    )
    async def work(request: Request, have: Annotated[str, Query(max_length=4000)] = "") -> Response:
        connection = identify(request)
        if connection.hello is None:
            raise Denied(409, "hello", "Say hello first: the coordinator was started anew.")
        known = set(have.split(","))
        end = time.monotonic() + POLL
        while not hub.finished:
            connection.wake.clear()
            found = hub.next_ask(connection.agent)
            if found is not None:
                ask, call = found
                missing = [call.parts[part.sha256] for part in ask.parts if part.sha256 not in known]
                header = json.dumps({**ask.model_dump(mode="json"), "missing": [p.sha256 for p in missing]}).encode()
                sent = 4 + len(header) + sum(part.size for part in missing)
                call.sent[connection.agent] = call.sent.get(connection.agent, 0) + sent
                return _send(missing, len(header).to_bytes(4, "little") + header)
            left = end - time.monotonic()
            if left <= 0 or await request.is_disconnected():
                break
            try:
                await asyncio.wait_for(connection.wake.wait(), min(left, hub.beat))
            except asyncio.TimeoutError:
                hub.seen(connection.agent, connection.name)
        return Response(status_code=204, headers={"fedloom-finished": "1"} if hub.finished else None)

    @app.post(
        "/v1/answers",
        summary="An answer: a parcel of tensors with a JSON header.",
        openapi_extra={"requestBody": {"required": True, **BINARY}},
    )
    async def answers(request: Request) -> dict[str, Any]:
        connection = identify(request)
        path = hub.ledger.updates / f"{secrets.token_hex(8)}.part"
        digest, size = hashlib.sha256(), 0
        try:
            with open(path, "wb") as file:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > hub.largest:
                        raise Denied(413, "too-large", f"An answer may have {hub.largest} bytes.")
                    digest.update(chunk)
                    file.write(chunk)
            if digest.hexdigest() != request.headers.get(BODY):
                raise Denied(401, "body", "The body is not the one that was signed.")
            hub.seen(connection.agent, connection.name)
            found = await run_in_threadpool(hub.receive, connection.agent, path, digest.hexdigest(), size)
        except Rejected as why:
            hub.log("rejected", f"{connection.name}: an answer was rejected ({why.code}: {why.message})")
            raise Denied(422, why.code, why.message) from None
        except OSError as error:
            hub.log("disk", f"an answer of {connection.name} could not be written: {error}")
            raise Denied(507, "disk", "The coordinator cannot write to its disk now; try again.") from None
        except FedloomError as error:
            hub.log("disk", str(error))
            raise Denied(507, "disk", "The coordinator cannot write to its ledger now; try again.") from None
        finally:
            path.unlink(missing_ok=True)
        return {"results": found}

    @app.post("/v1/failures", summary="Why an agent does not do what it was asked.", openapi_extra=schema(Failure))
    async def failures(request: Request) -> dict[str, str]:
        connection = identify(request)
        failure = read(Failure, await body_of(request))
        await run_in_threadpool(hub.fail, connection.agent, failure)
        return {"status": "noted"}

    return app


def welcome(hub: Hub, connection: Connection, hello: Hello) -> None:
    """Take a ready agent in, unless its data does not fit what the others have or what it said before."""
    expected = hub.ledger.fact("data")
    found = {"features": list(hello.features), "dtype": hello.dtype, "classes": list(hello.classes)}
    if expected is None:
        hub.ledger.set_fact("data", found)
    elif expected != found:
        different = [
            f"{key}: {_short(expected[key])} there, {_short(found[key])} here"
            for key in found
            if expected[key] != found[key]
        ]
        raise InputError(f"its data does not fit the run's. {'; '.join(different)}")
    if not hello.clients:
        raise InputError("it hosts no client")
    hosted = [row for row in hub.ledger.clients() if row["agent"] == connection.agent]
    if hub.ledger.clients() and not hosted:
        raise InputError("the run began without it")
    if hosted:
        before = json.loads((hub.ledger.agent(connection.agent) or {}).get("hello") or "{}")
        if before and before.get("data_mark") != hello.data_mark:
            raise InputError("its data has changed since the run began")
    if not hosted or not (hub.ledger.agent(connection.agent) or {}).get("hello"):
        hub.ledger.set_hello(connection.agent, hello.model_dump(mode="json"))
    connection.hello, connection.refused = hello, ""
    with hub.changed:
        hub.changed.notify_all()
    hub.log("agent", f"{connection.name} is ready, with {len(hello.clients)} client(s)", connection.agent)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _send(parcels: list[Parcel], start: bytes = b"") -> Response:
    """Some bytes and parcels: small ones at once, large ones in chunks straight from the tensors' memory."""
    size = len(start) + sum(parcel.size for parcel in parcels)
    kind = "application/octet-stream"
    if size <= WHOLE:
        return Response(start + b"".join(parcel.whole for parcel in parcels), media_type=kind)

    async def pieces() -> AsyncIterator[bytes]:
        yield start
        for parcel in parcels:
            for piece in parcel.pieces():
                yield bytes(piece)

    return StreamingResponse(pieces(), media_type=kind, headers={"content-length": str(size)})
