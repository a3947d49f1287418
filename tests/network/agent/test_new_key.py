"""An agent's new key: accepted because the old one signs for it, and once, whenever the process is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import InputError
from fedloom.network.agent import new_key
from fedloom.network.agent.audit_log import AuditLog, verify
from fedloom.network.agent.connection import Connection
from fedloom.network.agent.new_key import change_key, next_key
from fedloom.network.protocol.messages import NewKey
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.signatures import Signer
from tests.network.conftest import HEARTBEAT, World, code, in_process


class Site:
    """The state folder of an agent that is enrolled."""

    def __init__(self, world: World) -> None:
        self.world, self.speaker, self.state = world, world.speaker(), world.folder / "state"
        self.state.mkdir()
        (world.folder / "kerry.key").rename(self.state / "agent.key")
        known = {"url": "http://c", "authority": "", "agent": self.speaker.signer.agent, "token": "t"}
        (self.state / "coordinator.json").write_text(json.dumps(known))

    def change_key(self) -> None:
        signer = Signer(self.state / "agent.key")
        signer.agent = self.speaker.signer.agent
        change_key(self.state, in_process(self.world.client, signer))

    def log(self, event: str) -> None:
        AuditLog(self.state / "audit.jsonl", Signer(self.state / "agent.key")).write(event)

    @property
    def key(self) -> str:
        return Signer(self.state / "agent.key").public


def test_a_new_key_replaces_the_old_one_and_nothing_else_changes(world: World) -> None:
    site = Site(world)
    old, mark = site.key, Signer(site.state / "agent.key").mark("data")
    for _ in range(2):
        site.log("answered")
        site.change_key()
    site.log("answered")
    assert site.key != old
    assert (world.ledger.agent(site.speaker.signer.agent) or {})["key"] == site.key
    assert code(site.speaker.send("POST", "/v1/heartbeat", HEARTBEAT)) == "signature"
    assert Signer(site.state / "agent.key").mark("data") == mark
    assert (site.state / "mark.key").stat().st_mode & 0o777 == 0o600
    assert not next_key(site.state).exists()
    assert world.said[-2:] == [
        "kerry has a new key",
        "a request from 127.0.0.1 as 'kerry' was rejected: The signature does not belong to this request.",
    ]
    assert next(iter(verify(site.state / "audit.jsonl", site.key))).startswith("5 signed line(s)")
    with pytest.raises(InputError, match="line 4: this agent did not sign it"):
        list(verify(site.state / "audit.jsonl", old))


def test_the_old_key_signs_nothing_after_the_change(world: World) -> None:
    site = Site(world)
    old = AuditLog(site.state / "audit.jsonl", Signer(site.state / "agent.key"))
    old.write("answered")
    site.change_key()
    forged = AuditLog(site.state / "audit.jsonl", old.signer)
    forged.write("answered")
    with pytest.raises(InputError, match="line 3: this agent did not sign it"):
        list(verify(site.state / "audit.jsonl", site.key))


@pytest.mark.parametrize("where", ["before", "accepted", "marked", "logged", "renamed"])
def test_a_change_that_a_crash_interrupted_is_finished(
    world: World, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, old = Site(world), ""
    old = site.key
    site.log("answered")

    def crashing(owner: Any, name: str, first: bool) -> None:
        call = getattr(owner, name)

        def crash(*given: Any, **more: Any) -> Any:
            if not first:
                call(*given, **more)
            raise KeyboardInterrupt

        patch.setattr(owner, name, crash)

    with monkeypatch.context() as patch:
        if where in ("before", "accepted"):
            crashing(Connection, "post", first=where == "before")
        elif where == "marked":
            crashing(new_key, "write_private", first=False)
        elif where == "logged":
            crashing(AuditLog, "write", first=False)
        else:
            crashing(Path, "replace", first=True)
        with pytest.raises(KeyboardInterrupt):
            site.change_key()
    assert site.key == old
    site.change_key()
    assert site.key != old
    assert (world.ledger.agent(site.speaker.signer.agent) or {})["key"] == site.key
    assert next(iter(verify(site.state / "audit.jsonl", site.key))).startswith("2 signed line(s)")


def test_a_coordinator_that_knows_neither_key_changes_nothing(world: World) -> None:
    site = Site(world)
    old = site.key
    world.ledger.set_key(site.speaker.signer.agent, "00" * 32)
    with pytest.raises(Rejected, match="The signature does not belong to this request"):
        site.change_key()
    assert site.key == old


def test_a_key_stays_while_other_agents_of_a_run_with_secure_aggregation_remember_it(world: World) -> None:
    site = Site(world)
    world.pool.run_plan = {"privacy": {"secure_aggregation": True}}
    site.change_key()  # the run has not begun
    key, agent = site.key, site.speaker.signer.agent
    world.ledger.add_clients([(0, agent, 0, "a")])
    with pytest.raises(Rejected, match=f"before the next run begins.* the line of agent {agent} from peers.json"):
        site.change_key()
    assert (world.ledger.agent(agent) or {})["key"] == site.key == key
    assert not next_key(site.state).exists()  # the next start does not try again
    world.pool.run_plan = {"privacy": {"secure_aggregation": False}}
    site.change_key()
    assert site.key != key


def test_a_key_that_the_agent_does_not_have_is_refused(world: World) -> None:
    agent, other = world.speaker(), Signer(world.folder / "other.key")
    message = NewKey(public_key=other.public, proof=other.sign(b"something else")).model_dump_json().encode()
    reply = agent.send("POST", "/v1/key", message)
    assert (code(reply), reply.json()["message"]) == ("malformed", "The new key did not sign the agent's number.")
    assert (world.ledger.agent(agent.signer.agent) or {})["key"] == agent.signer.public
