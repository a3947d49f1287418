"""The ledger after a restart."""

from __future__ import annotations

import hashlib

import pytest

from fedloom.errors import InputError
from fedloom.network.coordinator.ledger import AcceptedUpdate
from fedloom.network.protocol.token import Token
from tests.network.conftest import World

EMPTY = hashlib.sha256(b"").hexdigest()


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


def test_the_clients_of_a_round_are_decided_once_and_again_after_a_return_to_an_earlier_one(world: World) -> None:
    ledger, agent = world.ledger, world.speaker().signer.agent
    ledger.add_clients([(0, agent, 0, "a"), (1, agent, 1, "b")])
    assert ledger.begin_round("fedavg-1", 1) == (2, 2, set())
    ledger.add_clients([(2, agent, 2, "c")], late=True)
    ledger._write("UPDATE agents SET replaced = 7.0")
    assert ledger.begin_round("fedavg-1", 1) == (2, 2, set())
    for _ in range(2):
        assert ledger.begin_round("fedavg-1", 2) == (3, 2, {agent})
    assert ledger.begin_round("fedavg-1", 3) == (3, 3, set())
    assert ledger.begin_round("scaffold-1", 1) == (3, 3, set())  # it has never been without them
    ledger.forget_after("fedavg-1", 1)
    ledger.forget_after("scaffold-1", 0)
    assert ledger.begin_round("fedavg-1", 2) == (3, 2, {agent})


def test_clients_that_join_between_two_cells_are_new_in_the_next_one_only(world: World) -> None:
    ledger, agent = world.ledger, world.speaker().signer.agent
    ledger.add_clients([(0, agent, 0, "a")])
    assert ledger.begin_round("fedavg-1", 1) == (1, 1, set())
    ledger.add_clients([(1, agent, 1, "b")], late=True)
    for _ in range(2):
        assert ledger.begin_round("fedavg-2", 1) == (2, 1, set())
    assert ledger.begin_round("fedavg-2", 2) == (2, 2, set())
    assert ledger.begin_round("fedavg-3", 1) == (2, 2, set())


def test_a_former_key_does_not_enrol_and_uses_no_token(world: World) -> None:
    speaker = world.speaker()
    agent, former = speaker.signer.agent, speaker.signer.public
    (used,) = (row["digest"] for row in world.ledger._rows("SELECT digest FROM tokens"))
    world.ledger.set_key(agent, "cd" * 32)
    token = Token.new("")
    world.ledger.invite(token.digest)
    for digest in (token.digest, used):
        with pytest.raises(InputError, match="this key was replaced: use `fedloom agents replace`"):
            world.ledger.enrol(digest, "kerry", former)
    assert [row["digest"] for row in world.ledger.unused_tokens()] == [token.digest]
    successor = Token.new("")
    world.ledger.invite(successor.digest, replaces=agent)
    assert world.ledger.enrol(successor.digest, "kerry", former) == agent  # the operator allows it
    assert world.ledger.enrol(successor.digest, "kerry", former) == agent


def test_answers_that_no_checkpointed_round_took_are_kept(world: World) -> None:
    ledger = world.ledger
    for client in range(3):
        (ledger.updates / f"{client}").write_bytes(b"")
        ledger.accept([AcceptedUpdate("fedavg-1", 1, 0, client, "digest", f"{client}", EMPTY)])
    ledger.start_flights("fedavg-1", 1, dict.fromkeys(range(4), "{}"))
    ledger.start_flights("fedavg-1", 2, {4: "{}"})
    assert ledger.at_work("fedavg-1") == [3, 4]
    ledger.take("fedavg-1", 1, [(1, 0)])
    ledger.take("fedavg-1", 2, [(1, 1)])
    assert ledger.versions_in_use("fedavg-1", 1) == {1, 2}
    ledger.forget("fedavg-1", 1)
    assert [one.client for one in ledger.accepted("fedavg-1", 1, 0, "digest")] == [1, 2]
    assert not (ledger.updates / "0").exists()
    assert [ledger.first_unsaved("fedavg-1", client, 1) for client in (0, 1, 4, 5)] == [None, 1, 2, None]
    ledger.forget_untaken("fedavg-1")
    assert [one.client for one in ledger.accepted("fedavg-1", 1, 0, "digest")] == [1]
    taken = [row for row in ledger.audit_records() if row["record"] == "taken"]
    assert [(row["round"], row["version"], row["client"]) for row in taken] == [(1, 1, 0), (2, 1, 1)]


def test_a_return_to_an_earlier_round_gives_back_the_answers_that_later_ones_took(world: World) -> None:
    ledger = world.ledger
    ledger.start_flights("fedavg-1", 1, {0: "{}", 1: "{}"})
    ledger.start_flights("fedavg-1", 2, {2: "{}"})
    ledger.take("fedavg-1", 1, [(1, 0)])
    ledger.take("fedavg-1", 2, [(1, 1), (2, 2)])
    ledger.forget_after("fedavg-1", 1)
    found = [(row["version"], row["client"], row["taken"]) for row in ledger.flights("fedavg-1", 1)]
    assert found == [(1, 0, 1), (1, 1, None)]


def test_a_late_answer_is_dropped_without_the_one_that_took_its_place(world: World) -> None:
    late, other = (AcceptedUpdate("fedavg-1", 1, 0, 2, digest, f"{digest}.safetensors", digest) for digest in "ab")
    world.ledger.accept([late])
    world.ledger.accept([other])
    world.ledger.drop(late)
    assert [row["digest"] for row in world.ledger._rows("SELECT * FROM updates")] == ["b"]
