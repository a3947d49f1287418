"""Signed requests: agents sign method, path, body, time, nonce, session and process; the coordinator verifies them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedloom import faults
from fedloom.errors import InputError
from fedloom.files import write_private
from fedloom.network.protocol.rejection import Rejected

LOST_KEY = (
    "Restore it from a copy; or delete it and coordinator.json, and join with the token that the operator makes with "
    "`fedloom agents replace`: your clients keep their numbers, and what is still on this disk."
)
WINDOW = 120.0  # seconds between an agent's clock and the coordinator's
HEADERS = AGENT, TIME, NONCE, SESSION, PROCESS, BODY, SIGNATURE = (
    *(f"fedloom-{name}" for name in ("agent", "time", "nonce", "session", "process", "body", "signature")),
)


def signed_text(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """Return the bytes that a request's signature covers."""
    values = (headers.get(name, "") for name in (BODY, TIME, NONCE, SESSION, PROCESS))
    return "\n".join(("fedloom 2", method, path, *values)).encode()


def new_key_text(agent: str) -> bytes:
    """Return the bytes that an agent's next key signs, to show that the agent has it."""
    return f"fedloom new key\n{agent}".encode()


class Signer:
    """An agent's key in a file of mode 0600, with what the agent knows about the coordinator's clock and session."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            write_private(path, Ed25519PrivateKey.generate().private_bytes_raw())
        try:
            self._key = Ed25519PrivateKey.from_private_bytes(path.read_bytes())
        except ValueError:
            raise InputError(f"The key {path} is damaged. {LOST_KEY}") from None
        kept = path.with_name("mark.key")  # the first key, if this is another one
        self._mark = kept.read_bytes() if kept.is_file() else self._key.private_bytes_raw()
        self.process = begin_process(path.with_name("process.json"))
        self.agent = ""
        self.session = ""
        self.offset = 0.0  # seconds that the coordinator's clock is ahead of ours

    @property
    def public(self) -> str:
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, text: bytes) -> str:
        """Return the signature of a text."""
        return self._key.sign(text).hex()

    def mark(self, text: str) -> str:
        """Return a mark that shows whether a text changed. Only the owner of the first key can compute it."""
        return hashlib.sha256(self._mark + text.encode()).hexdigest()

    def headers(self, method: str, path: str, body: str) -> dict[str, str]:
        """Return the headers that sign a request; `body` is the SHA-256 of its body."""
        when, nonce = f"{faults.clock() + self.offset:.3f}", secrets.token_hex(12)
        headers = {
            AGENT: self.agent,
            TIME: when,
            NONCE: nonce,
            SESSION: self.session,
            PROCESS: self.process,
            BODY: body,
        }
        return {**headers, SIGNATURE: self.sign(signed_text(method, path, headers))}


def signed_by(key: str, text: bytes, signature: str) -> bool:
    """Return whether the owner of a public key signed a text."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), text)
    except (InvalidSignature, ValueError):
        return False
    return True


@cache  # several signers in one process are one agent
def begin_process(file: Path) -> str:
    """Return a random number for this process and that of the process before it in the same folder, if there was one.

    A folder that was copied names no process before: its agent is another one, not the next one.
    """
    here, number = f"{socket.gethostname()}:{file.resolve()}", secrets.token_hex(8)
    try:
        before = json.loads(file.read_text())
        previous = str(before["process"]) if before["place"] == here else ""
    except (OSError, ValueError, KeyError, TypeError):
        previous = ""
    with contextlib.suppress(OSError):  # on a full disk, the next process must wait until this one counts as lost
        file.write_text(json.dumps({"process": number, "place": here}))
    return f"{number} {previous}".strip()


@dataclass
class Verifier:
    """Verifies signatures, and remembers nonces so that no request counts twice.

    The session is a random number of this process: a request recorded before a restart is worth nothing after it.
    """

    session: str = field(default_factory=lambda: secrets.token_hex(16))
    seen: dict[str, float] = field(default_factory=dict)  # nonce → until when it must be remembered
    swept: float = 0.0

    def check(self, key: str, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raise `Rejected` unless the owner of the public key made exactly this request, now and for the first time."""
        try:
            when = float(headers[TIME])
            signature = bytes.fromhex(headers[SIGNATURE])
            public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        except (KeyError, ValueError):
            raise Rejected("unsigned", "The request is not signed.") from None
        if not 0 < len(headers.get(NONCE, "")) <= 64:
            raise Rejected("unsigned", "The request has no nonce, or one that is too long.")
        try:
            public.verify(signature, signed_text(method, path, headers))
        except InvalidSignature:
            raise Rejected("signature", "The signature does not belong to this request.") from None
        if headers.get(SESSION) != self.session:
            raise Rejected("session", "The request was signed for another session of the coordinator.")
        now = faults.clock()
        if not abs(now - when) <= WINDOW:
            raise Rejected("clock", f"The request's time is {now - when:+.0f} s away from the coordinator's clock.")
        if headers[NONCE] in self.seen:
            raise Rejected("replayed", "This request was made before.")
        self.seen[headers[NONCE]] = when + 2 * WINDOW
        if now - self.swept > WINDOW:
            self.seen = {nonce: until for nonce, until in self.seen.items() if until > now}
            self.swept = now
