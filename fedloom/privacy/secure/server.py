"""The server's half of secure aggregation: it relays, keeps the clients of each stage, and unmasks the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.errors import RoundAbandoned
from fedloom.privacy.secure import shamir
from fedloom.privacy.secure.graph import Graph
from fedloom.privacy.secure.masks import Vector, add_stream, agree, pair_sign
from fedloom.privacy.secure.session import Advertisement, Session, session_id


class SecureServer:
    """One session at the server. It never holds a value of a client without its mask. Errors name clients by `name`."""

    def __init__(self, session: Session, name: Callable[[int], str] = str) -> None:
        self.session, self.name = session, name
        self.advertised: dict[int, Advertisement] = {}  # U1
        self.sharers: frozenset[int] = frozenset()  # U2
        self.survivors: frozenset[int] = frozenset()  # U3
        self.signatures: dict[int, bytes] = {}  # U4
        self.wrong: set[int] = set()  # clients that gave wrong shares, which the sum did without
        self._ciphertexts: dict[int, Mapping[int, bytes]] = {}  # by sender, then by receiver
        self._masked: set[int] = set()
        self._total: Vector | None = None

    def _enough(self, members: Iterable[int], what: str) -> None:
        count = len(set(members))
        if count < self.session.threshold:
            raise RoundAbandoned(
                f"Round {self.session.round}: {count} of {self.session.clients} clients {what}, and secure aggregation "
                f"needs {self.session.threshold}."
            )

    def close_advertise(self, advertised: Iterable[Advertisement]) -> None:
        """Fix the clients whose keys arrived, and with them the session's number."""
        self.advertised = {one.client: one for one in advertised}
        self._enough(self.advertised, "sent their keys")
        self.sid = session_id(self.session, self.advertised.values())
        self.graph = Graph.of(self.session, self.sid, tuple(sorted(self.advertised)))

    def close_share(self, ciphertexts: Mapping[int, Mapping[int, bytes]]) -> None:
        """Fix the clients whose encrypted shares arrived, with a share for every holder."""
        whole = {c: sent for c, sent in ciphertexts.items() if set(sent) == set(self.graph.holders(c)) - {c}}
        self.sharers = frozenset(whole) & frozenset(self.advertised)
        self._enough(self.sharers, "shared their secrets")
        self._ciphertexts = whole

    def ciphertexts_for(self, client: int) -> dict[int, bytes]:
        """Return what the neighbours of a client encrypted for it."""
        senders = self.sharers & set(self.graph.neighbours(client))
        return {sender: self._ciphertexts[sender][client] for sender in sorted(senders)}

    def add_masked(self, client: int, vector: Vector) -> None:
        """Add a masked value to the sum. After `close_mask` it would be too late: its mask could be rebuilt."""
        if self.survivors or client not in self.sharers or client in self._masked:
            raise ValueError(f"The masked value of '{self.name(client)}' comes too late, twice or uninvited.")
        if self._total is None:
            self._total = np.zeros_like(vector)
        if vector.shape != self._total.shape or vector.dtype != self._total.dtype:
            raise ValueError(f"The masked value of '{self.name(client)}' has another length or another kind.")
        np.add(self._total, vector, out=self._total)
        self._masked.add(client)

    def close_mask(self) -> None:
        """Fix the clients that are in the sum."""
        self._enough(self._masked, "sent a masked value")
        self.survivors = frozenset(self._masked)

    def close_confirm(self, signatures: Mapping[int, bytes]) -> None:
        """Fix the clients that confirmed who is in the sum."""
        self.signatures = {client: one for client, one in signatures.items() if client in self.survivors}
        self._enough(self.signatures, "confirmed who is in the sum")

    def total(self, answers: Mapping[int, Mapping[int, bytes]]) -> Vector:
        """Return the sum of the values of all clients in `survivors`, from the shares that clients gave."""
        assert self._total is not None
        self._enough(answers, "helped to unmask the sum")
        total = self._total
        for client in sorted(self.survivors):
            add_stream(self._rebuild(client, answers), (total, -1))
        for lost in sorted(self.sharers - self.survivors):
            private = X25519PrivateKey.from_private_bytes(self._rebuild(lost, answers))
            if private.public_key().public_bytes_raw() != self.advertised[lost].mask_key:
                raise RoundAbandoned(
                    f"Round {self.session.round}: the shares of the mask key of '{self.name(lost)}' are wrong."
                )
            for peer in sorted(self.survivors & set(self.graph.neighbours(lost))):
                key = agree(private, self.advertised[peer].mask_key, self.sid, "mask")
                add_stream(key, (total, -pair_sign(peer, lost)))
        self._total = None
        return total

    def _rebuild(self, client: int, answers: Mapping[int, Mapping[int, bytes]]) -> bytes:
        """Return the one secret of a client of which the others gave shares. One client with wrong shares is found."""
        given = [one for one in self.graph.holders(client) if client in answers.get(one, {})]
        holders, needed = [one for one in given if one not in self.wrong], self.graph.threshold
        if len(holders) < needed:
            raise RoundAbandoned(
                f"Round {self.session.round}: {len(holders)} clients gave a share of the mask of "
                f"'{self.name(client)}', and {needed} are needed."
            )
        for suspect in (None, *holders[:needed]):
            used = [one for one in holders if one != suspect][:needed]
            if len(used) < needed:
                break
            with suppress(shamir.WrongShares):
                secret = shamir.combine({self.graph.point(one): answers[one][client] for one in used})
                self.wrong |= {suspect} if suspect is not None else set()
                return secret
        raise RoundAbandoned(
            f"Round {self.session.round}: the shares of the mask of '{self.name(client)}' do not belong together. It "
            "sent wrong ones, or clients that hold them did."
        )
