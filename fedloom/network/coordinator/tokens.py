"""The tokens that a coordinator hands out, in files of its folder: one for each agent, and the operator's own."""

from __future__ import annotations

from pathlib import Path

from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.protocol.identity import Token, write_private


def invite(ledger: Ledger, network: Path, fingerprint: str, count: int) -> list[Path]:
    """New one-time tokens, each in a file of its own."""
    files = []
    for _ in range(count):
        token = Token.new(fingerprint)
        ledger.invite(token.digest)
        path = network / "tokens" / f"{token.digest[:8]}.token"
        write_private(path, f"{token}\n".encode())
        files.append(path)
    return files


def operator(network: Path, fingerprint: str) -> tuple[Path, Token]:
    """The token of whoever runs the coordinator, which lets them see who is there; made when it is missing."""
    path = network / "operator.token"
    if path.is_file():
        token = Token.parse(path.read_text(encoding="utf-8"))
        if token.fingerprint == fingerprint:
            return path, token
    token = Token.new(fingerprint)
    write_private(path, f"{token}\n".encode())
    return path, token
