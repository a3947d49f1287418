"""The coordinator's HTTP interface: signed requests, long polls, tensors in and out."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from fedloom import __version__, faults
from fedloom.errors import InputError, StoreError
from fedloom.network.coordinator.agent_pool import AgentPool
from fedloom.network.coordinator.connected_agent import ConnectedAgent
from fedloom.network.coordinator.connections import Connections
from fedloom.network.coordinator.intake import Intake
from fedloom.network.coordinator.monitoring import CountTraffic, Traffic, metrics
from fedloom.network.coordinator.network_folder import announced
from fedloom.network.coordinator.operator_page import operators_page
from fedloom.network.coordinator.request_guard import RequestGuard
from fedloom.network.protocol.messages import Enrolment, Failure, Heartbeat, Hello, NewKey
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.signatures import Verifier, new_key_text, signed_by
from fedloom.network.protocol.tensors import PROTOCOL, Parcel, compressed
from fedloom.watch.app import make_app as watch_app

POLL = 20.0  # seconds that a poll for work stays open
WHOLE = 8 << 20  # bytes: replies up to this size are sent in one piece
OCTETS = "application/octet-stream"
BINARY = {"content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}}


def make_app(
    pool: AgentPool,
    certificate: bytes = b"",
    verifier: Verifier | None = None,
    operator: str = "",
    connections: Connections | None = None,
    hosts: Sequence[str] | None = None,
) -> FastAPI:
    """Return the application; `certificate` is what agents pin, `operator` the hash of the operator's token.

    `hosts` are this machine's names, under which it shows the operator's page; None accepts any, as behind a proxy.
    """
    verifier, connections = verifier or Verifier(), connections or Connections()
    guard, intake = RequestGuard(pool, verifier, operator), Intake(pool)
    app = FastAPI(title="fedloom coordinator", version=str(PROTOCOL), docs_url=None, redoc_url=None)
    traffic = Traffic()
    app.add_middleware(CountTraffic, traffic=traffic)

    @app.exception_handler(Rejected)
    async def _rejected(request: Request, why: Rejected) -> JSONResponse:
        traffic.reject(why.code)
        content = {"code": why.code, "message": why.message, "time": faults.clock(), "session": verifier.session}
        headers = {"connection": "close"} if why.code == "slow" else None  # the rest of the body may never come
        return JSONResponse(content, status_code=why.status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return await _rejected(request, Rejected("malformed", f"{place}: {first['msg']}"))

    @app.exception_handler(StoreError)
    async def _disk_full(request: Request, error: StoreError) -> JSONResponse:
        pool.log("disk", str(error))
        return await _rejected(request, Rejected("disk", "The coordinator cannot use its disk now; try again."))

    @app.exception_handler(ClientDisconnect)
    async def _disconnected(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody receives it; an agent that reconnects sends everything again

    @app.get("/v1/ca", summary="The certificate to pin: compare its SHA-256 with the fingerprint in the token.")
    async def ca() -> Response:
        return Response(certificate, media_type="application/x-pem-file")

    @app.get("/v1/status", summary="How many agents there are; with the operator's token also their names and work.")
    async def status(request: Request) -> JSONResponse:
        found = pool.status() if guard.is_operator(request) else pool.counts()
        return JSONResponse({"protocol": PROTOCOL, "fedloom": __version__, **found})

    @app.get("/metrics", summary="Numbers for Prometheus; needs the token for metrics.", response_class=Response)
    async def prometheus(request: Request) -> Response:
        guard.check_reader(request)
        text = await run_in_threadpool(metrics, pool, traffic, connections.counts(), connections.ended)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post(
        "/v1/enrol", summary="Exchange a one-time token for an agent's number.", openapi_extra=_json_body(Enrolment)
    )
    async def enrol(request: Request, message: Enrolment = Depends(guard.unsigned(Enrolment))) -> dict[str, Any]:
        try:
            secret, key = bytes.fromhex(message.secret), bytes.fromhex(message.public_key)
            if len(key) != 32 or not message.name or not message.name.isprintable():
                raise InputError("the name or the key is not valid")
            digest = hashlib.sha256(secret).hexdigest()
            agent = await run_in_threadpool(pool.ledger.enrol, digest, message.name, key.hex())
        except (ValueError, InputError) as error:
            guard.guesses.add(request)
            pool.log("denied", f"an enrolment as '{message.name}' was rejected: {error}")
            raise Rejected("token", f"The enrolment was rejected: {error}.") from None
        replaced = (pool.ledger.agent(agent) or {}).get("replaced") is not None
        return {"agent": agent, "session": verifier.session, "replaced": replaced}

    @app.post("/v1/key", summary="An agent's next key; the present one signs for it.", openapi_extra=_json_body(NewKey))
    async def key(
        agent: ConnectedAgent = Depends(guard.agent), message: NewKey = Depends(guard.signed(NewKey))
    ) -> JSONResponse:
        if not signed_by(message.public_key, new_key_text(agent.agent), message.proof):
            raise Rejected("malformed", "The new key did not sign the agent's number.")
        if pool.run_plan.get("privacy", {}).get("secure_aggregation") and pool.ledger.clients():
            raise Rejected(
                "begun",
                "This run has secure aggregation and has begun: other agents remember this agent's key, and refuse "
                "sums with another one. Change the key before the next run begins, and ask the other sites to remove "
                f"the line of agent {agent.agent} from peers.json in their state folders.",
            )
        await run_in_threadpool(pool.ledger.set_key, agent.agent, message.public_key)
        pool.log("agent", f"{agent.name} has a new key", agent.agent)
        return JSONResponse({})

    @app.get("/v1/plan", summary="What will be run: names and fields, and hashes of the code that must be installed.")
    async def plan(agent: ConnectedAgent = Depends(guard.agent)) -> JSONResponse:
        return JSONResponse(pool.run_plan)

    @app.get(
        "/v1/tensors/{sha256}", summary="Tensors by their SHA-256.", responses={200: BINARY}, response_class=Response
    )
    async def tensors(sha256: str, agent: ConnectedAgent = Depends(guard.agent)) -> Response:
        path = pool.initial_weights.get(sha256)
        if path is None:
            raise Rejected("unknown", "There are no such tensors.", status=404)
        return FileResponse(path, media_type=OCTETS)

    @app.post("/v1/hello", summary="An agent is ready to work.", openapi_extra=_json_body(Hello))
    async def hello(
        agent: ConnectedAgent = Depends(guard.agent), message: Hello = Depends(guard.signed(Hello))
    ) -> JSONResponse:
        try:
            await run_in_threadpool(pool.admit, agent, message)
        except InputError as error:
            agent.refused, agent.hello = str(error), None
            pool.log("denied", f"{agent.name} cannot take part: {error}", agent.agent)
            raise Rejected("mismatch", str(error)) from None
        return JSONResponse({"beat": pool.heartbeat})

    @app.post("/v1/heartbeat", summary="The agent is alive.", openapi_extra=_json_body(Heartbeat))
    async def heartbeat(
        agent: ConnectedAgent = Depends(guard.agent), message: Heartbeat = Depends(guard.signed(Heartbeat))
    ) -> JSONResponse:
        pool.mark_seen(agent.agent, agent.name, message.doing)
        if message.pins != agent.pins:
            await run_in_threadpool(pool.ledger.set_pins, agent.agent, message.pins)
            agent.pins = message.pins
        found, trust = pool.next_assignment(agent.agent), announced(pool.ledger.folder, certificate)
        return JSONResponse({"finished": pool.end_message(agent), "ask": found[0].id if found else "", "trust": trust})

    @app.get(
        "/v1/work",
        summary="The next assignment; waits for it. 4 bytes with the header's length, the header, parcels.",
        responses={200: BINARY, 204: {"description": "Nothing to do: poll again."}},
        response_class=Response,
    )
    async def work(
        request: Request,
        have: Annotated[str, Query(max_length=4000)] = "",
        pack: Annotated[bool, Query()] = False,
        agent: ConnectedAgent = Depends(guard.agent),
    ) -> Response:
        if agent.hello is None:
            raise Rejected("hello", "Say hello first: the coordinator was restarted.")
        known = set(have.split(","))
        end = time.monotonic() + POLL
        while not (pool.finished or pool.closing):
            agent.wake.clear()
            found = pool.next_assignment(agent.agent)
            if found is not None:
                assignment, call = found
                missing = [call.parcels[part.sha256] for part in assignment.parts if part.sha256 not in known]
                message = {**assignment.model_dump(mode="json"), "missing": [parcel.sha256 for parcel in missing]}
                header = json.dumps(message).encode()
                sent = 4 + len(header) + sum(parcel.size for parcel in missing)
                call.sent[agent.agent] = call.sent.get(agent.agent, 0) + sent
                return _send(missing, len(header).to_bytes(4, "little") + header, pack)
            left = end - time.monotonic()
            if left <= 0 or await request.is_disconnected():
                break
            with suppress(asyncio.TimeoutError):  # an open poll is no sign of life: heartbeats come beside it
                await asyncio.wait_for(agent.wake.wait(), min(left, pool.heartbeat))
        words = pool.end_message(agent)
        return Response(status_code=204, headers={"fedloom-finished": quote(words[:500])} if words else None)

    @app.post(
        "/v1/answers",
        summary="An answer: a parcel of tensors with a JSON header; Content-Encoding may be zstd.",
        openapi_extra={"requestBody": {"required": True, **BINARY}},
    )
    async def answers(request: Request, agent: ConnectedAgent = Depends(guard.agent)) -> JSONResponse:
        body = guard.answer(request)
        try:
            with guard.receiving(agent.agent):
                await body.receive(request)
                pool.mark_seen(agent.agent, agent.name)
                verdicts = await intake.receive(agent.agent, body)
        except Rejected as why:
            if why.code not in ("body", "busy"):  # the agent sends those again
                pool.log("rejected", f"{agent.name}: an answer was rejected ({why.code}: {why.message})", agent.agent)
            raise
        except OSError as error:
            raise StoreError(f"An answer of {agent.name} could not be written: {error}.") from error
        finally:
            body.discard()
        return JSONResponse({"results": verdicts})

    @app.post("/v1/failures", summary="Why an agent does not do its work.", openapi_extra=_json_body(Failure))
    async def failures(
        agent: ConnectedAgent = Depends(guard.agent), failure: Failure = Depends(guard.signed(Failure))
    ) -> JSONResponse:
        await run_in_threadpool(pool.fail, agent.agent, failure)
        return JSONResponse({"status": "noted"})

    app.mount("/watch", watch_app(operators_page(pool, guard, traffic, hosts)))
    return app


def _send(parcels: list[Parcel], start: bytes = b"", compress: bool = False) -> Response:
    """Send some bytes and parcels: small ones at once, large ones in chunks straight from the tensors' memory."""
    size = len(start) + sum(parcel.size for parcel in parcels)
    encoding = {"content-encoding": "zstd"}
    if size <= WHOLE:  # made once, and sent to many agents
        if not compress:
            return Response(start + b"".join(parcel.whole for parcel in parcels), media_type=OCTETS)
        content = b"".join([*compressed([start]), *(parcel.compressed for parcel in parcels)])
        return Response(content, media_type=OCTETS, headers=encoding)

    def pieces() -> Iterator[bytes]:
        yield start
        for parcel in parcels:
            yield from map(bytes, parcel.pieces())

    if compress:
        return StreamingResponse(compressed(pieces()), media_type=OCTETS, headers=encoding)
    return StreamingResponse(pieces(), media_type=OCTETS, headers={"content-length": str(size)})


def _json_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Describe a JSON body for OpenAPI: FastAPI does not see it, because it is read after its signature."""
    schema = kind.model_json_schema()
    content = {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, known: Mapping[str, Any]) -> Any:
    """Return a schema without references, which OpenAPI would look up in a list of its own."""
    if isinstance(schema, list):
        return [_inlined(one, known) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(known[schema["$ref"].rpartition("/")[2]], known)
    return {key: _inlined(value, known) for key, value in schema.items()}
