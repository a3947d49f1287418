"""Finds clients whose changes are far longer than the others', so that one client cannot ruin a round of means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.errors import InputError
from fedloom.tree import Groups, Tree, change, is_whole, select

if TYPE_CHECKING:
    from fedloom.algorithm import Update
    from fedloom.federation.work import Report
    from fedloom.task import Task

MANY = 5  # with fewer updates, the median says little
RUINOUS = 1e6  # among few updates, the factor that no honest client reaches
BESIDE = 10.0  # changes beside the model that are shorter than this times the model's own length count as this long
SMALL = 0.05  # a change shorter than this share of the model's own length counts as this long


def lengths(stacked: Tree, base: Tree) -> Tensor:
    """Return the Euclidean length of each client's change from `base`; leaves that it lacks start from zero.

    >>> lengths({"w": torch.tensor([[3.0, 4.0], [0.0, 1.0]])}, {"w": torch.tensor([0.0, 1.0])}).tolist()
    [4.242640687119285, 0.0]
    """
    leaves = {name: leaf for name, leaf in stacked.items() if not is_whole(leaf)}
    if not leaves:
        return torch.zeros(len(next(iter(stacked.values()))), dtype=torch.float64)
    moved = {name: leaf - base[name] if name in base else leaf for name, leaf in leaves.items()}
    found = _lengths(moved)
    if found.isnan().any():  # a buffer, such as a mask, may hold the same infinities before and after
        known = [name for name in leaves if name in base]
        found = _lengths({**moved, **change(select(leaves, known), select(base, known))})
    return found


def with_lengths(
    reports: Sequence[Report], update: Update, shared: Groups, task: Task, examples: Sequence[int]
) -> tuple[Report, ...]:
    """Return the clients' reports with how long each one's change of the model is, and how hard its answer pulls."""
    found = update_lengths(update, shared, task.trainable, len(reports))
    return tuple(
        replace(report, lengths=lengths, pull=pull, examples=count)
        for report, (lengths, pull), count in zip(reports, found, examples, strict=True)
    )


def update_lengths(
    update: Update, shared: Groups, trainable: Collection[str], clients: int
) -> list[tuple[dict[str, float], float]]:
    """Return for each client the lengths of its change, by group where it has weight, and its largest weight × length.

    Groups without leaves of the model, such as counts and fitness, differ widely between honest clients: they have no
    length. So do changes beside positions of the model, such as SCAFFOLD's control variates: a client that was not
    drawn for long changes its own far more than others do. Up to ten times the model's own length, theirs says nothing.
    """
    for group, base in update.positions.items():
        if base not in shared:
            raise InputError(
                f"A client method declares that '{group}' starts from '{base}', which is not in what was shared: "
                f"{', '.join(shared)}."
            )
    bases = {group: select(shared[base], update.groups[group]) for group, base in update.positions.items()}
    groups = {group: leaves for group, leaves in update.groups.items() if leaves}
    found = {group: lengths(leaves, bases.get(group, {})).tolist() for group, leaves in groups.items()}
    weights = {group: update.weights(group).tolist() for group in found}
    changed = [group for group in found if not groups[group].keys().isdisjoint(trainable)]
    smallest = {group: smallest_length(base) for group, base in bases.items()}
    of_model = [smallest[group] / SMALL for group in changed if group in smallest]
    least = dict.fromkeys(changed, BESIDE * max(1.0, *of_model) if of_model else 0.0) | smallest
    model = [group for group in found if group in least]
    return [
        (
            {group: max(found[group][n], least[group]) for group in model if weights[group][n]},
            max((weights[group][n] * found[group][n] for group in found), default=0.0),
        )
        for n in range(clients)
    ]


def smallest_length(base: Tree) -> float:
    """Return the shortest length that is told apart from others, for a position that started from `base`.

    Late in training most clients hardly change the model. Without this bound, a client that still learns would be far
    from their median.
    """
    leaves = {n: leaf.nan_to_num(0.0, 0.0, 0.0)[None] for n, leaf in base.items() if not is_whole(leaf)}
    return SMALL * float(_lengths(leaves)) if leaves else 0.0


def _lengths(moved: Tree) -> Tensor:
    square = torch.zeros((), dtype=torch.float64)
    for leaf in moved.values():
        wide = torch.complex128 if leaf.is_complex() else torch.float64
        rows = leaf.reshape(len(leaf), -1)
        square = square + torch.linalg.vector_norm(rows, dim=1, dtype=wide).square()
    return square.sqrt()


def outliers(changes: Sequence[Mapping[str, float]], examples: Sequence[int], factor: float) -> list[int]:
    """Return the positions of clients with a group whose change is longer than `factor` × the median of all clients.

    `changes` has one entry for each client: group → length, for the groups in which it has weight. A group that five
    clients or more have is judged if most of them change something. A client with more `examples` than the median
    takes more steps, so its change may be longer by as much. Among fewer clients, a change is too long only if the next
    round could not compute with it: beyond a million times the (lower) median, and beyond a million. A single client
    has nothing to be compared with: its change is too long beyond a million times a million.

    >>> outliers([{"model": length} for length in (1.0, 2.0, 1.5, 30.0, 1.0)], [20] * 5, factor=10)
    [3]
    """
    found: set[int] = set()
    typical = max(statistics.median(examples), 1) if examples else 1
    shares = [max(count / typical, 1.0) for count in examples]
    for group in {group for each in changes for group in each}:
        values = {position: each[group] for position, each in enumerate(changes) if group in each}
        if len(values) < MANY:
            typical_length = statistics.median_low(values.values()) if len(values) > 1 else RUINOUS
            longest = RUINOUS * max(typical_length, 1.0)
        else:
            longest = factor * statistics.median(values.values()) or math.inf
        found.update(one for one, value in values.items() if value > longest * shares[one])
    return sorted(found)
