"""The commands serve, join, status and agents: what they check before they connect anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.cli.network import _address, _token, status
from fedloom.errors import InputError
from fedloom.network.agent import enrolment, unsigned_requests
from fedloom.network.agent.audit_log import AuditLog
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.protocol.signatures import Signer
from fedloom.network.protocol.token import Token
from tests.cli.commands import fedloom, in_this_process


@pytest.mark.parametrize(
    ("given", "expected"),
    [("0.0.0.0:8443", ("0.0.0.0", 8443)), (":1", ("0.0.0.0", 1)), ("[::1]:2", ("::1", 2)), ("host:0", ("host", 0))],
)
def test_an_address_has_a_host_and_a_port(given: str, expected: tuple[str, int]) -> None:
    assert _address(given) == expected


@pytest.mark.parametrize("given", ["8443", "host", "host:port", "host:65536"])
def test_an_address_without_a_port_is_refused(given: str) -> None:
    with pytest.raises(InputError, match=f"must be an address and a port.*Got '{given}' instead"):
        _address(given)


def test_a_certificate_needs_its_key(folder: Path) -> None:
    done = fedloom("serve", "small.toml", "--certificate", "a.pem", folder=folder, code=2)
    assert "--certificate and --key belong together" in done.stderr


def test_an_address_without_https_and_a_missing_token_file_are_refused(folder: Path) -> None:
    done = fedloom("status", "host:8443", folder=folder, code=2)
    assert "must begin with https://. Got 'host:8443' instead" in done.stderr
    done = fedloom("status", "https://host:8443", "--token-file", "no.token", folder=folder, code=2)
    assert "There is no token file no.token" in done.stderr
    (folder / "site.toml").write_text('[data]\nsource = "digits"\n')
    both = ("--token", "fl1-a", "--token-file", "t")
    done = fedloom("join", "https://host:8443", "--site", "site.toml", *both, folder=folder, code=2)
    assert "--token and --token-file both give a token: use one of them" in done.stderr


def test_a_site_checks_its_data_before_it_uses_its_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "oslo.toml"
    site.write_text('[data]\nsource = "csv"\npath = "oslo.csv"\nlabel = "y"\nscale_target = true\n')
    (tmp_path / "oslo.csv").write_text("a,y\n1,2\nx,3\n")
    join = ("join", "https://127.0.0.1:1", "--site", str(site), "--token", str(Token.new("")))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(enrolment, "TRIES", 0.0)
        in_this_process(*join, monkeypatch=monkeypatch, code=2)
        assert "oslo.csv has 'x' in column 'a'" in capsys.readouterr().err
        (tmp_path / "oslo.csv").write_text("a,y\n" + "1,2\n2,3\n" * 5)
        in_this_process(*join, monkeypatch=monkeypatch, code=1)
        assert "cannot be reached" in capsys.readouterr().err


STATUS = {"awaited_clients": 3, "seconds_left": 12.4, "accepted": 5, "rejected": 1}
SILENCE = {"silent_after": 6.0, "gone_after": 15.0}
AGENT = {"state": "ready", "doing": "idle", "clients": 2, "seconds_since_seen": 1.2, "awaited": False, "why": ""}


def shown(
    found: dict[str, Any], *arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What `fedloom status` prints if a coordinator answers like this."""
    monkeypatch.setattr(unsigned_requests, "fetch_status", lambda url, token: found)
    in_this_process("status", "https://host:8443", *arguments, monkeypatch=monkeypatch)
    return capsys.readouterr().out.splitlines()


def test_anybody_sees_numbers_and_how_to_see_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {**STATUS, "agents": {"ready": 2, "joining": 0, "gone": 1}}
    assert shown(found, monkeypatch=monkeypatch, capsys=capsys) == [
        "agents, by their last messages: 2 ready, 1 gone; 3 client(s) awaited, 12 s left",
        "answers since the coordinator started: 5 accepted, 1 rejected",
        "Add --token-file RUN/network/operator.token (on the coordinator's machine) to see names and stages.",
    ]
    assert json.loads("".join(shown(found, "--json", monkeypatch=monkeypatch, capsys=capsys))) == found
    found = {**STATUS, "awaited_clients": 0, "seconds_left": None, "agents": {"ready": 0}}
    assert (
        shown(found, monkeypatch=monkeypatch, capsys=capsys)[0]
        == "agents, by their last messages: none; 0 client(s) awaited"
    )


@pytest.mark.parametrize(
    "found", [{}, {**STATUS, "agents": []}, {**STATUS, "agents": {}, "seconds_left": "soon"}, {**STATUS, "agents": 3}]
)
def test_a_reply_that_no_coordinator_gives_is_named(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unsigned_requests, "fetch_status", lambda url, token: found)
    with pytest.raises(InputError, match="https://host:8443 did not respond as a fedloom coordinator"):
        status("https://host:8443")
    assert capsys.readouterr().out == ""


def test_a_token_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.token").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"The token file .*a\.token cannot be read: 'utf-8' codec"):
        _token(tmp_path / "a.token")


def test_the_operator_sees_names_and_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "operator.token").write_text(str(Token.new("")))
    agents = [{**AGENT, "name": "kerry", "awaited": True}, {**AGENT, "name": "clare", "state": "gone", "why": "no"}]
    found = {**STATUS, "stage": "fedavg: round 1", "agents": agents, **SILENCE}
    token = ("--token-file", str(tmp_path / "operator.token"))
    assert shown(found, *token, monkeypatch=monkeypatch, capsys=capsys) == [
        "fedavg: round 1",
        "awaited: kerry (3 client(s), 12 s left)",
        "answers since the coordinator started: 5 accepted, 1 rejected",
        f"kerry                    ready       2 client(s)  {'idle':<40} heard from 1 s ago",
        f"clare                    gone        2 client(s)  {'idle':<40} heard from 1 s ago (no)",
        "A state is what an agent last said. Not heard from for 6 s, it is silent; for 15 s, gone, and rounds that "
        "have enough answers do not wait for it.",
    ]


def test_what_a_coordinator_says_cannot_move_the_cursor_or_reorder_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "operator.token").write_text(str(Token.new("")))
    agents = [{**AGENT, "name": "\u202eyrrek", "doing": "\x1b[2J"}]
    found = {**STATUS, "stage": "round\r9", "agents": agents, **SILENCE}
    token = ("--token-file", str(tmp_path / "operator.token"))
    text = "\n".join(shown(found, *token, monkeypatch=monkeypatch, capsys=capsys))
    assert text.startswith("round\\r9\n")
    assert r"\u202eyrrek" in text
    assert r"\x1b[2J" in text
    assert not {"\r", "\u202e", "\x1b"} & set(text)


def test_agents_are_invited_listed_and_revoked(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "network")
    ledger.set_fact("fingerprint", "")
    ledger.close()
    fedloom("agents", "invite", str(tmp_path), "--count", "2", "--expires", "1h", folder=tmp_path)
    assert "expires 20" in fedloom("agents", "list", str(tmp_path), folder=tmp_path).stdout
    assert fedloom("agents", "withdraw", str(tmp_path), "all", folder=tmp_path).stdout == "Withdrew 2 token(s).\n"
    done = fedloom("agents", "invite", str(tmp_path), folder=tmp_path)
    (path,) = done.stdout.split()
    assert f"fedloom join https://HOST:PORT --token {Path(path).read_text().strip()} --site SITE.toml" in done.stderr
    ledger = Ledger(tmp_path / "network")
    ledger.set_fact("url", "https://host:1")  # as `serve` does
    ledger.enrol(Token.parse(Path(path).read_text()).digest, "kerry", "00" * 32)
    ledger.close()
    assert "replaced" not in fedloom("agents", "list", str(tmp_path), folder=tmp_path).stdout
    done = fedloom("agents", "replace", str(tmp_path), "kerry", folder=tmp_path)
    token = Path(done.stdout.strip()).read_text().strip()
    assert f"To join (once): fedloom join https://host:1 --token {token} --site SITE.toml\n" in done.stderr
    assert "The site keeps its name: kerry." in done.stderr
    ledger = Ledger(tmp_path / "network")
    ledger.enrol(Token.parse(token).digest, "kerry", "01" * 32)
    with pytest.raises(InputError, match=r"used by another agent.* `fedloom agents invite`, or .*agents replace`"):
        ledger.enrol(Token.parse(token).digest, "cork", "02" * 32)
    ledger.close()
    assert ", replaced 20" in fedloom("agents", "list", str(tmp_path), folder=tmp_path).stdout
    assert "Revoked kerry." in fedloom("agents", "revoke", str(tmp_path), "kerry", folder=tmp_path).stdout
    found = json.loads(fedloom("agents", "list", str(tmp_path), "--json", folder=tmp_path).stdout)
    assert found["unused_tokens"] == 0
    assert [(row["name"], row["revoked"] is not None) for row in found["agents"]] == [("kerry", True)]
    unknown = fedloom("agents", "revoke", str(tmp_path), "clare", folder=tmp_path, code=2)
    assert "There is no agent 'clare'. Enrolled: kerry." in unknown.stderr


def test_an_audit_is_exported_and_a_damaged_ledger_ends_with_an_error(folder: Path) -> None:
    ledger = Ledger(folder / "run" / "network")
    ledger.note("denied", "a stranger was rejected")
    ledger.close()
    done = fedloom("audit", "export", "run", "--out", "audit.jsonl", folder=folder)
    assert done.stdout == "1 record(s): audit.jsonl\n"
    assert json.loads((folder / "audit.jsonl").read_text())["message"] == "a stranger was rejected"
    (folder / "run" / "network" / "ledger.db").write_bytes(b"not a database" * 1000)
    done = fedloom("audit", "export", "run", "--out", "again.jsonl", folder=folder, code=1)
    assert "ledger" in done.stderr
    assert not (folder / "again.jsonl").exists()


def test_an_agents_audit_log_is_verified_with_its_key(folder: Path) -> None:
    signer = Signer(folder / "kerry-state" / "agent.key")
    log = AuditLog(folder / "kerry-state" / "audit.jsonl", signer)
    log.write("answered", round=1)
    log.write("answered", round=2)
    done = fedloom("audit", "verify", "kerry-state", folder=folder)
    assert done.stdout.startswith("2 signed line(s) are as the agent wrote them.")
    (folder / "kerry-state" / "agent.key").unlink()
    assert (
        "There is no kerry-state/agent.key" in fedloom("audit", "verify", "kerry-state", folder=folder, code=2).stderr
    )
    fedloom("audit", "verify", "kerry-state", "--public-key", signer.public, folder=folder)
    text = log.path.read_text()
    log.path.write_text(text.replace('"round": 1', '"round": 3'))
    done = fedloom("audit", "verify", "kerry-state", "--public-key", signer.public, folder=folder, code=2)
    assert "line 1: this agent did not sign it, or somebody changed it" in done.stderr
