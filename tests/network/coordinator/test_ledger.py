"""The ledger after a restart."""

from __future__ import annotations

from tests.network.conftest import World


def test_accepted_updates_are_found_after_a_restart_unless_damaged(world: World) -> None:
    from fedloom.network.coordinator.ledger import Ledger

    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    world.open_call(agent, other)
    for client, one in enumerate((agent, other)):
        one.send("POST", "/v1/answers", one.answer(client=client).whole)
    again = Ledger(world.folder / "network")
    again.sweep()
    assert [update.client for update in again.accepted("fedavg-1", 1, 0, "digest")] == [0, 1]
    assert again.accepted("fedavg-1", 1, 0, "another question") == []
    damaged = again.updates / again.accepted("fedavg-1", 1, 0, "digest")[0].file
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert [update.client for update in again.accepted("fedavg-1", 1, 0, "digest")] == [1]
    again.forget("fedavg-1", 1)
    assert again.accepted("fedavg-1", 1, 0, "digest") == []
    assert not list(again.updates.iterdir())
    again.close()
