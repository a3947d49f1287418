"""The commands serve, join, status and agents: what they check before they connect anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.cli.network import _address
from fedloom.errors import InputError
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.protocol.token import Token
from tests.cli.commands import fedloom


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


def test_agents_are_invited_listed_and_revoked(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "network")
    ledger.set_fact("fingerprint", "")
    ledger.close()
    (path,) = fedloom("agents", "invite", str(tmp_path), folder=tmp_path).stdout.split()
    ledger = Ledger(tmp_path / "network")
    ledger.enrol(Token.parse(Path(path).read_text()).digest, "kerry", "00" * 32)
    ledger.close()
    assert "Revoked kerry." in fedloom("agents", "revoke", str(tmp_path), "kerry", folder=tmp_path).stdout
    found = json.loads(fedloom("agents", "list", str(tmp_path), "--json", folder=tmp_path).stdout)
    assert found["unused_tokens"] == 0
    assert [(row["name"], row["revoked"] is not None) for row in found["agents"]] == [("kerry", True)]
    unknown = fedloom("agents", "revoke", str(tmp_path), "clare", folder=tmp_path, code=2)
    assert "There is no agent 'clare'. Enrolled: kerry." in unknown.stderr
