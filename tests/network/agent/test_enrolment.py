"""Registering a coordinator in an agent's state folder."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from fedloom import faults
from fedloom.errors import InputError, StoreError
from fedloom.network.agent.enrolment import enrol, locked_state, until_reached
from fedloom.network.agent.unsigned_requests import NEVER_REACHED, NotConnected, Unreachable, expecting_a_coordinator
from fedloom.network.protocol.certificates import local_authority
from fedloom.network.protocol.signatures import Signer


def test_without_a_token_the_coordinator_must_be_registered(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No coordinator is registered in .*--token-file"):
        enrol("https://host:1", None, "kerry", tmp_path)
    known = {"url": "https://old:1", "authority": "", "agent": "a", "token": "t"}
    (tmp_path / "coordinator.json").write_text(json.dumps(known))
    (tmp_path / "agent.key").write_bytes(bytes(32))
    enrol("https://new:1/", None, "kerry", tmp_path)
    assert json.loads((tmp_path / "coordinator.json").read_text()) == {**known, "url": "https://new:1"}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"url": "u", "authority": "x", "agent": "a", "token": "t"}'])
def test_a_damaged_registration_is_refused_with_a_way_back(content: str, tmp_path: Path) -> None:
    (tmp_path / "agent.key").write_bytes(bytes(32))
    (tmp_path / "coordinator.json").write_text(content)
    with pytest.raises(InputError, match=r"coordinator.json is damaged. Restore .* delete it, and join with a token"):
        enrol("https://host:1", None, "kerry", tmp_path)


def test_a_lost_or_damaged_key_is_never_replaced_in_silence(tmp_path: Path) -> None:
    known = {"url": "https://host:1", "authority": "", "agent": "a", "token": "t"}
    (tmp_path / "coordinator.json").write_text(json.dumps(known))
    with pytest.raises(InputError, match=r"agent.key is missing. Restore .* `fedloom agents replace`"):
        enrol("https://host:1", None, "kerry", tmp_path)
    assert not (tmp_path / "agent.key").exists()
    (tmp_path / "agent.key").write_bytes(b"short")
    with pytest.raises(InputError, match=r"agent.key is damaged. Restore .* `fedloom agents replace`"):
        Signer(tmp_path / "agent.key")


def test_an_agent_that_enrolled_with_tls_does_not_go_on_without(tmp_path: Path) -> None:
    authority = local_authority(tmp_path / "coordinator").authority.decode()
    known = {"url": "https://host:1", "authority": authority, "agent": "a", "token": "t"}
    (tmp_path / "coordinator.json").write_text(json.dumps(known))
    Signer(tmp_path / "agent.key")
    with pytest.raises(InputError, match="enrolled at https://host:1 with TLS, and http://host:1 has none"):
        enrol("http://host:1", None, "kerry", tmp_path)
    assert json.loads((tmp_path / "coordinator.json").read_text()) == known


def test_an_agent_whose_clock_is_wrong_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, said = local_authority(tmp_path / "coordinator").authority.decode(), list[str]()
    known = {"url": "https://host:1", "authority": authority, "agent": "a", "token": "t"}
    (tmp_path / "coordinator.json").write_text(json.dumps(known))
    Signer(tmp_path / "agent.key")
    enrol("https://host:1", None, "kerry", tmp_path, tell=said.append)
    assert said == []
    monkeypatch.setattr(faults, "clock", lambda: 0.0)
    enrol("https://host:1", None, "kerry", tmp_path, tell=said.append)
    assert said[0].endswith("If the clock is wrong, times in the audit log are wrong too.")
    assert "and this machine's clock says 1970-01-01" in said[0]


def test_a_wrong_port_is_told_once_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections fail three times; the coordinator that was reached in between has the right address."""
    monkeypatch.setattr("fedloom.network.agent.enrolment.time.sleep", lambda seconds: None)
    refused = NotConnected("The coordinator at https://host:1 cannot be reached: Connection refused.")
    busy = Unreachable("The coordinator is busy.")
    for errors, hints in (([refused] * 3, [True, False, False]), ([busy, refused], [False, False])):
        left, said = [*errors], list[str]()

        def attempt(left: list[Unreachable] = left) -> str:
            if left:
                raise left.pop(0)
            return "done"

        assert until_reached(attempt, False, said.append) == "done"
        assert [NEVER_REACHED in text for text in said] == hints
        assert all(text.endswith(" Trying again …") for text in said)


def test_without_a_server_there_is_no_connection() -> None:
    with pytest.raises(NotConnected, match="cannot be reached"), expecting_a_coordinator("https://host:1"):
        raise httpx.ConnectError("Connection refused")


def test_one_agent_at_a_time_uses_a_state_folder(tmp_path: Path) -> None:
    state, busy = tmp_path / "state", pytest.raises(StoreError, match="Another agent is running")
    with locked_state(state), busy, locked_state(state, seconds=0.1):
        pass
    with locked_state(state, seconds=0.1):
        pass
