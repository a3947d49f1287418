"""The coordinator's HTTP interface: enrolment, polls for work, status, the OpenAPI description."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.network.conftest import HEARTBEAT, World, code


def test_a_token_enrols_one_agent_which_may_repeat_its_request(world: World) -> None:
    from fedloom.network.protocol.signatures import Signer
    from fedloom.network.protocol.token import Token

    token = Token.new("")
    world.ledger.invite(token.digest)
    keys = [Signer(world.folder / name).public for name in ("a", "b")]

    def enrol(key: str, name: str = "kerry", secret: str = token.secret.hex()) -> Any:
        return world.client.post("/v1/enrol", json={"secret": secret, "name": name, "public_key": key})

    first = enrol(keys[0])
    assert first.status_code == 200
    assert enrol(keys[0]).json()["agent"] == first.json()["agent"]
    assert "used by another agent" in enrol(keys[1]).json()["message"]
    assert "unknown token" in enrol(keys[1], secret="00" * 16).json()["message"]
    assert enrol("not hex").status_code == 401
    other = Token.new("")
    world.ledger.invite(other.digest)
    assert "another agent with the name" in enrol(keys[1], secret=other.secret.hex()).json()["message"]


@pytest.mark.parametrize("path", ["/v1/answers", "/v1/heartbeat", "/v1/enrol"])
def test_a_broken_connection_leaves_nothing_behind(world: World, path: str) -> None:
    agent = world.speaker()
    agent.hello()
    world.open_call(agent)
    body = agent.answer().whole if path == "/v1/answers" else HEARTBEAT
    world.client.hang_up(path, agent.signer.headers("POST", path, sha256(body).hexdigest()), body[:-1])
    assert world.pool.accepted == 0
    assert not list(world.ledger.updates.glob("*.part"))


def test_work_needs_a_hello_and_lists_clients_that_have_not_answered(world: World) -> None:
    agent = world.speaker()
    reply = agent.send("GET", "/v1/work")
    assert (reply.status_code, code(reply)) == (409, "hello")
    agent.hello()
    world.open_call(agent, clients=2)
    for expected in ([0, 1], [1]):
        body = agent.send("GET", "/v1/work").content
        size = int.from_bytes(body[:4], "little")
        assert [one["client"] for one in json.loads(body[4 : 4 + size])["clients"]] == expected
        agent.send("POST", "/v1/answers", agent.answer(client=expected[0]).whole)
    world.pool.finished = "Done: nothing more."
    assert not world.pool.ready()[0].told_to_stop
    reply = agent.send("GET", "/v1/work")
    assert (reply.status_code, reply.headers["fedloom-finished"]) == (204, "Done%3A%20nothing%20more.")
    assert world.pool.ready()[0].told_to_stop


def test_a_busy_agent_learns_of_the_end_from_its_next_heartbeat(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = world.speaker()
    agent.hello()
    assert agent.send("POST", "/v1/heartbeat", HEARTBEAT).json() == {"finished": "", "ask": "", "trust": ""}
    world.pool.finished = "Done."
    assert agent.send("POST", "/v1/heartbeat", HEARTBEAT).json() == {"finished": "Done.", "ask": "", "trust": ""}
    monkeypatch.setattr(world.pool, "pause", lambda seconds: pytest.fail("waited, although everybody has heard"))
    world.pool.finish("Done.")


def test_the_description_of_the_protocol_lists_every_path(world: World) -> None:
    described = world.client.get("/openapi.json").json()
    known = described["components"]["schemas"]
    for name in re.findall(r'"\$ref": "([^"]*)"', json.dumps(described)):
        assert name.startswith("#/components/schemas/")
        assert name.rpartition("/")[2] in known
    page = (Path(__file__).parents[3] / "docs" / "reference" / "protocol.md").read_text()
    for path, methods in described["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}" in page


def test_only_the_operator_sees_names_in_the_status(world: World) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    world.pool.mark_seen(other.signer.agent, "clare")
    world.open_call(agent)
    found = world.client.get("/v1/status", headers={"authorization": f"Bearer {world.operator.secret.hex()}"}).json()
    assert [(one["name"], one["state"], one["awaited"]) for one in found["agents"]] == [
        ("clare", "joining", False),
        ("kerry", "ready", True),
    ]
    assert found["awaited_clients"] == 1
    public = world.client.get("/v1/status")
    assert public.json()["agents"] == {"ready": 1, "joining": 1, "refused": 0, "silent": 0, "gone": 0, "revoked": 0}
    assert "kerry" not in public.text
    world.ledger.revoke("kerry")  # at once, though it was heard from a moment ago
    assert world.client.get("/v1/status").json()["agents"]["revoked"] == 1
    for wrong in ("", "Bearer ", "Bearer 00", "nonsense", f"Bearer {world.operator}"):
        reply = world.client.get("/v1/status", headers={"authorization": wrong})
        assert (reply.status_code, code(reply)) == (401, "token")
