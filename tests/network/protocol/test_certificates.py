"""Certificates that agents pin."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from fedloom.network.protocol.certificates import fingerprint, local_authority, trusting, user_certificate


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


def test_agents_pin_a_supplied_certificate_and_not_its_ca(tmp_path: Path) -> None:
    made = local_authority(tmp_path / "ours")  # server.pem is a chain of two: the certificate, and who signed it
    pinned_by_agents = user_certificate(made.certificate, made.key).authority
    assert fingerprint(pinned_by_agents) == fingerprint(made.certificate.read_bytes()) != made.fingerprint
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.certificate, made.key)
    _handshake(server, trusting(pinned_by_agents))
