"""Signed requests: what the coordinator accepts, and which code it gives to the rest."""

from __future__ import annotations

import time
from hashlib import sha256

import pytest

from fedloom.network.protocol.messages import Heartbeat
from fedloom.network.protocol.signatures import NONCE, SIGNATURE, TIME, signed_text
from tests.network.conftest import HEARTBEAT, World, code


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
