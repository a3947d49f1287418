"""What a run would refuse while it trains, found before it starts: targets and clients that cannot train."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedloom.data.federation import Federation
from fedloom.errors import InputError
from fedloom.experiment.experiment_file import EvaluateTable
from fedloom.experiment.plan import Plan
from fedloom.task import Task
from fedloom.training.probe import Probe
from fedloom.training.settings import Training
from fedloom.training.training_rows import check_size, needs_validation

UNLIMITED = (-math.inf, math.inf)
MOST_DRAWS = 10_000_000  # clients × rounds: the cohorts of more rounds are not drawn beforehand


def check_target(evaluate: EvaluateTable, task: Task) -> None:
    """Raise if a target is about an unknown metric, or outside of the metric's values."""
    ranges = {"loss": UNLIMITED, **{measure.name: measure.range for measure in task.measures}}
    for metric, target in evaluate.target.items():
        if metric not in ranges:
            raise InputError(f"[evaluate] target must be about one of {', '.join(ranges)}. Got '{metric}' instead.")
        low, high = ranges[metric]
        if not low <= target <= high:
            raise InputError(
                f"[evaluate] target: {metric} is always between {low:g} and {high:g}. Got {target:g} instead."
            )


def check_clients(plan: Plan, label: str, facts: Probe) -> None:
    """Raise if clients that take part cannot train: without examples, or with too few for the model or for patience."""
    algorithm = plan.algorithms[label]
    for seed in plan.seeds:
        federation = plan.federation(seed)
        plan.cohort.check(federation.clients)
        drawn = [federation.everyone] if algorithm.pooled else sorted(_drawn(plan, federation, seed))
        _check_sizes(federation, drawn, algorithm.train, facts.layers.normalises_features)


def _drawn(plan: Plan, federation: Federation, seed: int) -> set[int]:
    """Return the clients that take part in any round. If the draws are secret or depend on a virtual clock: all."""
    count = federation.clients
    if plan.privacy.dp is not None or plan.system is not None or plan.cohort.size(count) >= count:
        return {*range(count)}
    rounds = min(plan.rounds, max(MOST_DRAWS // count, 1))
    return {client for round in range(1, rounds + 1) for client in plan.cohort.draw(count, round, seed)}


def _check_sizes(federation: Federation, ids: list[int], training: Training, normalises: bool) -> None:
    training.check_clients(lambda: [federation.name(client) for client in range(federation.clients)])
    alike = training.clients is None  # then one client of each size is enough
    for client, count in _sized(federation.counts(ids, "train"), ids, alike):
        own = training.of(federation.name(client))
        size = None if own.batch_size == "full" else own.batch_size
        check_size(federation.name(client), count, normalises, size, training.drop_last)
    if training.patience is not None:
        for client, count in _sized(federation.counts(ids, "validation"), ids, alike):
            if count == 0:
                raise needs_validation(federation.name(client))


def _sized(counts: NDArray[np.int64], ids: list[int], alike: bool) -> list[tuple[int, int]]:
    """Return clients and their numbers of examples: of all clients, or of the first with each number."""
    places = sorted(np.unique(counts, return_index=True)[1].tolist()) if alike else range(len(ids))
    return [(ids[place], int(counts[place])) for place in places]
