"""The operator's page of a coordinator: who is awaited and why, alerts, invitations, and nobody else's business."""

from __future__ import annotations

import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from fedloom.network.coordinator import operator_page
from fedloom.network.coordinator.operator_page import certified_names, quorum_alerts
from fedloom.network.protocol.certificates import local_authority
from fedloom.network.protocol.messages import Failure
from tests.network.conftest import Requests, World

ORIGIN = {"origin": "http://coordinator"}


def login(world: World) -> dict[str, str]:
    reply = world.client.post("/watch/api/login", json={"token": str(world.operator)}, headers=ORIGIN)
    assert reply.status_code == 200, reply.text
    return {**ORIGIN, "cookie": reply.headers["set-cookie"].split(";")[0]}


def state(world: World) -> Any:
    return world.client.get("/watch/api/federation", headers=login(world)).json()


def test_the_page_is_for_the_operators_token_alone(world: World) -> None:
    world.speaker("kerry")
    assert "<title>fedloom watch</title>" in world.client.get("/watch/").text
    about = world.client.get("/watch/api/page").json()
    assert (about["locked"], about["operator"], "marks" in about) == (True, False, False)
    for path in ("federation", "events", "runs", "runs/0/settings"):
        reply = world.client.get(f"/watch/api/{path}")
        assert reply.status_code == 401
        assert "kerry" not in reply.text
    for wrong in ("", "fl1-", str(world.operator)[:-1], world.operator.digest):
        reply = world.client.post("/watch/api/login", json={"token": wrong}, headers=ORIGIN)
        assert reply.status_code == 401
    assert [one["name"] for one in state(world)["agents"]] == ["kerry"]
    assert any("wrong token" in said for said in world.said)


def test_guessing_is_slowed_down(world: World) -> None:
    replies = [
        world.client.post("/watch/api/login", json={"token": f"fl1-{number}"}, headers=ORIGIN).status_code
        for number in range(12)
    ]
    assert replies == [401] * 10 + [429] * 2
    reply = world.client.post("/watch/api/login", json={"token": str(world.operator)}, headers=ORIGIN)
    assert reply.status_code == 429


def test_another_site_can_neither_read_nor_revoke(world: World) -> None:
    world.speaker("kerry")
    cookie = login(world)["cookie"]
    for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}, {}):
        body = {"deed": "revoke", "name": "kerry"}
        reply = world.client.post("/watch/api/federation", json=body, headers={**headers, "cookie": cookie})
        assert reply.status_code == 403
    assert world.ledger.revoked() == set()


def test_agents_have_a_state_and_the_call_says_who_is_awaited(world: World) -> None:
    busy, idle = world.speaker("kerry"), world.speaker("clare")
    world.speaker("never-seen")
    for agent in (busy, idle):
        agent.hello()
    call = world.open_call(busy, clients=2)
    call.needed = 2
    busy.send("POST", "/v1/answers", busy.answer(client=0).whole)
    found = state(world)
    agents = {one["name"]: one for one in found["agents"]}
    assert {name: one["state"] for name, one in agents.items()} == {
        "kerry": "working",
        "clare": "idle",
        "never-seen": "enrolled",
    }
    assert (agents["kerry"]["awaited"], agents["clare"]["awaited"]) == (1, 0)
    assert agents["kerry"]["since"] is not None
    assert agents["clare"]["since"] is None
    assert agents["kerry"]["versions"] == {"torch": "2"}
    assert agents["never-seen"]["seen"] is None
    assert [one["state"] for one in found["call"]["clients"]] == ["answered", "waiting"]
    assert found["call"]["clients"][0]["bytes"] > 0
    assert (found["call"]["needed"], found["call"]["title"]) == (2, "a test")
    assert 0 < found["call"]["seconds_left"] <= found["call"]["seconds"] <= 60.0
    assert found["accepted"] == 1
    assert (found["disk"]["total"] > found["disk"]["free"] > 0, found["alerts"]) == (True, [])
    assert any(one["message"] == "kerry is ready, with 1 client(s)" for one in found["events"])


def test_an_agent_that_cannot_take_part_says_why_in_plain_text(world: World) -> None:
    agent = world.speaker("kerry")
    agent.hello()
    refusal = Failure(ask=None, kind="refused", message="no\x1b[2J", clients=())
    for _ in range(3):
        world.pool.fail(agent.signer.agent, refusal)
    found = state(world)
    (shown,) = found["agents"]
    assert (shown["state"], shown["why"]) == ("refused", "no\\x1b[2J")
    assert found["alerts"] == ["kerry refused 3 times within an hour. kerry refuses: no\\x1b[2J"]
    world.ledger.revoke("kerry")
    assert state(world)["alerts"] == []


def test_a_quorum_at_risk_is_an_alert(world: World) -> None:
    one, two = world.speaker("one"), world.speaker("two")
    for agent in (one, two):
        agent.hello()
    call = world.open_call(one, two)
    call.needed = 1
    assert list(quorum_alerts(world.pool, call)) == []
    world.pool.agents[two.signer.agent].seen -= 3600
    assert list(quorum_alerts(world.pool, call)) == [
        "a test: the quorum is at risk. It needs every answer that can still come: 1."
    ]
    call.needed = 2
    assert list(quorum_alerts(world.pool, call)) == [
        "a test: the quorum is lost unless agents come back. "
        "Answers that are needed: 2; that are there: 0; that can still come: 1."
    ]
    assert [client["state"] for client in state(world)["call"]["clients"]] == ["waiting", "lost"]


def test_clocks_and_a_full_disk_are_alerts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = world.speaker("kerry")
    agent.signer.offset = 1000.0
    for _ in range(3):
        assert agent.send("POST", "/v1/heartbeat", b"{}").json()["code"] == "clock"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(operator_page.shutil, "disk_usage", lambda path: usage(100 * 10**9, 98 * 10**9, 2 * 10**9))
    assert state(world)["alerts"] == [
        "3 requests within an hour were rejected because their time is far from this machine's: check the clocks.",
        "The disk is nearly full: 2.0 GB of 100 GB are free.",
    ]
    monkeypatch.setattr(operator_page, "HOUR", 0.0)  # as if an hour had passed
    assert state(world)["alerts"] == ["The disk is nearly full: 2.0 GB of 100 GB are free."]


def test_each_browser_of_the_operator_has_its_own_connections(world: World) -> None:
    names: list[str] = []

    async def recognised(scope: Any, receive: Any, send: Any) -> None:
        await world.client._app({**scope, "recognise": names.append}, receive, send)

    client = Requests(recognised)
    for headers in (login(world), login(world)):
        for _ in range(2):
            assert client.get("/watch/api/federation", headers=headers).status_code == 200
    client.close()
    one, same, two, _ = names
    assert one == same != two


def test_the_operator_invites_withdraws_and_revokes(world: World) -> None:
    known = login(world)

    def act(deed: str, name: str = "") -> Any:
        return world.client.post("/watch/api/federation", json={"deed": deed, "name": name}, headers=known)

    invited = act("invite").json()
    assert Path(invited["file"]).read_text().strip() == invited["token"]
    (token,) = state(world)["tokens"]
    assert token["expires"] > time.time()
    assert act("withdraw", token["name"]).status_code == 200
    assert state(world)["tokens"] == []
    agent = world.speaker("kerry")
    assert act("revoke", agent.signer.agent).status_code == 200
    assert world.ledger.revoked() == {agent.signer.agent}
    assert act("revoke", "nobody").json()["detail"].startswith("There is no agent 'nobody'.")
    assert act("explode").json()["detail"] == "An operator can invite, revoke and withdraw. Got 'explode' instead."
    said = [one["message"] for one in state(world)["events"] if one["kind"] == "operator"]
    assert [words.split()[0] for words in said] == ["revoked", "withdrew", "invited"]


def test_a_coordinators_certificate_names_its_hosts(tmp_path: Path) -> None:
    made = local_authority(tmp_path, names=("fed.hospital.example",))
    assert {"localhost", "fed.hospital.example"} <= {*certified_names(made.certificate.read_bytes())}
