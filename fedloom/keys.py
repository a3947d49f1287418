"""Counter-based randomness: every random choice is a hash of its purpose, and never depends on when it is made.

A key is a 64-bit number made from (seed, purpose, round, client, …). The draws of a key are a hash of the key and a
counter, so they do not depend on the process, the lane or the order in which clients are trained.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

MASK = 0xFFFFFFFF


def key(seed: int, *parts: int | str) -> int:
    """Return a 64-bit key for one purpose.

    >>> key(1, "batches", 3, 7) == key(1, "batches", 3, 7) != key(1, "batches", 7, 3)
    True
    """
    text = repr((int(seed), *(part if isinstance(part, str) else int(part) for part in parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def mix(values: Any) -> Any:
    """Hash 32-bit integers in int64 arrays or tensors. Products stay below 2⁶³, so nothing overflows."""
    for _ in range(3):
        values = ((values >> 16) ^ values) * 0x45D9F3B & MASK
    return (values >> 16) ^ values


def words(key: int) -> tuple[int, int]:
    """Return the two 32-bit halves of a key."""
    return key & MASK, key >> 32


def hashes(key: int, count: int) -> NDArray[np.int64]:
    """Return `count` uniformly distributed 32-bit numbers."""
    return hashes_at(key, np.arange(count, dtype=np.int64))


def hashes_at(key: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return some of the numbers of `hashes`: those at these places.

    >>> bool((hashes_at(7, np.array([0, 3])) == hashes(7, 4)[[0, 3]]).all())
    True
    """
    low, high = words(key)
    return mix(mix((places + low) & MASK) ^ high)  # type: ignore[no-any-return]


def permutation(key: int, count: int) -> NDArray[np.int64]:
    """Return the numbers 0 … count − 1 in random order.

    >>> sorted(permutation(key(1, "doc"), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(hashes(key, count), kind="stable")


def generator(key: int) -> np.random.Generator:
    """Return a counter-based numpy generator, for draws from a distribution (Dirichlet, log-normal)."""
    return np.random.Generator(np.random.Philox(key=key))


def uniform(key: Tensor, count: int, call: int) -> Tensor:
    """Return `count` uniform numbers in [0, 1) for a key tensor of two 32-bit words. It works under vmap."""
    import torch

    counter = torch.arange(count, device=key.device) + key[0]
    drawn = mix(mix(counter & MASK) ^ ((key[1] + call * 0x9E3779B1) & MASK))
    scaled: Tensor = (drawn >> 8).to(torch.float32) * 2.0**-24
    return scaled


def check_seed(seed: object, what: str = "A seed") -> None:
    """Raise if a seed is not a whole number: 1.5 would be taken for 1."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise InputError(f"{what} must be a whole number. Got {seed!r} instead.")
