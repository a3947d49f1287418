"""Correlated noise for cohorts that are not secret: DP-FTRL with a binary tree (Kairouz et al. 2021).

The sum of all rounds up to t has the noise of at most log₂ t + 1 nodes of a tree, each of which covers 2^level rounds.
Most of a round's noise is taken back in later rounds, so it can be small without secret cohorts. The cost follows from
how often and how densely one client takes part: it is in every node whose rounds it is in.
"""

from __future__ import annotations

from fedloom import tree
from fedloom.privacy.dp import noise
from fedloom.tree import Groups

Node = tuple[int, int]  # level and number: the rounds number · 2^level + 1 … (number + 1) · 2^level


def nodes(rounds: int) -> list[Node]:
    """Return the nodes that together cover the first rounds.

    >>> nodes(6)
    [(2, 0), (1, 2)]
    """
    found, begin = [], 0
    for level in reversed(range(rounds.bit_length())):
        if rounds >> level & 1:
            found.append((level, begin >> level))
            begin += 1 << level
    return found


def sensitivity(rounds: int, separation: int, participations: int) -> float:
    """Return the most by which one client changes all nodes, in units of the clip.

    A node of 2^l rounds has at most m = min(k, ⌈2^l / separation⌉) of a client's k participations, so the squares of
    a level's counts add up to at most k · m.
    """
    most = [min(participations, -(-(1 << level) // separation)) for level in range(rounds.bit_length())]
    return float((participations * sum(most)) ** 0.5)


def increment(secret: bytes, like: Groups, round: int, deviation: float) -> Groups:
    """Return the noise of one round: that of the sum up to it, minus that of the sum before it."""
    now, before = set(nodes(round)), set(nodes(round - 1))
    total = noise.noise_like(like, 0.0, secret)
    for sign, changed in ((1.0, now - before), (-1.0, before - now)):
        for node in sorted(changed):
            drawn = noise.noise_like(like, deviation, noise.derive(secret, "tree", *node))
            total = {group: tree.add(leaves, drawn[group], scale=sign) for group, leaves in total.items()}
    return total
