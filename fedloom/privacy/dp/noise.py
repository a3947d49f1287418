"""Randomness from a run's secret: noise that only a restart repeats, and cohorts that nobody else can compute.

Every draw is SHAKE-256 of the secret, a purpose and the numbers that it is for. The Gaussian numbers are floating-point
numbers, which are not hardened against an attack on their last bits (Mironov, CCS 2012): noise in a ring is.
"""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.tree import Groups, add, is_whole


def derive(secret: bytes, *parts: int | float | str) -> bytes:
    """Return a key of 32 bytes for one purpose.

    >>> derive(b"secret", "noise", 1, 2) == derive(b"secret", "noise", 1, 2) != derive(b"secret", "noise", 12)
    True
    """
    return hmac.digest(secret, repr(parts).encode(), "sha256")


def uniform(key: bytes, count: int) -> NDArray[np.float64]:
    """Return `count` numbers from 0 up to, but without, 1."""
    words = np.frombuffer(hashlib.shake_256(key).digest(8 * count), dtype="<u8")
    drawn: NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


def gaussian(key: bytes, count: int) -> NDArray[np.float64]:
    """Return `count` independent standard normal numbers, by the transform of Box and Muller."""
    half = (count + 1) // 2
    drawn = uniform(key, 2 * half)
    radius = np.sqrt(-2 * np.log1p(-drawn[:half]))  # 1 − u is never 0
    angle = 2 * np.pi * drawn[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def noise_like(groups: Groups, deviation: float, key: bytes) -> Groups:
    """Return Gaussian noise with this standard deviation for every floating-point leaf, in double precision."""
    leaves = {
        (g, n): leaf for g, tree in sorted(groups.items()) for n, leaf in sorted(tree.items()) if not is_whole(leaf)
    }
    drawn = torch.from_numpy(gaussian(key, sum(leaf.numel() for leaf in leaves.values()))) * deviation
    parts = torch.split(drawn, [leaf.numel() for leaf in leaves.values()])
    found: Groups = {group: {} for group in groups}
    for ((group, name), leaf), part in zip(leaves.items(), parts, strict=True):
        found[group][name] = part.reshape(leaf.shape)
    return found


def order(secret: bytes, population: int) -> list[int]:
    """Return the clients in a random order, in which they take turns."""
    found: list[int] = np.argsort(uniform(derive(secret, "order"), population), kind="stable").tolist()
    return found


def cohort(secret: bytes, round: int, population: int, q: float, size: int | None = None) -> tuple[int, ...]:
    """Draw each client with probability `q`, or exactly `size` of them.

    The experiment's seed is public, and a cohort that others can compute hides nobody.
    """
    drawn = uniform(derive(secret, "cohort", round), population)
    chosen = np.flatnonzero(drawn < q) if size is None else np.sort(np.argsort(drawn, kind="stable")[:size])
    return tuple(int(client) for client in chosen)


# --- Correlated noise for cohorts that are not secret: DP-FTRL with a binary tree (Kairouz et al. 2021). The sum of all
# rounds up to t has the noise of at most log₂ t + 1 nodes of a tree, each of which covers 2^level rounds. Most of a
# round's noise is taken back in later rounds, so it can be small without secret cohorts. The cost follows from how
# often and how densely one client takes part: it is in every node whose rounds it is in.

Node = tuple[int, int]  # level and number: the rounds number · 2^level + 1 … (number + 1) · 2^level


def tree_nodes(rounds: int) -> list[Node]:
    """Return the nodes that together cover the first rounds.

    >>> tree_nodes(6)
    [(2, 0), (1, 2)]
    """
    found, begin = [], 0
    for level in reversed(range(rounds.bit_length())):
        if rounds >> level & 1:
            found.append((level, begin >> level))
            begin += 1 << level
    return found


def tree_sensitivity(rounds: int, separation: int, participations: int) -> float:
    """Return the most by which one client changes all nodes, in units of the clip.

    A node of 2^l rounds has at most m = min(k, ⌈2^l / separation⌉) of a client's k participations, so the squares of
    a level's counts add up to at most k · m.
    """
    most = [min(participations, -(-(1 << level) // separation)) for level in range(rounds.bit_length())]
    return float((participations * sum(most)) ** 0.5)


def tree_increment(secret: bytes, like: Groups, round: int, deviation: float) -> Groups:
    """Return the noise of one round: that of the sum up to it, minus that of the sum before it."""
    now, before = set(tree_nodes(round)), set(tree_nodes(round - 1))
    total = noise_like(like, 0.0, secret)
    for sign, changed in ((1.0, now - before), (-1.0, before - now)):
        for node in sorted(changed):
            drawn = noise_like(like, deviation, derive(secret, "tree", *node))
            total = {group: add(leaves, drawn[group], scale=sign) for group, leaves in total.items()}
    return total
