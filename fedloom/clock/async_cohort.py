"""A cohort of the next arrivals: each client trained from the version of the state that it started with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from fedloom import tree
from fedloom.clock.in_flight import InFlight
from fedloom.errors import InputError, RoundAbandoned
from fedloom.federation.cohort import Aggregate, Answers, ClientMethod, Cohort, Rule
from fedloom.federation.left_out import without_outliers
from fedloom.federation.work import ClientWork, Outcome
from fedloom.tree import Groups, Tree


@dataclass
class AsyncCohort(Cohort):
    """The clients of one asynchronous round: the next arrivals.

    `reduce` starts clients with what it shares and returns the mean over the next arrivals. Those that started with an
    earlier version count by what they changed, scaled by how stale it is.
    """

    clock: InFlight = field(kw_only=True)

    def reduce(
        self, fn: ClientMethod, shared: Groups, *, rule: Rule | None = None, each: Groups | None = None
    ) -> Aggregate:
        if self.calls:
            self._refuse("asks clients several times in a round")
        if rule is not None or each is not None:
            self._refuse("needs the answers of one cohort that started together")
        work_of = partial(self._sum_of, fn)
        taken = self.clock.arrivals(self.round, shared, work_of, self.backend)
        versions = {version: self.clock.versions[version] for version in sorted({one.version for one in taken})}
        works = []  # what starts from the same version is computed together
        for version in versions:
            works.append(work_of(version, tuple(sorted(one.client for one in taken if one.version == version))))
        self.calls += 1
        outcomes = without_outliers(self, works, [self.backend.run(work) for work in works])
        found = {version: outcome for version, outcome in zip(versions, outcomes, strict=True) if outcome.reports}
        counting = [report.client for outcome in found.values() for report in outcome.reports]
        needed = max(self.backend.fewest(counting), 1)
        if len(counting) < needed:
            raise RoundAbandoned(f"Round {self.round} has {len(counting)} updates that count, of {needed}.")
        ids = tuple(client for outcome in found.values() for client in self._keep(outcome))
        self.reports.sort(key=lambda report: report.client)
        self.ids = tuple(sorted(ids))
        self.public.update(tree.concat([outcome.public for outcome in found.values()]))
        self.publishers.update(dict.fromkeys(self.public, ids))
        late = [self.round - version for version, outcome in found.items() for _ in outcome.reports]
        self.freshness = sum(map(self.clock.sampling.freshness, late)) / len(late)
        self.note(staleness=sum(late) / len(late))
        if [*found] == [self.round]:
            return Aggregate(*self.means(found[self.round], shared), self.public)
        return Aggregate(*self._stale_means(found, versions, shared), self.public)

    def _sum_of(self, fn: ClientMethod, version: int, ids: tuple[int, ...]) -> ClientWork:
        return replace(self._work(fn, self.clock.versions[version], "sum", ids, compress=self.up), round=version)

    def _stale_means(
        self, found: dict[int, Outcome], versions: dict[int, Groups], shared: Groups
    ) -> tuple[Groups, dict[str, Tensor]]:
        """Return the means over answers of several versions, and the sums of weights.

        A group of positions moves by the mean of s(τ) · change, unless the algorithm mixes weights. Every other group
        is a plain mean.
        """
        freshness = {version: self.clock.sampling.freshness(self.round - version) for version in found}
        parts = [(version, *self.means(outcome, versions[version])) for version, outcome in found.items()]
        positions = {} if self.algorithm.mixes_weights else next(iter(found.values())).positions or {}
        weights = {group: torch.stack([each[group] for _, _, each in parts]).sum(0) for group in parts[0][2]}
        groups: Groups = {}
        for group, total in weights.items():
            like = parts[0][1][group]
            base = tree.select(shared[positions[group]], like) if group in positions else tree.zeros_like(like)
            moved = _double(base)
            for version, means, each in parts:
                share = float(each[group] / total) if total else 0.0
                before = versions[version][positions[group]] if group in positions else tree.zeros_like(like)
                scale = share * (freshness[version] if group in positions else 1.0)
                change = tree.change(_double(means[group]), _double(tree.select(before, like)))
                moved = tree.add(moved, change, scale=scale)
            groups[group] = {name: _as(moved[name], leaf.dtype) for name, leaf in like.items()}
        return groups, weights

    def map(self, fn: ClientMethod, shared: Groups, *, each: Groups | None = None) -> Answers:
        self._refuse("lets the server see each answer of a cohort")

    def exchange(self, *_: Any, **__: Any) -> Answers:
        self._refuse("lets clients exchange what they learnt")

    def _refuse(self, why: str) -> NoReturn:
        raise InputError(f'[cohort] mode = "async" is not for {type(self.algorithm).__name__}, which {why}.')


def _double(leaves: Tree) -> Tree:
    """Return leaves in double precision."""
    return {n: x.to(torch.complex128 if x.is_complex() else torch.float64) for n, x in leaves.items()}


def _as(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    return (leaf if dtype.is_floating_point or dtype.is_complex else leaf.round()).to(dtype)
