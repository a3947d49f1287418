"""Shamir's secret sharing over the integers modulo 2^521 − 1: any `threshold` shares give back the secret."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache

from fedloom.errors import FedloomError

PRIME = 2**521 - 1
SECRET_BYTES, SHARE_BYTES = 32, 66


class WrongShares(FedloomError):
    """Shares do not belong together, or are too few."""


def share(secret: bytes, threshold: int, holders: Iterable[int]) -> dict[int, bytes]:
    """Return a share for each holder, whose number is at least 1. Fewer than `threshold` shares say nothing.

    >>> shares = share(bytes(32), 2, [1, 2, 3])
    >>> combine({1: shares[1], 3: shares[3]}) == bytes(32)
    True
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"A secret has {SECRET_BYTES} bytes. Got {len(secret)} instead.")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)] + [int.from_bytes(secret, "big")]
    shares = {}
    for holder in holders:
        if not 0 < holder < PRIME:
            raise ValueError(f"A holder's number must be at least 1, because 0 holds the secret. Got {holder} instead.")
        value = 0
        for coefficient in coefficients:
            value = (value * holder + coefficient) % PRIME
        shares[holder] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret from exactly as many shares as the threshold says."""
    holders = tuple(sorted(shares))
    values = (int.from_bytes(shares[holder], "big") for holder in holders)
    secret = sum(value * factor for value, factor in zip(values, _factors(holders), strict=True)) % PRIME
    if secret >> 8 * SECRET_BYTES:  # by chance, this holds for one of 2^265 wrong secrets
        raise WrongShares("The shares of a secret do not belong together, or are too few.")
    return secret.to_bytes(SECRET_BYTES, "big")


@lru_cache(maxsize=64)  # the shares of many secrets come from the same holders
def _factors(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's factors, with which the values at these points give the value at 0."""
    factors = []
    for mine in holders:
        above = below = 1
        for other in holders:
            if other != mine:
                above = above * other % PRIME
                below = below * (other - mine) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
