"""What a run would refuse while it trains, found before it starts: targets, settings and clients that cannot train."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom import machine
from fedloom.algorithm import Algorithm
from fedloom.data.federation import Federation
from fedloom.data.preprocessing import Preprocessing
from fedloom.errors import FedloomError, InputError
from fedloom.experiment.plan import Plan
from fedloom.experiment.tables import EvaluateTable
from fedloom.federation.checks import check_settings
from fedloom.privacy.dp.apart import MANY, check_apart
from fedloom.privacy.dp.example_level import check_loss, per_example_module
from fedloom.task import Task
from fedloom.training.probe import Probe, probe
from fedloom.training.settings import Training
from fedloom.training.training_rows import check_size, needs_validation
from fedloom.training.trials import some_examples
from fedloom.tuning.rehearsal import rehearse

UNLIMITED = (-math.inf, math.inf)
MOST_DRAWS = 10_000_000  # clients × rounds: the cohorts of more rounds are not drawn beforehand


def check_start(plan: Plan, seeds: Sequence[int] = ()) -> None:
    """Raise what a run with these seeds, or all of its own, would refuse in some round: nothing is trained for that."""
    if plan.settings.backend == "vector":
        machine.worker_count(plan.settings.workers)
    facts, seeds = None, seeds or plan.seeds
    plan.federation(seeds[0])  # what is wrong already here is wrong with all seeds, such as that there is no file
    for seed in seeds:
        with _naming(plan, seed):
            federation, task = plan.federation(seed), plan.task(seed)
            plan.cohort.check(federation.clients)
        if facts is None or facts.federation is not federation or facts.task is not task:
            facts = probe(federation, task)
            check_target(plan.evaluate, task)
            _check_algorithms(plan, facts)
        with _naming(plan, seed):
            for label in plan.algorithms:
                _check_clients(plan, label, seed, facts)


@contextmanager
def _naming(plan: Plan, seed: int) -> Iterator[None]:
    """Name the seed in what is refused for its data, if other seeds have other data."""
    try:
        yield
    except InputError as error:
        if plan.draws_data:
            raise InputError(f"In seed {seed}: {error}") from error
        raise


def _check_algorithms(plan: Plan, facts: Probe) -> None:
    """Raise if settings of an algorithm do not fit the task, the clients or [privacy]."""
    federation, task = facts.federation, facts.task
    protections = (plan.protection(federation.clients), plan.at_clients())
    for algorithm in plan.algorithms.values():
        check_settings(
            federation, algorithm, task, task.initial(), plan.rounds, plan.cohort, *protections, None, plan.compress
        )
    if plan.privacy.example_dp is not None:
        check_loss(facts.loss_is_mean)
        check_apart(task, per_example_module(task.module), *some_examples(federation, task, MANY))


def check_served(plan: Plan) -> None:
    """Raise what serving would refuse about the server's own data, before anybody joins."""
    federation, task = plan.federation(plan.seeds[0]), plan.task(plan.seeds[0])
    probe(federation, task)
    check_target(plan.evaluate, task)


def check_agreed(plan: Plan) -> None:
    """Raise if the model does not fit the table that sites agreed on, or a target its metrics, before anybody joins."""
    check_target(plan.evaluate, plan.task(plan.seeds[0]))
    agreed = plan.agreed()
    if agreed is not None:
        several = (2, len(agreed.label)) if len(agreed.label) > 1 else (2,)
        y = torch.zeros(2, dtype=torch.int64) if agreed.classes else torch.zeros(several)
        table = Preprocessing(label=agreed.label)
        rows = Federation(
            torch.zeros(2, *agreed.shape), y, np.array([0, 2]), classes=agreed.classes, preprocessing=table
        )
        probe(rows, plan.task(plan.seeds[0]))


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


def _check_clients(plan: Plan, label: str, seed: int, facts: Probe) -> None:
    """Raise if clients that take part cannot train: without examples, or with too few for the model or for patience."""
    federation, algorithm = facts.federation, plan.algorithms[label]
    normalises = facts.layers.normalises_features
    ids = [federation.everyone] if algorithm.pooled else [*range(federation.clients)]
    try:
        _check_sizes(federation, ids, algorithm.train, normalises)
    except InputError:  # only now: to draw the cohorts of all rounds and to rehearse one takes time
        if plan.rounds and _trains_locally(plan, algorithm, facts):
            drawn = ids if algorithm.pooled else sorted(_drawn(plan, federation, seed))
            _check_sizes(federation, drawn, algorithm.train, normalises)


def _trains_locally(plan: Plan, algorithm: Algorithm, facts: Probe) -> bool:
    """Whether clients take steps. If not, such as for one gradient, they need not have enough examples for them."""
    cohort = plan.cohort.answers(facts.federation.clients)
    try:
        reports = rehearse(algorithm, facts.federation, facts.task, facts, cohort, plan.compress)
    except InputError:  # the few examples of a rehearsal do not suffice either
        return True
    except FedloomError:  # in your own code: the run says it better, with the round and the client
        return False
    return any(report.history for report in reports or ())


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
