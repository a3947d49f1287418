"""Certificates that agents pin."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from fedloom import faults
from fedloom.errors import InputError
from fedloom.network.protocol.certificates import (
    YEARS,
    Certificates,
    clock_problem,
    fingerprint,
    first_certificate,
    local_authority,
    trusting,
    user_certificate,
)


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """TLS between two contexts, in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="any.name"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def test_agents_trust_only_the_pinned_certificate(tmp_path: Path) -> None:
    ours, other = local_authority(tmp_path / "ours"), local_authority(tmp_path / "other")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(ours.certificate, ours.key)
    _handshake(server, trusting(ours.authority))
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(server, trusting(other.authority))


@pytest.mark.parametrize("name", ["own", "another"])
def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, name: str) -> None:
    other = local_authority(tmp_path / "other")
    local_authority(tmp_path / "ours")
    # another authority of the same name, or a certificate of another name
    (tmp_path / "ours" / "ca.pem").write_bytes(
        other.authority if name == "own" else first_certificate(other.certificate)
    )
    with pytest.raises(InputError, match=r"ca\.pem did not sign server\.pem.* renew-certificate DIR"):
        local_authority(tmp_path / "ours")


def test_agents_pin_a_supplied_certificate_and_not_its_ca(tmp_path: Path) -> None:
    made = local_authority(tmp_path / "ours")  # server.pem is a chain of two: the certificate, and who signed it
    pinned_by_agents = user_certificate(made.certificate, made.key).authority
    assert fingerprint(pinned_by_agents) == fingerprint(made.certificate.read_bytes()) != made.fingerprint
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.certificate, made.key)
    _handshake(server, trusting(pinned_by_agents))


def issued(folder: Path, years: float, monkeypatch: pytest.MonkeyPatch) -> Certificates:
    """A certificate that was made this many years ago."""
    made = local_authority(folder)  # checked with the clock of this machine
    now = faults.clock()
    monkeypatch.setattr(faults, "clock", lambda: now + years * 365.25 * 86400)
    return made


@pytest.mark.parametrize("years", [-1, YEARS + 1])
def test_a_coordinator_refuses_a_certificate_that_is_not_valid_now(
    tmp_path: Path, years: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = issued(tmp_path, years, monkeypatch)
    for use in (lambda: local_authority(tmp_path), lambda: user_certificate(made.certificate, made.key)):
        with pytest.raises(
            InputError, match=r"server\.pem cannot be used: it is valid from .* and this machine's clock"
        ):
            use()
    assert clock_problem(made.authority).startswith("it is valid from ")


def test_an_agents_wrong_clock_does_not_matter_to_its_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.network.protocol.certificates.YEARS", -1)  # expired a year ago
    monkeypatch.setattr(faults, "clock", lambda: 0.0)
    with pytest.raises(InputError, match="cannot be used"):
        local_authority(tmp_path)
    files = [tmp_path / name for name in ("server.pem", "server.key")]
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*files)
    _handshake(server, trusting((tmp_path / "ca.pem").read_bytes()))
