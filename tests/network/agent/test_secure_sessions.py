"""What an agent remembers of secure sums: the keys of others, and which sums it helped to unmask."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedloom as fl
from fedloom.errors import StoreError
from fedloom.network.agent.policy import Policy, Refused
from fedloom.network.agent.secure_sessions import PinnedKeys, SecureSessions, fingerprint
from fedloom.network.protocol.messages import AssignedClient, Assignment, SecurePeer, SecureResult, SecureStage
from fedloom.privacy.table import PrivacyTable, SecureTable


def peer(agent: str, key: str = "ab") -> SecurePeer:
    keys = {"mask_key": "01" * 32, "channel_key": "02" * 32, "signature": "03" * 64}
    return SecurePeer(client=0, agent=agent, agent_key=key * 32, **keys)


def test_keys_are_pinned_when_they_are_first_seen_and_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    PinnedKeys(path, ()).check([peer("a1"), peer("a2", "cd")])
    again = PinnedKeys(path, ())
    again.check([peer("a1"), peer("a3")])
    assert set(json.loads(path.read_text())) == {"a1", "a2", "a3"}
    with pytest.raises(Refused, match=r"the key of agent a2 is not the one that was seen first.* peers\.json"):
        again.check([peer("a2", "ef")])


def test_a_policy_that_lists_peers_accepts_no_others(tmp_path: Path) -> None:
    pins = PinnedKeys(tmp_path / "peers.json", (fingerprint("ab" * 32),))
    pins.check([peer("a1")])
    with pytest.raises(Refused, match=f"peers does not list the fingerprint of agent a2: {fingerprint('cd' * 32)}"):
        pins.check([peer("a2", "cd")])
    assert set(pins.known) == {"a1"}


def test_an_agent_checks_the_keys_of_others_and_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = SimpleNamespace(privacy=PrivacyTable(secure_aggregation=SecureTable()), rounds=1, seeds=(1,))
    signer: Any = SimpleNamespace(public="ab" * 32)
    pins = PinnedKeys(tmp_path / "peers.json", (fingerprint("cd" * 32),))
    pins.known = {"us": "ef" * 32}  # seen before this agent got a new key
    sessions = SecureSessions("run", plan, Policy(), signer, pins)
    monkeypatch.setattr(sessions, "_share", lambda *given: SecureResult())

    def share(*peers: SecurePeer) -> None:
        names: dict[str, Any] = {"id": "1", "kind": "share", "verb": "reduce", "label": "fedavg"}
        numbers = dict.fromkeys(("seed", "round", "attempt", "cohort", "population"), 1)
        sessions.answer(Assignment(**names, **numbers, clients=(), secure=SecureStage(peers=peers)), fl.FedAvg())

    share(peer("us"), peer("a1", "cd"))
    assert set(pins.known) == {"us", "a1"}
    with pytest.raises(Refused, match="the key of agent us is not the one that was seen first"):
        share(peer("us", "cd"))


def test_a_damaged_file_of_keys_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_text("{")
    with pytest.raises(StoreError, match="cannot be read"):
        PinnedKeys(tmp_path / "peers.json", ())


def test_what_was_unmasked_is_recalled_from_the_audit_log(tmp_path: Path) -> None:
    pins = PinnedKeys(tmp_path / "peers.json", ())
    sessions = SecureSessions("run", None, Policy(), None, pins)  # type: ignore[arg-type]
    one = ["fedavg", 1, 3, 0, 2, "model"]
    sessions.recall(
        [
            {"event": "answered", "run": "run", "unmasked": [one]},
            {"event": "answered", "run": "another", "unmasked": [["fedavg", 1, 4, 0, 2, "model"]]},
            {"event": "answered", "run": "run"},
        ]
    )
    assert sessions.unmasked == {("fedavg", 1, 3, 0, 2, "model")}


def test_a_client_of_a_site_has_one_number_in_a_run() -> None:
    """Under several numbers, the sum of "three clients" would be three times the update of one."""
    sessions = SecureSessions.__new__(SecureSessions)
    sessions.numbers = {}
    sessions.check_numbers([AssignedClient(client=4, local=0), AssignedClient(client=5, local=1)])
    with pytest.raises(Refused, match="client 6 of the run is a client of this site that has another number"):
        sessions.check_numbers([AssignedClient(client=6, local=0)])
    with pytest.raises(Refused, match="two clients of this site have one number"):
        sessions.check_numbers([AssignedClient(client=4, local=2)])
