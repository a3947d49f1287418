"""A copy of a run in which canaries take part. The real run never has any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fedloom import keys
from fedloom.algorithm import Algorithm, Update
from fedloom.audits.canaries import Canaries, Floats, estimate, evidence, lower_bound
from fedloom.backends.protocol import Backend
from fedloom.errors import InputError
from fedloom.experiment.plan import Plan
from fedloom.experiment.worker_groups import choose_setup
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.work import ClientWork, Outcome, Place, Report, Work
from fedloom.privacy.dp.client_level import is_noised
from fedloom.privacy.dp.noise import derive
from fedloom.privacy.protection import Protection
from fedloom.privacy.secure.ring import Ring, dtypes_of
from fedloom.privacy.secure.session import Refusal
from fedloom.task import Task
from fedloom.training.probe import probe
from fedloom.tree import Groups, expand, row, select, zeros_like

TIMES_THE_CLIP = 10.0  # the length of a canary's change: far too long, so that it shows whether changes are clipped
TOGETHER = 32  # canaries in one stack


@dataclass
class Watched(Protection):
    """The protection of the copy, with an attacker who sees all that it releases."""

    clients: int = 0  # canaries have the numbers after them
    canaries: Canaries = field(default_factory=lambda: Canaries.draw(0, 0))
    projections: list[Floats] = field(default_factory=list)
    clips: list[float] = field(default_factory=list)

    def draw(self, round: int, seed: int) -> tuple[int, ...]:
        assert self.dp is not None
        drawn = super().draw(round, seed)
        # where a neighbour replaces a client or what it sends, canaries that are left out send zeros
        if self.dp.mechanism.fixed or self.dp.distributed:
            return drawn
        there = np.concatenate([np.ones(self.clients, bool), self.canaries.included])
        return tuple(client for client in drawn if there[client])

    def release(self, where: Any, total: Groups, positions: Any, shared: Groups, task: Task) -> Any:
        assert self.dp is not None
        self.clips.append(self.dp.clip)
        groups, weights = super().release(where, total, positions, shared, task)
        parts = []
        for group, name in _noised(groups, positions, task):
            leaf = groups[group][name].double()
            parts.append((leaf - shared[positions[group]][name] if group in positions else leaf).flatten())
        self.projections.append(self.dp.expected * self.canaries.project(torch.cat(parts).numpy()))
        return groups, weights


@dataclass
class WithCanaries(Backend):
    """Computes clients in this process, and answers for canaries."""

    place: Place
    canaries: Canaries
    secret: bytes = b""  # of the noise that clients add to a secure sum
    forms: dict[str, Outcome] = field(default_factory=dict)  # what a client answers, by the method it runs

    def run(self, work: Work) -> Any:
        if not isinstance(work, ClientWork):
            return work.perform(self.place)
        if work.method not in self.forms:
            self.forms[work.method] = replace(work.only([0]), ids=(0,), keep="stack", guard=None).perform(self.place)
        clients = self.place.federation.clients
        real, everyone = sum(client < clients for client in work.ids), len(work.ids)
        cut = [*range(0, real, TOGETHER), *range(real, everyone, TOGETHER), everyone]
        parts = (work.part(begin, end) for begin, end in pairwise(cut))
        form = self.forms[work.method]
        answers = (part.perform(self.place) if part.ids[0] < clients else self._answer(part, form) for part in parts)
        return self._secure_sum(work, answers) if work.keep == "secure" else work.merge(answers)

    def _secure_sum(self, work: ClientWork, answers: Iterable[Outcome]) -> Outcome:
        """Return the sum in the ring, without masks: they cancel, and with many canaries they would be slow."""
        assert work.guard is not None
        like: Groups = {}
        rest: list[Outcome] = []
        for outcome in answers:
            if not rest:
                like = {group: row(stacked, 0) for group, stacked in outcome.stack.items()}
                ring = Ring(work.guard.ring, like)
                total = np.zeros(ring.size, ring.dtype)
            bases = work.guard.bases(outcome.positions or {}, outcome.stack, work.shared)
            for position, report in enumerate(outcome.reports):
                mine = {group: row(stacked, position) for group, stacked in outcome.stack.items()}
                weights = {group: float(weight[position]) for group, weight in outcome.weights.items()}
                secret = derive(self.secret, "clients", work.round, work.call, report.client)
                try:
                    total += ring.encode(mine, weights, bases, secret)
                except Refusal as why:
                    raise InputError(f"A client of the copy sends nothing: {why}.") from None
            rest.append(replace(outcome, stack={}, weights={}))
        found = work.merge(rest)
        sums, summed = ring.sums(total, len(found.reports))
        return replace(found, total=sums, weights=summed, dtypes=dtypes_of(like))

    def _answer(self, work: ClientWork, form: Outcome) -> Outcome:
        """Return updates of canaries: their directions, ten times as long as the clip."""
        guard, positions = work.guard, form.positions or {}
        assert guard is not None
        assert guard.clip is not None
        numbers, task = np.array(work.ids) - self.place.federation.clients, self.place.task
        groups: Groups = {}
        for group, stacked in form.stack.items():
            base = select(work.shared[positions[group]], stacked) if group in positions else zeros_like(row(stacked, 0))
            groups[group] = expand(base, len(numbers))
        noised = _noised(form.stack, positions, task)
        sizes = [form.stack[group][name].numel() for group, name in noised]
        length = TIMES_THE_CLIP * guard.clip * self.canaries.included[numbers, None]
        rows = torch.from_numpy(length * self.canaries.directions(numbers, sum(sizes)))
        for (group, name), moved in zip(noised, torch.split(rows, sizes, 1), strict=True):
            leaf = groups[group][name]
            groups[group][name] = (leaf + moved.reshape(leaf.shape)).to(leaf.dtype)
        weight = torch.full((len(numbers),), guard.full_weight, dtype=torch.float64)
        update = guard.apply(Update(groups, weight, positions=positions), work.shared, task)
        return work.outcome([update], work.own, tuple(Report(client) for client in work.ids))


def _noised(groups: Groups, positions: Any, task: Task) -> list[tuple[str, str]]:
    """Return the group and the name of every leaf that gets noise."""
    every = [(group, name, leaf) for group, leaves in groups.items() for name, leaf in leaves.items()]
    return [(group, name) for group, name, leaf in every if is_noised(name, leaf, group in positions, task.trainable)]


def canary_run(
    plan: Plan, algorithm: Algorithm, count: int, tell: Callable[[int], object] = lambda rounds: None
) -> dict[str, Any]:
    """Run a copy with canaries, and compare the ε that it claims with what an attacker learns."""
    seed, cohort = plan.seeds[0], plan.cohort
    federation, task = plan.federation(seed), plan.task(seed)
    clients, canaries = federation.clients, Canaries.draw(count, keys.key(seed, "canaries"))
    place = Place(federation, task, choose_setup(probe(federation, task), plan.settings, cohort.size(clients)))
    offsets = np.concatenate([federation.offsets, np.full(count, federation.offsets[-1])])
    copy = replace(federation, offsets=offsets, names=None)
    if cohort.count is not None:  # the same share of clients in a round
        cohort = cohort.replace(count=round(cohort.count * copy.clients / clients))
    table = plan.privacy.replace(example_dp=None)  # which is about examples, and canaries have none
    watched = Watched(table, cohort, copy.clients, plan.rounds, clients=clients, canaries=canaries)
    dp = watched.dp
    if dp is None:
        raise InputError("Canaries audit noise of a sum: [privacy] dp with noise = 'server' or 'distributed'.")
    quiet, backend = Evaluation(splits=(), server=()), WithCanaries(place, canaries, dp.ledger.secret)
    settings: dict[str, Any] = {"seed": seed, "sampling": cohort, "evaluation": quiet, "backend": backend}
    for record in fit(copy, task, algorithm, plan.rounds, **settings, protection=watched):
        tell(record.round)
    projections, coins = np.stack(watched.projections), canaries.included
    bound = lower_bound(evidence(projections, dp.share, np.array(watched.clips)), coins, dp.table.delta)
    guessed = estimate(projections.sum(axis=0), coins, dp.table.delta)
    return {
        "claimed": dp.epsilon,
        "delta": dp.table.delta,
        "adjacency": dp.adjacency,
        "canaries": count,
        "bound": asdict(bound),
        "estimate": guessed if np.isfinite(guessed) else None,
        "refuted": bound.epsilon > dp.epsilon,
    }
