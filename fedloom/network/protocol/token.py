"""Tokens: a secret, and the fingerprint of the certificate to trust. One enrols an agent; another is the operator's."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass

from fedloom.errors import InputError


@dataclass(frozen=True)
class Token:
    """A secret with the fingerprint of the coordinator's certificate.

    >>> token = Token(b"s" * 16, "ab" * 32)
    >>> Token.parse(str(token)) == token
    True
    """

    secret: bytes
    fingerprint: str  # empty without TLS

    def __str__(self) -> str:
        raw = self.secret + bytes.fromhex(self.fingerprint)
        return "fl1-" + base64.b32encode(raw).decode().rstrip("=").lower()

    @staticmethod
    def parse(text: str) -> Token:
        text = text.strip()
        try:
            if not text.startswith("fl1-"):
                raise ValueError
            body = text[4:].upper()
            raw = base64.b32decode(body + "=" * (-len(body) % 8))
            if len(raw) not in (16, 48):
                raise ValueError
        except (ValueError, binascii.Error):
            raise InputError(
                "This is not an enrolment token. A token begins with 'fl1-'; `fedloom serve` prints one, and "
                "`fedloom agents invite` makes more."
            ) from None
        return Token(raw[:16], raw[16:].hex())

    @staticmethod
    def new(fingerprint: str) -> Token:
        return Token(secrets.token_bytes(16), fingerprint)

    @property
    def digest(self) -> str:
        """The hash that the coordinator keeps in place of the secret."""
        return hashlib.sha256(self.secret).hexdigest()
