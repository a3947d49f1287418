"""What a run trains and how: the one object that `run`, its cells and its worker groups share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom import user_code
from fedloom.algorithm import Algorithm
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
from fedloom.errors import InputError, ParameterError
from fedloom.experiment.description import keeps_clients
from fedloom.experiment.experiment_file import NO_DATA, Experiment
from fedloom.experiment.model_outputs import model_args
from fedloom.experiment.tables import DataTable, EvaluateTable, RunTable
from fedloom.federation.sampling import Sampling
from fedloom.metrics import NUMBER_LOSSES, Metric, own_metric
from fedloom.privacy.dp.at_client import AtClients
from fedloom.privacy.protection import Protection
from fedloom.privacy.secure import aggregation
from fedloom.privacy.table import PrivacyTable
from fedloom.task import Task


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
