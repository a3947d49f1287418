"""The ways to compute the same rounds, and how two results are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from fedloom import tree
from fedloom.algorithm import Update
from fedloom.backends.protocol import Backend
from fedloom.backends.vector import Vector, Workers
from fedloom.federation.engine import RoundRecord
from fedloom.federation.work import ClientWork, Outcome, Place, Work
from fedloom.machine import computing
from fedloom.training.clients import Setup
from fedloom.training.probe import Probe
from fedloom.tree import Groups


class InProcess(Backend):
    """Computes ranges of clients as the vector backend does, but in this process and starting with the last."""

    def __init__(self, place: Place, cuts: tuple[int, ...]) -> None:
        self.place, self.cuts = place, cuts

    def run(self, work: Work) -> Any:
        units = len(work.costs(self.place))
        borders = sorted({0, units, *(cut for cut in self.cuts if cut < units)})
        results = [work.part(begin, end).perform(self.place) for begin, end in reversed(list(pairwise(borders)))]
        merged = work.merge(reversed(results))
        if isinstance(merged, Outcome):  # sums must not depend on the order in which parts arrive
            return replace(merged, sums=work.merge(results).sums)
        return merged


class InAgents(Backend):
    """Computes as the network does: every client answers alone, and the answers are added up here."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def run(self, work: Work) -> Any:
        units = len(work.costs(self.place))
        with computing():
            if not isinstance(work, ClientWork):
                return work.merge(work.part(unit, unit + 1).perform(self.place) for unit in range(units))
            parts = [replace(work.part(unit, unit + 1), keep="stack").perform(self.place) for unit in range(units)]
        updates = [Update(part.stack, part.weights, part.public, positions=part.positions or {}) for part in parts]
        kept = work.merge(parts)
        return work.outcome(updates, kept.own, kept.reports)


ONE = "one client after another"
PAIRS = "pairs of clients side by side"


@dataclass(frozen=True)
class Way:
    """A way to compute a run. `like` names another way that must give the same bits."""

    name: str
    backend: Callable[[], Backend]
    like: str = ""


def spread(found: Probe, crews: Sequence[Workers] = (), **settings: Any) -> Iterator[Way]:
    """Iterate over the ways to spread clients over ranges, groups and processes. Each has its own copy of the task.

    A way comes after the one that it is compared with. Ways like `ONE` have the serial backend's bits.
    """

    def ranges(setup: Setup, *cuts: int) -> Callable[[], Backend]:
        return partial(InProcess, Place(found.federation, replace(found.task), setup), cuts)

    def processes(setup: Setup, crew: Workers) -> Callable[[], Backend]:
        return partial(Vector, found.federation, replace(found.task), setup, crew)

    alone, pairs, threes = (found.setup(group, **settings) for group in (1, 2, 3))
    yield Way("all clients together", ranges(alone), ONE)
    for cut in range(1, min(found.federation.clients, 3)):
        yield Way(f"the cohort cut after client {cut}", ranges(alone, cut), ONE)
    for crew in crews:
        yield Way(str(crew), processes(alone, crew), ONE)
    if pairs.group == 2:
        yield Way(PAIRS, ranges(pairs))
        yield Way(f"{PAIRS}, cut", ranges(pairs, 1), PAIRS)
        yield Way("three side by side", ranges(threes))
        for crew in crews:
            yield Way(f"{crew}, {PAIRS}", processes(pairs, crew), PAIRS)


def difference(one: Sequence[RoundRecord], other: Sequence[RoundRecord]) -> str:
    """Say in which round two runs differ first, and in what; empty if they have the same bits."""
    for left, right in zip(one, other, strict=True):
        expected, found = facts(left), facts(right)
        differing = [name for name in expected if expected[name] != found[name]]
        if differing:
            return f"round {left.round} differs in {', '.join(differing)}"
    return ""


def facts(record: RoundRecord) -> dict[str, Any]:
    """Return everything in a record except times. Equal facts mean equal bits."""
    return {
        "the server's state": bits(record.state),
        "what clients keep": {client: bits(own) for client, own in record.own.items()},
        "the cohort": record.cohort,
        "clients' evaluations": comparable(record.clients),
        "the server's evaluation": comparable(record.server),
        "the reports": comparable(record.reports),
    }


def comparable(value: Any) -> Any:
    """Return a value with the fingerprint of each tensor in its place: tensors, such as scores, have no plain `==`."""
    if isinstance(value, torch.Tensor):
        return tree.sha256({"": value})
    parts = vars(value) if is_dataclass(value) else value
    if isinstance(parts, Mapping):
        return {name: comparable(part) for name, part in parts.items()}
    return [comparable(part) for part in parts] if isinstance(parts, (list, tuple)) else parts


def bits(groups: Groups) -> dict[str, str]:
    """Return the fingerprint of every tree."""
    return {group: tree.sha256(leaves) for group, leaves in groups.items()}


def leaf_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference between two leaves, relative to the first one's largest value (at least 1)."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    kind = torch.complex128 if one.is_complex() else torch.float64
    difference = (one.to(kind) - other.to(kind)).abs()
    difference = difference.masked_fill(one == other, 0.0)  # infinities, which buffers may hold
    far = float(difference.max() / one.to(kind).abs().nan_to_num(posinf=1.0).max().clamp(min=1.0))
    return far if far == far else float("inf")


def values_distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return the same for named numbers."""
    if one.keys() != other.keys():
        return float("inf")
    both = {name: (value, other[name]) for name, value in one.items()}
    both = {name: pair for name, pair in both.items() if not all(map(math.isnan, pair))}  # undefined in both ways
    far = [abs(value - found) / max(abs(value), 1.0) for value, found in both.values()]
    return max((part if part == part else float("inf") for part in far), default=0.0)
