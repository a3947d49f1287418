"""An agent as the operator sees it: ready, silent, gone."""

from __future__ import annotations

from tests.network.conftest import World


def test_an_agent_is_silent_after_two_heartbeats_and_gone_after_five(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    found = world.pool.status()
    assert (found["silent_after"], found["gone_after"]) == (6.0, 15.0)
    assert found["agents"][0]["state"] == "ready"
    assert "not heard from" not in found["agents"][0]["doing"]
    for more, silence, state in ((7.0, 7, "silent"), (9.0, 16, "gone")):
        world.pool.agents[agent.signer.agent].seen -= more
        (shown,) = world.pool.status()["agents"]
        assert (shown["state"], shown["doing"]) == (state, f"not heard from for {silence} s")
        assert world.pool.counts()["agents"][state] == 1


def test_an_agent_that_did_not_come_back_after_a_restart_is_gone(world: World) -> None:
    agent = world.speaker()
    world.pool.expect(agent.signer.agent, "kerry")
    assert [one["state"] for one in world.pool.status()["agents"]] == ["gone"]
