"""Stand-ins for the vector and the network backend, without processes: what they add up, in this process."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from fedloom.algorithm import Update
from fedloom.backends.protocol import Backend
from fedloom.federation.work import ClientWork, Outcome, Place, Work
from fedloom.machine import computing


class InProcess(Backend):
    """A stand-in for the vector backend without processes: ranges of clients, of which the last is computed first."""

    def __init__(self, place: Place, cuts: tuple[int, ...]) -> None:
        self.place, self.cuts = place, cuts

    def run(self, work: Work) -> Any:
        units = len(work.costs(self.place))
        borders = sorted({0, units, *(cut for cut in self.cuts if cut < units)})
        results = [work.part(begin, end).perform(self.place) for begin, end in reversed(list(pairwise(borders)))]
        merged = work.merge(reversed(results))
        if isinstance(merged, Outcome):  # sums must not depend on which part arrives first
            return replace(merged, sums=work.merge(results).sums)
        return merged


class InAgents(Backend):
    """A stand-in for the network: every client answers by itself, unsummed, and the answers are added up here."""

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
        return work.outcome_of(updates, kept.own, kept.reports)
