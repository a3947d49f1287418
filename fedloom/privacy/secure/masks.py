"""Masks: keys that two clients agree on (X25519 and HKDF), and the stream of numbers of a key (AES-256 in CTR mode)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedloom.privacy.secure.session import Refusal, pack

Vector = NDArray[Any]  # of uint32 or uint64: numbers of the ring, which wrap around
BLOCK = 1 << 18  # bytes of a stream to make at a time, so that they stay in the cache
ZEROS = bytes(BLOCK)


def agree(private: X25519PrivateKey, public: bytes, sid: bytes, purpose: str) -> bytes:
    """Return the key that two clients share in a session for a purpose."""
    try:
        common = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise Refusal("a public key in the roster is not valid") from None
    return HKDF(SHA256(), 32, salt=None, info=pack(sid, purpose)).derive(common)


def is_usable(public: bytes) -> bool:
    """Return whether others can agree on a key with this one: it has 32 bytes, and is not one of the few weak ones."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def add_stream(key: bytes, *targets: tuple[Vector, int]) -> None:
    """Add the stream of a key to vectors of one length, or subtract it: each comes with the sign 1 or −1.

    A key has one stream, so it must have one use.
    """
    first = targets[0][0]
    width = BLOCK // first.itemsize
    encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    buffer = bytearray(BLOCK + 15)  # `update_into` asks for that much room
    for begin in range(0, len(first), width):
        count = min(width, len(first) - begin)
        encryptor.update_into(memoryview(ZEROS)[: count * first.itemsize], buffer)
        stream = np.frombuffer(buffer, first.dtype.newbyteorder("<"), count)
        for vector, sign in targets:
            part = vector[begin : begin + count]
            (np.add if sign > 0 else np.subtract)(part, stream, out=part)


def pair_sign(client: int, peer: int) -> int:
    """Return the sign with which a client adds the mask that it shares with a peer; the peer's sign is the other."""
    return 1 if peer < client else -1


class PairMasks:
    """Agrees on the keys of pairs of clients, and adds their masks."""

    def key(self, private: X25519PrivateKey, mine: bytes, peer: bytes, sid: bytes, purpose: str) -> bytes:
        return agree(private, peer, sid, purpose)

    def add(self, vector: Vector, client: int, keys: Mapping[int, bytes]) -> None:
        """Add the masks that a client shares with its peers, in place."""
        for peer, key in keys.items():
            add_stream(key, (vector, pair_sign(client, peer)))


class PairMasksOnce(PairMasks):
    """Does the same for all clients in one process, as in a simulation: each pair is computed once, not twice."""

    def __init__(self) -> None:
        self._keys: dict[tuple[frozenset[bytes], str], bytes] = {}
        self._ahead: dict[int, Vector] = {}  # by client: the sum of its masks that a peer computed before it
        self._done: set[tuple[int, int]] = set()

    def key(self, private: X25519PrivateKey, mine: bytes, peer: bytes, sid: bytes, purpose: str) -> bytes:
        pair = frozenset((mine, peer)), purpose
        if pair not in self._keys:
            self._keys[pair] = agree(private, peer, sid, purpose)
        return self._keys[pair]

    def add(self, vector: Vector, client: int, keys: Mapping[int, bytes]) -> None:
        if client in self._ahead:
            np.add(vector, self._ahead.pop(client), out=vector)
        for peer, key in keys.items():
            if (peer, client) in self._done:
                continue
            self._done.add((client, peer))
            ahead = self._ahead.setdefault(peer, np.zeros_like(vector))
            add_stream(key, (vector, pair_sign(client, peer)), (ahead, pair_sign(peer, client)))
