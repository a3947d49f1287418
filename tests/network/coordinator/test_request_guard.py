"""Signed requests: what the coordinator accepts, and which code it gives to the rest."""

from __future__ import annotations

import gc
import math
import socket
import time
import weakref
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fedloom.network.agent.connection import Connection
from fedloom.network.coordinator import request_guard
from fedloom.network.coordinator.request_guard import RequestBody
from fedloom.network.coordinator.serve import HttpsServer
from fedloom.network.protocol.messages import Heartbeat
from fedloom.network.protocol.signatures import NONCE, SIGNATURE, TIME, signed_text
from fedloom.network.protocol.tensors import compressed
from fedloom.network.protocol.token import Token
from tests.network.conftest import HEARTBEAT, Requests, World, code


def test_a_signed_request_counts_once(world: World) -> None:
    agent = world.speaker()
    signed = agent.signer.headers("GET", "/v1/plan", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    assert world.client.get("/v1/plan", headers=signed).status_code == 200
    again = world.client.get("/v1/plan", headers=signed)
    assert (again.status_code, code(again)) == (401, "replayed")
    assert any("made before" in line for line in world.said)


@pytest.mark.parametrize("path", ["/v1/plan", "/v1/work", "/v1/tensors/ab"])
def test_a_request_without_a_signature_is_rejected(world: World, path: str) -> None:
    reply = world.client.get(path)
    assert (reply.status_code, code(reply)) == (401, "unknown")
    reply = world.client.get(path, headers={"fedloom-agent": world.speaker().signer.agent})
    assert (reply.status_code, code(reply)) == (401, "unsigned")


def test_a_signature_belongs_to_method_path_body_time_and_nonce(world: World) -> None:
    agent = world.speaker()
    assert agent.send("POST", "/v1/heartbeat", HEARTBEAT).status_code == 200
    signed = agent.signer.headers("POST", "/v1/heartbeat", "00")
    for changed in ({TIME: f"{time.time() + 1:.3f}"}, {NONCE: "other"}, {"fedloom-body": "01"}):
        reply = world.client.post("/v1/heartbeat", content=HEARTBEAT, headers={**signed, **changed})
        assert (reply.status_code, code(reply)) == (401, "signature")
    assert code(world.client.post("/v1/failures", content=HEARTBEAT, headers=signed)) == "signature"
    assert code(world.client.post("/v1/heartbeat", content=HEARTBEAT, headers=signed)) == "body"


def test_a_signed_request_without_a_nonce_is_rejected(world: World) -> None:
    agent = world.speaker()
    signed = agent.signer.headers("GET", "/v1/plan", "")
    del signed[NONCE]
    text = signed_text("GET", "/v1/plan", signed)
    signed[SIGNATURE] = agent.signer._key.sign(text).hex()
    reply = world.client.get("/v1/plan", headers=signed)
    assert (reply.status_code, code(reply)) == (401, "unsigned")


def test_a_header_of_the_signature_must_not_appear_twice(world: World) -> None:
    agent = world.speaker()
    other = Heartbeat(doing="forged").model_dump_json().encode()
    signed = agent.signer.headers("POST", "/v1/heartbeat", sha256(HEARTBEAT).hexdigest())
    doubled = [("fedloom-body", sha256(other).hexdigest()), *signed.items()]
    reply = world.client.post("/v1/heartbeat", content=other, headers=doubled)
    assert (reply.status_code, code(reply)) == (401, "unsigned")


def test_a_request_to_enrol_must_be_short_and_valid(world: World) -> None:
    reply = world.client.post("/v1/enrol", content=b'{"name": "' + b"x" * 100_000 + b'"}')
    assert (reply.status_code, code(reply)) == (413, "too-large")
    reply = world.client.post("/v1/enrol", content=b"no JSON")
    assert (reply.status_code, code(reply)) == (422, "malformed")


def test_an_agent_with_a_wrong_clock_or_an_old_session_learns_the_right_one(world: World) -> None:
    agent = world.speaker()
    agent.signer.offset = 3600.0
    reply = agent.send("GET", "/v1/plan")
    assert (reply.status_code, code(reply)) == (401, "clock")
    assert abs(reply.json()["time"] - time.time()) < 5
    agent.signer.offset, agent.signer.session = 0.0, "before the restart"
    reply = agent.send("GET", "/v1/plan")
    assert (code(reply), reply.json()["session"]) == ("session", world.verifier.session)


def test_a_revoked_agent_is_rejected_at_once(world: World) -> None:
    agent = world.speaker()
    assert agent.send("GET", "/v1/plan").status_code == 200
    world.ledger.revoke("kerry")
    reply = agent.send("GET", "/v1/plan")
    assert (reply.status_code, code(reply)) == (401, "revoked")


def _enrol(requests: Requests, name: str, secret: bytes) -> Any:
    message = {"secret": secret.hex(), "name": name, "public_key": sha256(name.encode()).hexdigest()}
    return requests.post("/v1/enrol", json=message)


def test_an_address_that_guesses_tokens_must_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [Token.new("") for _ in range(3)]
    for token in tokens:
        world.ledger.invite(token.digest)
    for guess in range(request_guard.GUESSES):
        reply = _enrol(world.client, f"guess-{guess}", b"wrong")
        assert (reply.status_code, code(reply)) == (401, "token")
    reply = _enrol(world.client, "kerry", tokens[0].secret)
    assert (reply.status_code, code(reply)) == (429, "guesses")
    assert "Try again in 60 s" in reply.json()["message"]
    wrong = world.client.get("/v1/status", headers={"authorization": f"Bearer {world.operator.secret.hex()}"})
    assert code(wrong) == "guesses"
    other = world.elsewhere("192.0.2.7")
    assert _enrol(other, "clare", tokens[1].secret).status_code == 200
    other.close()
    monkeypatch.setattr(request_guard, "GUESS_WINDOW", 0.0)
    assert _enrol(world.client, "kerry", tokens[0].secret).status_code == 200


def test_when_many_addresses_guess_each_has_one_try(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "ALL_GUESSES", 3)
    token = Token.new("")
    world.ledger.invite(token.digest)
    codes = []
    for address in ("192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2", "192.0.2.1"):
        requests = world.elsewhere(address)
        codes.append(code(_enrol(requests, "guess", b"wrong")))
        requests.close()
    assert codes == ["token", "token", "token", "guesses", "guesses"]  # the two of IPv6 count as one
    requests = world.elsewhere("192.0.2.9")
    assert _enrol(requests, "kerry", token.secret).status_code == 200
    requests.close()


def test_wrong_tokens_of_operators_count_as_guesses_and_missing_ones_do_not(world: World) -> None:
    for _ in range(request_guard.GUESSES + 1):
        assert code(world.client.get("/metrics")) == "token"
    for _ in range(request_guard.GUESSES):
        assert code(world.client.get("/v1/status", headers={"authorization": "Bearer zz"})) == "token"
    assert code(world.client.get("/v1/status", headers={"authorization": "Bearer zz"})) == "guesses"


def test_a_body_that_comes_too_slowly_is_rejected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = world.speaker()
    assert agent.send("POST", "/v1/heartbeat", HEARTBEAT).status_code == 200
    monkeypatch.setattr(request_guard, "GRACE", -1.0)
    monkeypatch.setattr(request_guard, "RATE", math.inf)
    for path in ("/v1/heartbeat", "/v1/answers", "/v1/enrol"):
        reply = agent.send("POST", path, HEARTBEAT)
        assert (reply.status_code, code(reply)) == (408, "slow")


def test_a_body_that_stops_ends_its_connection(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "SILENCE", 0.1)
    agent = world.speaker()
    with HttpsServer(world.pool, "127.0.0.1", 0) as server:
        connection = Connection(f"http://127.0.0.1:{server.number}", agent.signer, True)
        connection.post("/v1/heartbeat", Heartbeat())  # learns the session
        connection.close()
        signed = agent.signer.headers("POST", "/v1/answers", "00")
        lines = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
        slow = socket.create_connection(("127.0.0.1", server.number), timeout=30)
        slow.sendall(f"POST /v1/answers HTTP/1.1\r\nhost: a\r\n{lines}content-length: 100\r\n\r\nx".encode())
        received = b""
        while piece := slow.recv(10_000):
            received += piece
        slow.close()
    assert received.startswith(b"HTTP/1.1 408 ")
    assert not list(world.ledger.updates.iterdir())


def test_few_messages_of_one_agent_are_received_at_the_same_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = world.speaker()
    monkeypatch.setattr(request_guard, "BODIES", 0)
    for path in ("/v1/heartbeat", "/v1/answers"):
        reply = agent.send("POST", path, HEARTBEAT)
        assert (reply.status_code, code(reply)) == (503, "busy")


def test_only_the_message_that_lists_clients_may_be_long(world: World) -> None:
    agent = world.speaker()
    long = b" " * (request_guard.JSON_LIMIT + 1)
    assert code(agent.send("POST", "/v1/failures", long)) == "too-large"
    assert code(agent.send("POST", "/v1/hello", long)) == "malformed"


def test_a_compressed_body_is_freed_when_it_is_discarded(tmp_path: Path) -> None:
    body = RequestBody(tmp_path, 100, "zstd")
    body.add(b"".join(compressed([b"content"])))
    body.discard()
    left = weakref.ref(body)
    del body
    gc.collect()
    assert left() is None
