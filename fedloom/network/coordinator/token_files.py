"""Files with the coordinator's tokens: one for each agent, and the operator's."""

from __future__ import annotations

from pathlib import Path

from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.protocol.private_files import write_private
from fedloom.network.protocol.token import Token


def invite(ledger: Ledger, folder: Path, fingerprint: str, count: int) -> list[Path]:
    """Make one-time tokens, each in its own file."""
    files = []
    for _ in range(count):
        token = Token.new(fingerprint)
        ledger.invite(token.digest)
        path = folder / "tokens" / f"{token.digest[:8]}.token"
        write_private(path, f"{token}\n".encode())
        files.append(path)
    return files


def operator_token(folder: Path, fingerprint: str) -> tuple[Path, Token]:
    """Return the operator's token, which shows the agents' names; make it if it is missing."""
    path = folder / "operator.token"
    if path.is_file():
        token = Token.parse(path.read_text(encoding="utf-8"))
        if token.fingerprint == fingerprint:
            return path, token
    token = Token.new(fingerprint)
    write_private(path, f"{token}\n".encode())
    return path, token
