"""The coordinator's one HTTPS port: FastAPI, signed requests, long polls, tensors in and out."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from fedloom import __version__, faults
from fedloom.errors import InputError, StoreError
from fedloom.network.coordinator.authentication import Denied, Door, described
from fedloom.network.coordinator.calls import Connection, Hub
from fedloom.network.coordinator.intake import Busy, Forged, Intake
from fedloom.network.coordinator.request_body import Body, TooLarge
from fedloom.network.coordinator.update_checks import Rejected
from fedloom.network.protocol.compression import PackingError, packed
from fedloom.network.protocol.identity import BODY, Verifier
from fedloom.network.protocol.messages import Beat, Enrolment, Failure, Hello
from fedloom.network.protocol.tensors import PROTOCOL, Parcel

POLL = 20.0  # seconds that an agent's question for work stays open
WHOLE = 8 << 20  # parcels up to this size are sent in one piece
BINARY = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}


def make_app(hub: Hub, authority: bytes = b"", verifier: Verifier | None = None, operator: str = "") -> FastAPI:
    """The coordinator's application; `authority` is the certificate that agents pin, `operator` the hash of a token."""
    verifier = verifier or Verifier()
    door, intake = Door(hub, verifier, operator), Intake(hub)
    app = FastAPI(title="fedloom coordinator", version=str(PROTOCOL), docs_url=None, redoc_url=None)

    @app.exception_handler(Denied)
    async def _denied(request: Request, why: Denied) -> JSONResponse:
        content = {"code": why.code, "message": why.message, "time": faults.clock(), "session": verifier.session}
        return JSONResponse(content, status_code=why.status)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return await _denied(request, Denied(422, "malformed", f"{place}: {first['msg']}"))

    @app.exception_handler(StoreError)
    async def _full(request: Request, error: StoreError) -> JSONResponse:
        hub.log("disk", str(error))
        return await _denied(request, Denied(507, "disk", "The coordinator cannot use its disk now; try again."))

    @app.exception_handler(ClientDisconnect)
    async def _gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody hears it; whoever comes back sends everything again

    @app.get("/v1/ca", summary="The certificate to pin: compare its SHA-256 with the fingerprint in the token.")
    async def ca() -> Response:
        return Response(authority, media_type="application/x-pem-file")

    @app.get("/v1/status", summary="How many are there; with the operator's token also who, and what is being done.")
    async def status(request: Request) -> JSONResponse:
        found = hub.status() if door.is_operator(request) else hub.counts()
        return JSONResponse({"protocol": PROTOCOL, "fedloom": __version__, **found})

    @app.post(
        "/v1/enrol",
        summary="Exchange a one-time token for a place among the agents.",
        openapi_extra=described(Enrolment),
    )
    async def enrol(request: Request) -> dict[str, str]:
        wanted = await door.read_unsigned(request, Enrolment)
        try:
            secret, key = bytes.fromhex(wanted.secret), bytes.fromhex(wanted.public_key)
            if len(key) != 32 or not wanted.name or not wanted.name.isprintable():
                raise InputError("the name or the key is not valid")
            digest = hashlib.sha256(secret).hexdigest()
            agent = await run_in_threadpool(hub.ledger.enrol, digest, wanted.name, key.hex())
        except (ValueError, InputError) as error:
            hub.log("denied", f"an enrolment as '{wanted.name}' was refused: {error}")
            raise Denied(401, "token", f"The enrolment was refused: {error}.") from None
        return {"agent": agent, "session": verifier.session}

    @app.get("/v1/plan", summary="What will be run: names and fields, and hashes of the code that must be installed.")
    async def plan(request: Request) -> JSONResponse:
        door.agent(request)
        return JSONResponse(hub.offer)

    @app.get(
        "/v1/tensors/{sha256}", summary="Tensors by their SHA-256.", responses={200: BINARY}, response_class=Response
    )
    async def tensors(request: Request, sha256: str) -> Response:
        door.agent(request)
        path = hub.lasting.get(sha256)
        if path is None:
            raise Denied(404, "unknown", "There are no such tensors.")
        return FileResponse(path, media_type="application/octet-stream")

    @app.post("/v1/hello", summary="An agent is ready to work.", openapi_extra=described(Hello))
    async def hello(request: Request) -> JSONResponse:
        connection = door.agent(request)
        said = await door.read(request, Hello)
        try:
            await run_in_threadpool(welcome, hub, connection, said)
        except InputError as error:
            connection.refused = str(error)
            hub.log("denied", f"{connection.name} cannot take part: {error}", connection.agent)
            raise Denied(409, "mismatch", str(error)) from None
        return JSONResponse({"beat": hub.beat})

    @app.post("/v1/heartbeat", summary="A sign of life.", openapi_extra=described(Beat))
    async def heartbeat(request: Request) -> JSONResponse:
        connection = door.agent(request)
        said = await door.read(request, Beat)
        hub.seen(connection.agent, connection.name, said.doing)
        return JSONResponse({"finished": hub.farewell(connection)})

    @app.get(
        "/v1/work",
        summary="What to do next; waits for it. A frame: 4 bytes with the header's length, the ask, tensors.",
        responses={200: BINARY, 204: {"description": "Nothing to do: ask again."}},
        response_class=Response,
    )
    async def work(
        request: Request,
        have: Annotated[str, Query(max_length=4000)] = "",
        pack: Annotated[bool, Query()] = False,
    ) -> Response:
        connection = door.agent(request)
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
                return _send(missing, len(header).to_bytes(4, "little") + header, pack)
            left = end - time.monotonic()
            if left <= 0 or await request.is_disconnected():
                break
            try:
                await asyncio.wait_for(connection.wake.wait(), min(left, hub.beat))
            except asyncio.TimeoutError:
                hub.seen(connection.agent, connection.name)
        words = hub.farewell(connection)
        return Response(status_code=204, headers={"fedloom-finished": quote(words[:500])} if words else None)

    @app.post(
        "/v1/answers",
        summary="An answer: a parcel of tensors with a JSON header; Content-Encoding may be zstd.",
        openapi_extra={"requestBody": {"required": True, **BINARY}},
    )
    async def answers(request: Request) -> JSONResponse:
        connection = door.agent(request)
        encoding = request.headers.get("content-encoding", "")
        if encoding not in ("", "identity", "zstd"):
            raise Denied(415, "encoding", "A body may be compressed with zstd, or not at all.")
        body = Body(hub.ledger.updates / f"{secrets.token_hex(8)}.part", hub.largest, encoding)
        try:
            async for piece in request.stream():
                if body.in_memory and not encoding:
                    body.add(piece)
                else:
                    await run_in_threadpool(body.add, piece)
            hub.seen(connection.agent, connection.name)
            found = await intake.receive(connection.agent, body, request.headers.get(BODY))
        except TooLarge:
            hub.log("rejected", f"{connection.name}: an answer has more than {hub.largest} bytes", connection.agent)
            raise Denied(413, "too-large", f"An answer may have {hub.largest} bytes.") from None
        except Forged as why:
            raise Denied(401, "body", str(why)) from None
        except Busy:
            raise Denied(503, "busy", "This client's answer is being taken in; try again.") from None
        except (Rejected, PackingError) as error:
            wrong = error if isinstance(error, Rejected) else Rejected("malformed", "the body is not what zstd makes")
            hub.log("rejected", f"{connection.name}: an answer was rejected ({wrong.code}: {wrong.message})")
            raise Denied(422, wrong.code, wrong.message) from None
        except OSError as error:
            raise StoreError(f"An answer of {connection.name} could not be written: {error}.") from error
        finally:
            body.discard()
        return JSONResponse({"results": found})

    @app.post("/v1/failures", summary="Why an agent does not do what it was asked.", openapi_extra=described(Failure))
    async def failures(request: Request) -> JSONResponse:
        connection = door.agent(request)
        failure = await door.read(request, Failure)
        await run_in_threadpool(hub.fail, connection.agent, failure)
        return JSONResponse({"status": "noted"})

    return app


def welcome(hub: Hub, connection: Connection, hello: Hello) -> None:
    """Take a ready agent in, unless its data does not fit what the others have or what it said before."""
    with hub.welcoming:
        _welcome(hub, connection, hello)
    with hub.changed:
        hub.changed.notify_all()
    hub.log("agent", f"{connection.name} is ready, with {len(hello.clients)} client(s)", connection.agent)


def _welcome(hub: Hub, connection: Connection, hello: Hello) -> None:
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
    before = (hub.ledger.agent(connection.agent) or {}).get("hello")
    if hosted and before and json.loads(before).get("data_mark") != hello.data_mark:
        raise InputError("its data has changed since the run began")
    if not hosted or not before:
        hub.ledger.set_hello(connection.agent, hello.model_dump(mode="json"))
    connection.hello, connection.refused = hello, ""


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _send(parcels: list[Parcel], start: bytes = b"", pack: bool = False) -> Response:
    """Some bytes and parcels: small ones at once, large ones in chunks straight from the tensors' memory."""
    size = len(start) + sum(parcel.size for parcel in parcels)
    kind, packing = "application/octet-stream", {"content-encoding": "zstd"}
    if size <= WHOLE:  # made once, and sent to many
        if not pack:
            return Response(start + b"".join(parcel.whole for parcel in parcels), media_type=kind)
        content = b"".join([*packed([start]), *(parcel.packed for parcel in parcels)])
        return Response(content, media_type=kind, headers=packing)

    def pieces() -> Iterator[bytes]:
        yield start
        for parcel in parcels:
            yield from map(bytes, parcel.pieces())

    if pack:
        return StreamingResponse(packed(pieces()), media_type=kind, headers=packing)
    return StreamingResponse(pieces(), media_type=kind, headers={"content-length": str(size)})
