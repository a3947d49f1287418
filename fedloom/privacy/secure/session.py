"""What the clients and the server of one secure sum agree on, and the messages that they sign."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedloom.errors import FedloomError


class Refusal(FedloomError):
    """A client leaves a session, because going on could expose its update. It says why.

    `value` is for those who see the client's data anyway: it must not be sent.
    """

    def __init__(self, why: str, value: str = "") -> None:
        super().__init__(why)
        self.value = value


@dataclass(frozen=True)
class Session:
    """One secure sum. Every attempt is a session of its own, with new keys."""

    run: str
    round: int
    call: int
    attempt: int
    clients: int  # how many are invited; the ring has room for the sum of all of them
    threshold: int  # how many must stay until the end
    config: str  # how updates become whole numbers: every client must use the same ring

    @property
    def text(self) -> bytes:
        numbers = (self.round, self.call, self.attempt, self.clients, self.threshold)
        return pack("session", self.run, *numbers, self.config)


@dataclass(frozen=True)
class Advertisement:
    """The public keys of one client in one session, signed with the key of its enrolment."""

    client: int
    mask_key: bytes
    channel_key: bytes
    signature: bytes = b""

    def text(self, session: Session) -> bytes:
        """Return what the client signs."""
        return pack("keys", session.text, self.client, self.mask_key, self.channel_key)


@dataclass(frozen=True)
class Floors:
    """What a client requires of a session, whatever the server says."""

    clients: int = 3
    """The fewest clients in a sum."""
    threshold: float = 0.5
    """The share of the invited clients that must be needed to unmask a sum. It is always more than half of them."""

    def check(self, session: Session) -> None:
        if session.clients < self.clients or session.threshold < self.clients:
            raise Refusal(
                f"a sum must cover at least {self.clients} clients, and this session invites {session.clients} and "
                f"goes on with {session.threshold}"
            )
        needed = max(smallest_threshold(self.threshold, session.clients), session.clients // 2 + 1)
        if session.threshold < needed:
            raise Refusal(
                f"at least {needed} of {session.clients} clients must be needed to unmask a sum, and the server asks "
                f"for a threshold of {session.threshold}"
            )


def smallest_threshold(share: float, clients: int) -> int:
    """Return how many of the invited clients a share stands for, rounded up.

    >>> [smallest_threshold(0.67, clients) for clients in (3, 10, 100)]
    [3, 7, 67]
    """
    return math.ceil(round(share * clients, 9))


def pack(*parts: str | bytes | int) -> bytes:
    """Join parts together with their kinds and lengths, so that different parts never give the same bytes."""
    packed = []
    for part in parts:
        kind, raw = type(part).__name__.encode(), part if isinstance(part, bytes) else str(part).encode()
        packed.append(b"%b %d:%b" % (kind, len(raw), raw))
    return b"".join(packed)


def session_id(session: Session, advertised: Iterable[Advertisement]) -> bytes:
    """Return the number of a session: it stands for everything that was agreed and for all keys."""
    ordered = sorted(advertised, key=lambda one: one.client)
    keys = [pack(one.client, one.mask_key, one.channel_key, one.signature) for one in ordered]
    return hashlib.sha256(pack(session.text, *keys)).digest()


def without_repeated_keys(advertised: Iterable[Advertisement]) -> list[Advertisement]:
    """Leave out clients with a key that the session has twice: the others would refuse all of it.

    Keys are relayed after everybody has sent theirs, so an honest client's key is never the copied one.
    """
    found = list(advertised)
    counts = Counter(key for one in found for key in (one.mask_key, one.channel_key))
    return [one for one in found if counts[one.mask_key] == counts[one.channel_key] == 1]


def survivors_digest(sid: bytes, survivors: Iterable[int], question: bytes = b"") -> bytes:
    """Return a hash of what all clients of a sum must agree on: who is in it, and what they were asked."""
    return hashlib.sha256(pack("survivors", sid, question, *sorted(survivors))).digest()


def confirmation_text(client: int, digest: bytes) -> bytes:
    """Return what one client signs to confirm who is in the sum.

    All clients of an agent sign with its key, so the text says which of them confirms: a signature counts once.
    """
    return pack("confirmation", client, digest)


@lru_cache(maxsize=1 << 14)  # in a simulation, all clients check the same signatures
def is_signed(key: bytes, text: bytes, signature: bytes) -> bool:
    """Return whether the owner of an Ed25519 key signed a text."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
