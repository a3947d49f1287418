"""What a run trains and how: the one object that `run`, its cells and its worker groups share.

What a run would refuse while it trains is found before it starts: targets and clients that cannot train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom import environment_reads, machine, user_code
from fedloom.algorithm import Algorithm, Central
from fedloom.clock.choice import check_async, check_privacy
from fedloom.clock.system import System
from fedloom.compression.table import NO_COMPRESSION, CompressTable
from fedloom.data import class_names
from fedloom.data.agreement import as_agreed, read_agreed
from fedloom.data.build import federate
from fedloom.data.federation import Dataset, Federation
from fedloom.data.preprocessing import Preprocessing
from fedloom.data.sources.base import locate
from fedloom.data.sources.csv import Csv
from fedloom.errors import FedloomError, InputError, ParameterError
from fedloom.experiment import unequal_weights
from fedloom.experiment.description import keeps_clients
from fedloom.experiment.experiment_file import NO_DATA, Experiment
from fedloom.experiment.model_outputs import model_args
from fedloom.experiment.tables import DataTable, EvaluateTable, RunTable
from fedloom.federation.checks import check_settings
from fedloom.federation.sampling import Sampling
from fedloom.metrics import NUMBER_LOSSES, Metric, about_direction, own_metric
from fedloom.privacy.dp import drowning
from fedloom.privacy.dp.apart import MANY, check_apart
from fedloom.privacy.dp.at_client import AtClients
from fedloom.privacy.dp.example_level import check_loss, per_example_module
from fedloom.privacy.protection import Protection
from fedloom.privacy.secure import aggregation
from fedloom.privacy.table import PrivacyTable
from fedloom.privacy.words import doubts
from fedloom.task import Task
from fedloom.training.probe import Probe, probe
from fedloom.training.settings import Training
from fedloom.training.training_rows import check_size, needs_validation
from fedloom.training.trials import some_examples
from fedloom.tuning.rehearsal import rehearse
from fedloom.unread_fields import without_effect

OF_SECOND_CLASS = ("f1", "precision", "recall", "sensitivity", "specificity", "auprc")
UNLIMITED = (-math.inf, math.inf)
MOST_DRAWS = 10_000_000  # clients × rounds: the cohorts of more rounds are not drawn beforehand


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Data and task for each seed, the algorithms to compare, and the settings of the run."""

    federation: Callable[[int], Federation]
    task: Callable[[int], Task]
    algorithms: Mapping[str, Algorithm]  # by label
    rounds: int
    seeds: tuple[int, ...]
    cohort: Sampling
    evaluate: EvaluateTable
    settings: RunTable
    privacy: PrivacyTable
    compress: CompressTable = NO_COMPRESSION
    name: str | None
    description: Callable[[], Mapping[str, Any]]  # what decides the result; reads your code files
    resolved: Mapping[str, Any] | None = None  # the experiment file with all its defaults, if there is a file
    agreed: Callable[[], Preprocessing | None] = lambda: None  # what several sites agreed on
    system: System | None = None  # clients as machines, in virtual time
    base: Path = Path()  # the folder that relative paths start at
    code_files: Callable[[], Mapping[str, Path]] = dict  # your own, if there is an experiment file
    draws_data: bool = False  # whether every seed has data of its own, or the same data split in another way
    draws_clients: bool = False  # whether every seed may have clients of its own

    def __post_init__(self) -> None:
        if self.rounds == 0 and self.privacy.on:
            raise InputError("[privacy] protects training, and rounds = 0 trains nothing. Leave [privacy] out.")
        check_privacy(self.system, self.cohort, self.privacy, self.compress)
        if self.cohort.mode == "async":
            if self.evaluate.clients == "cohort":
                raise InputError(
                    '[evaluate] clients = "cohort" measures clients before a round, and in asynchronous rounds nobody '
                    'knows before which ones answer. Use clients = "all".'
                )
            for algorithm in self.algorithms.values():
                check_async(algorithm)
        if self.privacy.secure_aggregation is not None:
            for label, algorithm in self.algorithms.items():
                aggregation.check(self.privacy.secure_aggregation, algorithm, self.cohort, label=label)
        for algorithm in self.algorithms.values():
            self.compress.check(algorithm, self.privacy)

    def in_seed(self, seed: int) -> str:
        """Return what a sentence about clients must add: whose they are, if every seed has its own."""
        return f" in seed {seed}" if self.draws_clients else ""

    def protection(self, clients: int, folder: Path | None = None, remote: bool = False) -> Protection | None:
        """Return the server's half of [privacy]; without a folder, its secrets are in memory only."""
        if not self.privacy.on:
            return None
        return Protection(self.privacy, self.cohort, clients, self.rounds, folder, remote=remote)

    def at_clients(self, folder: Path | None = None) -> AtClients | None:
        """Return what clients do by themselves in a simulation, and its ledgers."""
        alone = self.privacy.example_dp is not None or self.privacy.has_local_noise
        return AtClients(self.privacy, self.rounds, folder) if alone else None

    @staticmethod
    def of(
        experiment: Experiment, table: Preprocessing | None = None, *, served: bool = False, at_site: bool = False
    ) -> Plan:
        """Make the plan of an experiment file; data and task are loaded when they are first needed.

        If the `table` of a run is known, no data is loaded for a model that takes its features and classes as they are.
        If it is `served`, clients are elsewhere, and the server may hold all data of the file. `at_site`, others may
        have other classes and columns.
        """
        data, task = experiment.data.seed, experiment.task.seed
        agreed = lru_cache(maxsize=1)(lambda: _agreed(experiment))
        load = lru_cache(maxsize=1)(lambda: load_dataset(experiment, agreed(), at_site))
        federation = lru_cache(maxsize=1)(lambda seed: _federation(experiment, load, seed, agreed(), served))
        first = experiment.seeds[0] if data == "run" else data

        def example() -> Tensor:
            found = table or (None if experiment.has_data else agreed())  # sites with data agreed on its features
            return torch.zeros(2, *found.shape) if found else federation(first).example()

        def labels() -> Preprocessing | None:
            if (found := table or agreed()) or served or at_site or not isinstance(experiment.source, Csv):
                return found
            here = federation(first)
            return None if class_names.doubts(here) else here.preprocessing

        known = example if table or experiment.has_data or experiment.data.preprocessing is not None else None
        make_task = lru_cache(maxsize=8)(lambda seed: _task(experiment, seed, known, labels))
        return Plan(
            federation=lambda seed: federation(seed if data == "run" else data),
            task=lambda seed: make_task(seed if task == "run" else task),
            algorithms=experiment.algorithm,
            rounds=experiment.rounds,
            seeds=experiment.seeds,
            cohort=experiment.cohort,
            evaluate=experiment.evaluate,
            settings=experiment.run,
            privacy=experiment.privacy,
            compress=experiment.compress,
            name=experiment.name,
            description=experiment.description,
            resolved=experiment.as_written(),
            agreed=agreed,
            system=experiment.system,
            base=experiment.base,
            code_files=experiment.code_files,
            draws_data=data == "run" and len(experiment.seeds) > 1,
            draws_clients=not served and len(experiment.seeds) > 1 and not keeps_clients(experiment.resolved()["data"]),
        )


def _agreed(experiment: Experiment) -> Preprocessing | None:
    path = experiment.data.preprocessing
    return None if path is None else read_agreed(locate(experiment.base, path))


def load_dataset(experiment: Experiment, agreed: Preprocessing | None = None, at_site: bool = False) -> Dataset:
    """Load the data, with the categories and classes that several sites `agreed` on.

    `at_site`, other sites may have columns that a table here lacks.

    Whole-number labels are numbers if the loss is one for numbers, and otherwise classes.
    """
    if not experiment.has_data:
        raise InputError(
            f"{NO_DATA} To run it here, add [data] with a source and, if nobody holds its rows, a partition."
        )
    source = experiment.source
    if agreed is not None:
        if not isinstance(source, Csv):
            raise InputError(f'[data] preprocessing is for source = "csv". Got source = "{experiment.data.source}".')
        source = source.as_agreed(agreed)
    elif experiment.task.loss in NUMBER_LOSSES and getattr(source, "task", None) == "auto":
        source = source.model_copy(update={"task": "regression"})
    others = at_site or agreed is not None
    dataset = source.load(experiment.base, others) if isinstance(source, Csv) else source.load(experiment.base)
    if agreed is not None:
        dataset = as_agreed(dataset, agreed)
    elif user_code.is_code(experiment.task.loss) and getattr(source, "task", None) == "auto":
        class_names.check_clear(dataset.classes)
    if dataset.split is not None and experiment.data.split != DataTable.model_fields["split"].default:
        raise InputError("[data] has both split and split_column: the column says the splits, so leave out split.")
    return dataset


def _federation(
    experiment: Experiment, load: Callable[[], Dataset], seed: int, agreed: Preprocessing | None, served: bool
) -> Federation:
    keys = ("partition", "split", "normalize", "scale_target", "server")
    divided = {key: getattr(experiment.data, key) for key in keys}
    if served and experiment.server_has_all:  # as one client, which nobody asks: the clients are elsewhere
        one = federate(load(), seed=seed, agreed=agreed, **divided | {"partition": "iid", "server": None}, clients=1)
        return replace(one, server={"test": (one.x, one.y)})
    try:
        return federate(load(), seed=seed, agreed=agreed, **divided)
    except ParameterError as error:
        raise InputError(error.at("data.partition")) from None


def _task(
    experiment: Experiment,
    seed: int,
    example: Callable[[], Tensor] | None,
    labels: Callable[[], Preprocessing | None],
) -> Task:
    table, base = experiment.task, experiment.base
    model, loss = table.model, table.loss
    return Task(
        user_code.code(model, base, nn.Module) if user_code.is_code(model) else model,
        loss=user_code.code(loss, base, nn.Module, Tensor) if user_code.is_code(loss) else loss,
        init=table.init if table.init in ("torch", "glorot") else str(base / table.init),
        seed=seed,
        example=example,
        metrics=None if table.metrics is None else [_metric(name, base) for name in table.metrics],
        args=model_args(table, labels),
        dtype=table.dtype,
    )


def _metric(name: str, base: Path) -> str | Metric:
    return own_metric(user_code.code(name, base, Metric, float), name) if user_code.is_code(name) else name


def cautions(plan: Plan, task: Task, federation: Federation, seed: int | None = None) -> list[str]:
    """Say what a reader should know about the algorithms with this task and the clients of a seed, or the first one."""
    found, where = [], plan.in_seed(plan.seeds[0] if seed is None else seed)
    for label, algorithm in plan.algorithms.items():
        found += [f"{label}: {said}" for said in user_code.misspelt(type(algorithm))]
        found += [f"{label}: {said}" for said in _without_effect(algorithm)]
        if said := algorithm.caution(task):
            found.append(f"{label}: {said}.")
    least, cohort = int(federation.sizes("train").min()), plan.cohort.steady_size(federation.clients)
    weak = doubts(plan.privacy, federation.clients, least, where, cohort)
    unequal = unequal_weights.caution(weights_of(plan), federation.sizes("train").tolist(), where)
    short, positive = _without_short_batches(plan, federation, where), _about_frequent_class(task, federation)
    read = environment_reads.cautions(plan.code_files().values())
    about_noise, about_metrics = _drowned(plan, task, federation), about_direction(task.measures)
    alone = _alone(plan, federation)
    return [*found, *alone, *weak, *about_noise, *unequal, *short, *positive, *about_metrics, *_few_rounds(plan), *read]


def _alone(plan: Plan, federation: Federation) -> Iterator[str]:
    """One client: whatever it sends, there is nobody to learn from."""
    if federation.clients == 1 and not all(algorithm.pooled for algorithm in plan.algorithms.values()):
        yield (
            "There is one client, so nothing is federated, and most algorithms train the same model. A partition in "
            "[data] divides examples among several."
        )


def _drowned(plan: Plan, task: Task, federation: Federation) -> Iterator[str]:
    """Noise that is longer than all that clients can learn. Compression sends fewer numbers, which get less of it."""
    if plan.compress.up is None:
        model, sizes = task.initial(), federation.sizes("train").tolist()
        parameters = sum(model[name].numel() for name in task.trainable)
        training = next(iter(plan.algorithms.values())).train
        yield from drowning.cautions(plan.privacy, plan.cohort, plan.rounds, parameters, sizes, training)


def _about_frequent_class(task: Task, federation: Federation) -> Iterator[str]:
    """Metrics of the second of two classes, where people mostly mean the rare one."""
    names = [metric.name for metric in task.measures if metric.name in OF_SECOND_CLASS]
    if names and len(federation.classes) == 2 and not federation.y.is_floating_point():
        share = float((federation.y == 1).double().mean())
        if share > 0.5:
            first, second = federation.classes
            yield (
                f"{', '.join(names)}: the class that counts is the second by name, {second}, which {100 * share:.0f} % "
                f"of examples have. {names[0]}_of_0 is about {first}."
            )


def _without_effect(algorithm: Algorithm) -> Iterator[str]:
    """Settings that were given, and that nothing reads."""
    for name, said in without_effect(type(algorithm)).items():
        if getattr(algorithm, name) != type(algorithm).model_fields[name].get_default(call_default_factory=True):
            yield said


def _without_short_batches(plan: Plan, federation: Federation, where: str) -> Iterator[str]:
    """`drop_last` at clients that have no batch to drop: all of their examples are less than one."""
    largest = int(federation.sizes("train").max())
    labels: dict[int, list[str]] = {}  # by batch size
    for label, algorithm in plan.algorithms.items():
        smallest = min((size for size in algorithm.train.batch_sizes if isinstance(size, int)), default=0)
        if algorithm.train.drop_last and not algorithm.pooled and smallest > largest:
            labels.setdefault(smallest, []).append(label)
    for size, found in labels.items():
        yield (
            f"{', '.join(found)}: drop_last = true drops nothing{where}: the largest client has {largest:,} training "
            f"examples, fewer than batch_size = {size:,}, and a client's only batch is always used."
        )


def _few_rounds(plan: Plan) -> Iterator[str]:
    """No rounds, or a headline over more rounds than are measured."""
    if plan.rounds == 0:
        yield "rounds = 0: nothing is trained, and the model is only evaluated as it is given."
        return
    every, rule = plan.evaluate.every, plan.evaluate.headline
    measured = len({1, plan.rounds, *range(every, plan.rounds + 1, every)})
    if rule.startswith("last:") and int(rule.removeprefix("last:")) > measured:
        yield f'[evaluate] headline = "{rule}", but only {measured} rounds are measured: it is the mean of all of them.'


def weights_of(plan: Plan) -> dict[str, str]:
    """Return how each algorithm that takes a mean weighs clients."""
    found = (
        (label, getattr(one, "weights", None)) for label, one in plan.algorithms.items() if isinstance(one, Central)
    )
    return {label: weights for label, weights in found if isinstance(weights, str)}


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
