"""Which clients share masks and secrets: all with all up to 100 clients, and above that a sparse random graph.

The graph is computed from the number of the session, which depends on every client's new keys. So nobody chooses who is
whose neighbour. The sparse graph is that of Bell et al. 2020 (Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead), for a server that follows the protocol.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from fedloom.privacy.secure.session import Session

FULL = 100  # the most clients that are all neighbours of each other
CORRUPT = 0.1  # above that: the share of clients that may work together with the server
SECURITY = 40  # an update is exposed with a probability of at most 2^−40
CORRECTNESS = 20  # a sum cannot be unmasked with a probability of at most 2^−20, if no more clients are lost


@dataclass(frozen=True)
class Graph:
    """The neighbours of each client, and how many shares give back a secret."""

    sid: bytes
    members: tuple[int, ...]  # in ascending order
    degree: int
    threshold: int

    @staticmethod
    def of(session: Session, sid: bytes, members: tuple[int, ...]) -> Graph:
        lost = 1 - session.threshold / session.clients
        found = sparse(len(members), CORRUPT, lost) if session.clients > FULL else None
        degree, threshold = found or (len(members) - 1, session.threshold)
        return Graph(sid, members, degree, threshold)

    @property
    def is_full(self) -> bool:
        return self.degree >= len(self.members) - 1

    @cached_property
    def _ring(self) -> dict[int, int]:
        """The place of each client on a ring in random order: neighbours are at most degree / 2 places away."""

        def drawn(client: int) -> bytes:
            return hashlib.sha256(b"%b neighbours %d" % (self.sid, client)).digest()

        return {client: place for place, client in enumerate(sorted(self.members, key=drawn))}

    def neighbours(self, client: int) -> tuple[int, ...]:
        """Return the clients that share a mask with this one, in ascending order."""
        if self.is_full:
            return tuple(other for other in self.members if other != client)
        order, place = list(self._ring), self._ring[client]
        reach = range(1, self.degree // 2 + 1)
        return tuple(sorted(order[(place + sign * step) % len(order)] for step in reach for sign in (1, -1)))

    def holders(self, client: int) -> tuple[int, ...]:
        """Return the clients that hold shares of this one's secrets: its neighbours, and in a full graph itself."""
        return self.members if self.is_full else self.neighbours(client)

    def point(self, holder: int) -> int:
        """Return where a holder's shares are on the polynomials."""
        return self.members.index(holder) + 1


@lru_cache
def sparse(clients: int, corrupt: float, lost: float) -> tuple[int, int] | None:
    """Return the smallest degree of a random ring graph that is safe and robust, and how many shares a secret needs.

    With at most `corrupt` · clients that work with the server and `lost` · clients that vanish, it holds that: the
    honest clients that stay are connected; no client has `threshold` corrupt neighbours (together SECURITY); every
    client has `threshold` neighbours that stay (CORRECTNESS).

    >>> sparse(1000, 0.1, 0.33)
    (98, 38)
    """
    from scipy.stats import hypergeom

    bad, gone = math.floor(corrupt * clients + 1e-9), math.floor(lost * clients + 1e-9)
    for degree in range(2, clients - 1, 2):
        if _log2_disconnected(clients, degree, bad + gone) > -(SECURITY + 1):
            continue
        allowed = 2.0 ** -(SECURITY + 1) / clients
        # of a client's neighbours, how many are corrupt, and how many stay
        at_least = hypergeom.sf(np.arange(degree + 1) - 1, clients - 1, bad, degree)
        if at_least[-1] > allowed:
            continue
        threshold = max(int(np.argmax(at_least <= allowed)), 2)
        if hypergeom.cdf(threshold - 1, clients - 1, clients - 1 - gone, degree) <= 2.0**-CORRECTNESS / clients:
            return degree, threshold
    return None  # so few clients that they must all be neighbours


def _log2_disconnected(clients: int, degree: int, removed: int) -> float:
    """Bound the probability that the ring falls apart without `removed` random clients, as a logarithm.

    It needs two gaps of degree / 2 places each, and there are at most clients · (clients − degree − 1) / 2 pairs.
    """
    if removed < degree:
        return -math.inf
    pairs = math.log(clients) + math.log(clients - degree - 1) - math.log(2)
    all_removed = math.lgamma(removed + 1) - math.lgamma(removed - degree + 1)
    all_removed += math.lgamma(clients - degree + 1) - math.lgamma(clients + 1)
    return (pairs + all_removed) / math.log(2)
