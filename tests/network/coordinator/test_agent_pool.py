"""The pool of agents: admission, deadlines, and what appears on the console."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.errors import InputError
from fedloom.network.coordinator.network_folder import invite
from fedloom.network.protocol.messages import Failure
from fedloom.network.protocol.signatures import Signer, begin_process
from fedloom.network.protocol.token import Token
from tests.network.conftest import HEARTBEAT, HELLO, World, code


def test_what_agents_say_cannot_move_the_cursor_on_the_coordinators_console(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    failure = {"kind": "error", "message": "\x1b[2Jgone\nsecond line"}
    assert agent.send("POST", "/v1/failures", json.dumps(failure).encode()).status_code == 200
    assert world.said[-1] == "kerry failed: \\x1b[2Jgone\n  | second line"


def test_rejected_requests_cannot_fill_the_disk(world: World) -> None:
    for _ in range(300):
        world.client.get("/v1/plan")
    assert len(world.said) == 1  # the same is said once a minute
    for number in range(300):
        world.pool.log("denied", f"a request from address {number} was rejected")
    assert len(world.said) == 201
    assert any("further ones are only counted" in line for line in world.said)
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
    world.ledger.set_fact("data", HELLO.message())  # as the run does when it begins
    different = HELLO.model_copy(update={"classes": ("a", "c")})
    reply = other.send("POST", "/v1/hello", different.model_dump_json().encode())
    assert (reply.status_code, code(reply)) == (409, "mismatch")
    assert "classes" in reply.json()["message"]
    with pytest.raises(InputError, match="features"):
        other.hello(HELLO.model_copy(update={"features": (5,)}))


def test_an_agent_may_host_only_as_many_clients_as_the_operator_allows(world: World) -> None:
    world.pool.max_clients = 2
    agent, few, many = world.speaker(), HELLO.clients * 2, HELLO.clients * 3
    reply = agent.send("POST", "/v1/hello", HELLO.model_copy(update={"clients": many}).model_dump_json().encode())
    assert (reply.status_code, code(reply)) == (409, "mismatch")
    assert reply.json()["message"] == "it hosts 3 clients, and [cohort] max_clients = 2"
    assert world.pool.status()["agents"][0]["state"] == "refused"
    agent.hello(HELLO.model_copy(update={"clients": few}))
    # a run that began with more continues
    world.ledger.add_clients([(number, agent.signer.agent, number, "c") for number in range(2)])
    world.pool.max_clients = 1
    agent.hello(HELLO.model_copy(update={"clients": few}))


@pytest.mark.parametrize("shown", [0, 3])  # the policy hides a small split, or no longer hides it
def test_an_agent_whose_policy_shows_other_sizes_is_refused_at_hello(world: World, shown: int) -> None:
    agent = world.speaker()
    agent.hello()
    world.ledger.add_clients([(0, agent.signer.agent, 0, "c")])
    agent.hello()
    clients = (HELLO.clients[0].model_copy(update={"test": shown}),)
    reply = agent.send("POST", "/v1/hello", HELLO.model_copy(update={"clients": clients}).model_dump_json().encode())
    assert "set [policy] min_examples at the site to what it was" in reply.json()["message"]
    assert world.pool.ready() == []  # it gets no work, and no round waits for it


def test_a_heartbeat_learns_whether_its_agents_work_is_still_awaited(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    assert agent.send("POST", "/v1/heartbeat", HEARTBEAT).json()["ask"] == "ask"
    call.open = False
    assert agent.send("POST", "/v1/heartbeat", HEARTBEAT).json()["ask"] == ""


def test_a_round_does_not_wait_for_an_agent_that_declines(world: World) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    call = world.open_call(agent, other, seconds=3600.0)
    agent.send("POST", "/v1/answers", agent.answer().whole)
    declines = Failure(kind="error", message="its disk cannot be written").model_dump_json().encode()
    assert other.send("POST", "/v1/failures", declines).status_code == 200
    world.pool.wait(call, 1)  # returns at once, an hour before the deadline
    assert set(call.answers) == {0}
    assert [one.name for one in world.pool.ready()] == ["kerry"]
    other.hello()
    assert [one.name for one in world.pool.ready()] == ["kerry", "clare"]


def test_a_closed_call_says_why_clients_did_not_answer(world: World) -> None:
    kerry, clare, cork, mayo = agents = [world.speaker(name) for name in ("kerry", "clare", "cork", "mayo")]
    for agent in agents:
        agent.hello()
    call = world.open_call(*agents, clients=2, seconds=0.0)
    kerry.send("POST", "/v1/answers", kerry.answer(client=0).whole)
    for number, kind in ((2, "refused"), (3, "error")):
        failed = Failure(ask="ask", clients=(number,), kind=kind, message="it does not want to").model_dump_json()
        assert clare.send("POST", "/v1/failures", failed.encode()).status_code == 200
    world.pool.agents[cork.signer.agent].seen -= 1000.0
    declines = Failure(kind="refused", message="not today").model_dump_json().encode()
    assert mayo.send("POST", "/v1/failures", declines).status_code == 200
    world.pool.wait(call, 8)
    why = {1: "late", 2: "refused", 3: "failed", 4: "gone", 5: "gone", 6: "refused", 7: "refused"}
    assert world.pool.absences(call) == why


def test_the_operator_learns_once_that_an_agent_is_gone_and_that_it_is_back(world: World) -> None:
    agents = clare, _, mayo = [world.speaker(name) for name in ("clare", "cork", "mayo")]
    for agent in agents:
        agent.hello()
    world.ledger.revoke("cork")  # the operator knows that this one is gone
    declines = Failure(kind="refused", message="not today").model_dump_json().encode()
    assert mayo.send("POST", "/v1/failures", declines).status_code == 200
    for agent in agents:
        world.pool.agents[agent.signer.agent].seen -= 1000.0
    for _ in range(2):
        assert not world.pool.wait_until(lambda: False, 0.0)
    assert [line for line in world.said if "is gone" in line] == [
        "clare is gone: nothing was heard from it for 1000 s. Rounds that have enough answers do not wait for it, and "
        "it can come back at any time"
    ]
    assert clare.send("POST", "/v1/heartbeat", HEARTBEAT).status_code == 200
    assert world.said[-1] == "clare is back, after 1000 s without a word"
    world.pool.agents[clare.signer.agent].seen -= 1000.0  # a second time is news again
    assert not world.pool.wait_until(lambda: False, 0.0)
    assert sum("clare is gone" in line for line in world.said) == 2


def test_the_largest_min_cohort_counts_and_a_site_may_change_it(world: World) -> None:
    kerry, clare = world.speaker("kerry"), world.speaker("clare")
    ids = [agent.signer.agent for agent in (kerry, clare)]
    for agent, fewest in ((kerry, 2), (clare, 5)):
        said = HELLO.model_copy(update={"min_cohort": fewest})
        assert agent.send("POST", "/v1/hello", said.model_dump_json().encode()).status_code == 200
    assert [world.pool.min_cohort(some) for some in ([], ids[:1], ids)] == [0, 2, 5]
    world.ledger.add_clients(HELLO.numbered(ids[1], 0))
    said = HELLO.model_copy(update={"min_cohort": 3})
    assert clare.send("POST", "/v1/hello", said.model_dump_json().encode()).status_code == 200
    world.pool.agents.clear()  # a coordinator that was restarted
    assert world.pool.min_cohort(ids) == 3


def test_when_fewer_answers_suffice_the_others_are_a_surplus(world: World) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    call = world.open_call(agent, other, seconds=3600.0)
    call.enough = 1
    agent.send("POST", "/v1/answers", agent.answer().whole)
    world.pool.wait(call, 1)
    assert world.pool.absences(call) == {1: "surplus"}
    call.accept(replace(call.answers[0], client=1), "", 0)  # it was there before the call was closed
    assert world.pool.absences(call) == {1: "surplus"}


def test_two_processes_with_one_key_are_refused_and_a_restarted_one_is_not(world: World, tmp_path: Path) -> None:
    agent = world.speaker()
    original, session = agent.signer, agent.signer.session

    def first_request(folder: Path) -> tuple[int, str]:
        begin_process.cache_clear()
        agent.signer = Signer(folder / "kerry.key")
        agent.signer.agent, agent.signer.session = original.agent, session
        return asks()

    def asks() -> tuple[int, str]:
        reply = agent.send("POST", "/v1/heartbeat", HEARTBEAT)
        return reply.status_code, "" if reply.status_code == 200 else code(reply)

    assert asks() == (200, "")
    copy = shutil.copytree(world.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("copy", "network"))
    assert first_request(copy) == (409, "twice")
    assert "Another process uses the key of 'kerry'" in world.said[-1]
    assert first_request(world.folder) == (200, "")  # the next process in the same folder
    agent.signer = original
    assert asks() == (409, "twice")
    world.pool.agents[original.agent].seen -= 1000.0
    assert first_request(copy) == (200, "")  # the site was moved: the other process is gone


def test_a_late_agent_brings_clients_with_the_next_free_numbers(world: World) -> None:
    agent, late = world.speaker(), world.speaker("late")
    agent.hello()
    world.ledger.add_clients(HELLO.numbered(agent.signer.agent, 0))
    (token,) = (Token.parse(path.read_text()) for path in invite(world.ledger, 1))
    world.ledger.enrol(token.digest, "late", late.signer.public)
    for number in (0, 2):
        clients = (HELLO.clients[0].model_copy(update={"number": number}),)
        with pytest.raises(InputError, match=r"its \[site\] hosts must be the next free numbers, 1 to 1"):
            late.hello(HELLO.model_copy(update={"clients": clients}))
    late.hello()
    late.hello()
    assert [(row["client"], row["agent"], row["late"]) for row in world.ledger.clients()] == [
        (0, agent.signer.agent, 0),
        (1, late.signer.agent, 1),
    ]
