"""A client's half of secure aggregation. It trusts nothing that the server says and that it can check itself."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedloom.privacy.secure import shamir
from fedloom.privacy.secure.graph import Graph
from fedloom.privacy.secure.masks import PairMasks, Vector, add_stream
from fedloom.privacy.secure.session import (
    Advertisement,
    Floors,
    Refusal,
    Session,
    confirmation_text,
    is_signed,
    pack,
    session_id,
    survivors_digest,
)

STAGES = ("advertise", "share", "mask", "confirm", "unmask")
NONCE = 12  # bytes before each ciphertext
CIPHERTEXT = NONCE + 2 * shamir.SHARE_BYTES + 16  # bytes of two encrypted shares, with AES-GCM's tag


class SecureClient:
    """One client in one session. Each stage runs once and in order; after a refusal nothing more is answered.

    `roster` says which Ed25519 key each client signs with, and `sign` signs with our own.
    """

    def __init__(
        self,
        session: Session,
        client: int,
        sign: Callable[[bytes], bytes],
        roster: Mapping[int, bytes],
        floors: Floors = Floors(),
        masks: PairMasks | None = None,
    ) -> None:
        floors.check(session)
        self.session, self.client, self.floors = session, client, floors
        self._sign, self._roster, self._masks = sign, roster, masks or PairMasks()
        self._next, self.sid = STAGES[0], b""
        self._mask_private: X25519PrivateKey | None = X25519PrivateKey.generate()
        self._channel_private: X25519PrivateKey | None = X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(shamir.SECRET_BYTES)
        self._held: dict[int, bytes] = {}  # by client: the shares of its secrets that we hold
        self._channels: dict[int, bytes] = {}  # by client: the key of our channel

    def erase(self) -> None:
        """Forget all secrets. The session is over for this client."""
        self._next = "none"
        self._mask_private = self._channel_private = None
        self._seed = b""
        self._held, self._channels = {}, {}

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Run a stage if it is the next one; a stage that fails ends the session."""
        if name != self._next:
            raise Refusal(f"the server asks for '{name}', and what follows is '{self._next}': each stage runs once")
        self._next = "none"
        try:
            yield
        except BaseException:
            self.erase()
            raise
        self._next = STAGES[STAGES.index(name) + 1] if name != STAGES[-1] else "none"

    # --- the stages

    def advertise(self) -> Advertisement:
        """Return our new public keys, signed."""
        with self._stage("advertise"):
            assert self._mask_private is not None
            assert self._channel_private is not None
            keys = (key.public_key().public_bytes_raw() for key in (self._mask_private, self._channel_private))
            mine = Advertisement(self.client, *keys)
            signature = self._sign(mine.text(self.session))
            self._mine = Advertisement(mine.client, mine.mask_key, mine.channel_key, signature)
            return self._mine

    def share(self, advertised: Sequence[Advertisement]) -> dict[int, bytes]:
        """Check everybody's keys; return the shares of our two secrets for each holder, encrypted for it."""
        with self._stage("share"):
            self._check_keys(advertised)
            self._peers = {one.client: one for one in advertised}
            self.sid = session_id(self.session, advertised)
            self.graph = Graph.of(self.session, self.sid, tuple(sorted(self._peers)))
            assert self._mask_private is not None
            holders = self.graph.holders(self.client)
            points = [self.graph.point(holder) for holder in holders]
            of_seed = shamir.share(self._seed, self.graph.threshold, points)
            of_key = shamir.share(self._mask_private.private_bytes_raw(), self.graph.threshold, points)
            both = {holder: of_seed[point] + of_key[point] for holder, point in zip(holders, points, strict=True)}
            if self.client in both:
                self._held[self.client] = both.pop(self.client)
            return {holder: self._encrypt(holder, shares) for holder, shares in both.items()}

    def mask(
        self, vector: Vector, sharers: Iterable[int], ciphertexts: Mapping[int, bytes], question: bytes = b""
    ) -> Vector:
        """Return a vector under masks that cancel in the sum with the others who shared their secrets.

        `question` says what the vector answers. Nothing is unmasked unless the others were asked the same: a server
        that sends one client another model could find its part in the sum.
        """
        with self._stage("mask"):
            self._question = question
            self._sharers = frozenset(sharers)
            self._check_members("shared their secrets", self._sharers, self._peers)
            self._check_holders("shared their secrets", self._sharers)
            # a neighbour's secrets are held by its neighbours, so we hold shares of all of our own
            expected = self._sharers & set(self.graph.neighbours(self.client))
            if set(ciphertexts) != expected:
                raise Refusal("the encrypted shares are not those of the neighbours that shared their secrets")
            self._held |= {peer: self._decrypt(peer, text) for peer, text in ciphertexts.items()}
            masked: Vector = vector.copy()
            add_stream(self._seed, (masked, 1))
            keys = {peer: self._agree(peer, "mask") for peer in sorted(expected)}
            self._masks.add(masked, self.client, keys)
            self._mask_private = self._channel_private = None
            self._seed, self._channels = b"", {}
            return masked

    def confirm(self, survivors: Iterable[int]) -> bytes:
        """Return our signature under the set of clients whose masked values arrived."""
        with self._stage("confirm"):
            self._survivors = frozenset(survivors)
            self._check_members("sent a masked value", self._survivors, self._sharers)
            self._check_holders("sent a masked value", self._survivors)
            digest = survivors_digest(self.sid, self._survivors, self._question)
            return self._sign(confirmation_text(self.client, digest))

    def unmask(self, signatures: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return exactly one share of each peer: of its seed if it is in the sum, and of its mask key if it is not."""
        with self._stage("unmask"):
            digest = survivors_digest(self.sid, self._survivors, self._question)
            for client, signature in signatures.items():
                text = confirmation_text(client, digest)
                if client not in self._survivors or not is_signed(self._roster[client], text, signature):
                    raise Refusal(
                        f"the signature of client {client} is not under the set of clients that we were shown and "
                        "the question that we answered: the server may have shown two different sets, or models"
                    )
            if len(signatures) < self.session.threshold:
                raise Refusal(
                    f"{len(signatures)} clients confirmed who is in the sum, and {self.session.threshold} are needed"
                )
            half = shamir.SHARE_BYTES
            given = {
                peer: shares[:half] if peer in self._survivors else shares[half:]
                for peer, shares in sorted(self._held.items())
            }
        self.erase()
        return given

    # --- checks

    def _check_keys(self, advertised: Sequence[Advertisement]) -> None:
        clients = [one.client for one in advertised]
        if self._mine not in advertised:
            raise Refusal("our own keys are not in the roster, or were changed")
        if len(set(clients)) < len(clients):
            raise Refusal("a client is in the roster twice")
        keys = [key for one in advertised for key in (one.mask_key, one.channel_key)]
        if len(set(keys)) < len(keys):
            raise Refusal("a key is in the roster twice")
        if len(clients) > self.session.clients:
            raise Refusal(f"the roster has {len(clients)} clients, and {self.session.clients} were invited")
        for one in advertised:
            if one.client not in self._roster:
                raise Refusal(f"client {one.client} is not known here")
            if not is_signed(self._roster[one.client], one.text(self.session), one.signature):
                raise Refusal(
                    f"the keys of client {one.client} are not signed by it for this attempt: they are forged, or were "
                    "made for another one"
                )
        self._check_members("advertised keys", set(clients), clients)

    def _check_members(self, what: str, members: Iterable[int], before: Iterable[int]) -> None:
        """Refuse a set of clients without us, with clients that are new, or with too few."""
        found = set(members)
        if self.client not in found:
            raise Refusal(f"we are not among the clients that {what}, and we did")
        if new := found - set(before):
            raise Refusal(f"client {min(new)} is among the clients that {what}, and it had left before")
        if len(found) < max(self.session.threshold, self.floors.clients):
            needed = max(self.session.threshold, self.floors.clients)
            raise Refusal(f"{len(found)} clients {what}, and {needed} are needed")

    def _check_holders(self, what: str, members: Iterable[int]) -> None:
        """Refuse a set in which too few hold our shares: in a sparse graph, all our neighbours may be missing."""
        holders = set(members).intersection(self.graph.holders(self.client))
        if len(holders) < self.graph.threshold:
            raise Refusal(f"{len(holders)} clients that hold our shares {what}, and {self.graph.threshold} are needed")

    # --- the channels between clients

    def _agree(self, peer: int, purpose: str) -> bytes:
        one = self._peers[peer]
        if purpose == "mask":
            private, mine, theirs = self._mask_private, self._mine.mask_key, one.mask_key
        else:
            private, mine, theirs = self._channel_private, self._mine.channel_key, one.channel_key
        assert private is not None
        return self._masks.key(private, mine, theirs, self.sid, purpose)

    def _channel(self, peer: int) -> AESGCM:
        if peer not in self._channels:
            self._channels[peer] = self._agree(peer, "enc")
        return AESGCM(self._channels[peer])

    def _encrypt(self, peer: int, shares: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE)
        return nonce + self._channel(peer).encrypt(nonce, shares, pack(self.sid, self.client, peer))

    def _decrypt(self, peer: int, text: bytes) -> bytes:
        try:
            shares = self._channel(peer).decrypt(text[:NONCE], text[NONCE:], pack(self.sid, peer, self.client))
        except (InvalidTag, ValueError):
            raise Refusal(f"the shares of client {peer} were changed on their way") from None
        if len(shares) != 2 * shamir.SHARE_BYTES:
            raise Refusal(f"the shares of client {peer} have the wrong length")
        return shares
