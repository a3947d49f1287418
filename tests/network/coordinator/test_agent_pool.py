"""The pool of agents: admission, deadlines, and what appears on the console."""

from __future__ import annotations

import json

import pytest

from fedloom.errors import InputError
from tests.network.conftest import HELLO, World, code


def test_what_agents_say_cannot_move_the_cursor_on_the_coordinators_console(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    failure = {"kind": "error", "message": "\x1b[2Jgone\nsecond line"}
    assert agent.send("POST", "/v1/failures", json.dumps(failure).encode()).status_code == 200
    assert world.said[-1] == "kerry failed: ?[2Jgone\nsecond line"


def test_rejected_requests_cannot_fill_the_disk(world: World) -> None:
    for _ in range(300):
        world.client.get("/v1/plan")
    assert len(world.said) == 101
    assert any("Further ones are not shown" in line for line in world.said)
    world.pool.log("agent", "somebody came")  # everything else is still told
    assert world.said[-1] == "somebody came"


def test_a_deadline_closes_a_call_and_a_quorum_does_not_wait_for_the_lost(world: World) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    call = world.open_call(agent, other, seconds=0.2)
    world.pool.wait(call, 2)
    assert not call.open
    assert set(call.waiting) == {0, 1}
    call = world.open_call(agent, other, seconds=3600.0)
    agent.send("POST", "/v1/answers", agent.answer().whole)
    world.pool.agents[other.signer.agent].seen -= 1000.0
    world.pool.wait(call, 1)  # returns at once, an hour before the deadline
    assert set(call.answers) == {0}


def test_agents_must_agree_about_the_data(world: World) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    different = HELLO.model_copy(update={"classes": ("a", "c")})
    reply = other.send("POST", "/v1/hello", different.model_dump_json().encode())
    assert (reply.status_code, code(reply)) == (409, "mismatch")
    assert "classes" in reply.json()["message"]
    with pytest.raises(InputError, match="features"):
        other.hello(HELLO.model_copy(update={"features": (5,)}))
