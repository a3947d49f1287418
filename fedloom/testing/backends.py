"""Stand-ins for the vector backend and the network, which compute in this process."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from fedloom.algorithm import Update
from fedloom.backends.protocol import Backend
from fedloom.federation.work import ClientWork, Outcome, Place, Work
from fedloom.machine import computing


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
