"""What a run trains and how: the one object that `run`, its cells and its worker groups share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedloom import user_code
from fedloom.algorithm import Algorithm
from fedloom.clock.choice import check_async, check_privacy
from fedloom.clock.system import System
from fedloom.compression.table import NO_COMPRESSION, CompressTable
from fedloom.data.agreement import with_agreed_classes
from fedloom.data.build import federate
from fedloom.data.federation import Dataset, Federation
from fedloom.data.preprocessing import Preprocessing
from fedloom.data.sources.base import locate
from fedloom.data.sources.csv import Csv
from fedloom.errors import InputError, ParameterError
from fedloom.experiment.experiment_file import DataTable, EvaluateTable, Experiment, RunTable
from fedloom.federation.sampling import Sampling
from fedloom.metrics import NUMBER_LOSSES, Metric, own_metric
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
            for algorithm in self.algorithms.values():
                aggregation.check(self.privacy.secure_aggregation, algorithm, self.cohort)
        for algorithm in self.algorithms.values():
            self.compress.check(algorithm, self.privacy)

    @staticmethod
    def of(experiment: Experiment) -> Plan:
        """Make the plan of an experiment file; data and task are loaded when they are first needed."""
        data, task = experiment.data.seed, experiment.task.seed
        agreed = lru_cache(maxsize=1)(lambda: _agreed(experiment))
        load = lru_cache(maxsize=1)(lambda: load_dataset(experiment, agreed()))
        federation = lru_cache(maxsize=1)(lambda seed: _federation(experiment, load, seed, agreed()))
        first = experiment.seeds[0] if data == "run" else data
        example = (lambda: federation(first).example()) if experiment.has_data else None
        make_task = lru_cache(maxsize=8)(lambda seed: _task(experiment, seed, example))
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
            resolved=experiment.resolved(),
            agreed=agreed,
            system=experiment.system,
            base=experiment.base,
        )


def _agreed(experiment: Experiment) -> Preprocessing | None:
    path = experiment.data.preprocessing
    return None if path is None else Preprocessing.read(locate(experiment.base, path))


def load_dataset(experiment: Experiment, agreed: Preprocessing | None = None) -> Dataset:
    """Load the data, with the categories and classes that several sites `agreed` on.

    Whole-number labels are numbers if the loss is one for numbers, and otherwise classes.
    """
    source = experiment.source
    if experiment.task.loss in NUMBER_LOSSES and getattr(source, "task", None) == "auto":
        source = source.model_copy(update={"task": "regression"})
    if agreed is not None:
        if not isinstance(source, Csv):
            raise InputError(f'[data] preprocessing is for source = "csv". Got source = "{experiment.data.source}".')
        source = source.with_categories(agreed)
    dataset = source.load(experiment.base)
    if agreed is not None:
        dataset = with_agreed_classes(dataset, agreed)
    if dataset.split is not None and experiment.data.split != DataTable.model_fields["split"].default:
        raise InputError("[data] has both split and split_column: the column says the splits, so leave out split.")
    return dataset


def _federation(
    experiment: Experiment, load: Callable[[], Dataset], seed: int, agreed: Preprocessing | None
) -> Federation:
    keys = ("partition", "split", "normalize", "scale_target", "server")
    divided = {key: getattr(experiment.data, key) for key in keys}
    try:
        return federate(load(), seed=seed, agreed=agreed, **divided)
    except ParameterError as error:
        raise InputError(error.at("data.partition")) from None


def _task(experiment: Experiment, seed: int, example: Callable[[], Tensor] | None) -> Task:
    table, base = experiment.task, experiment.base
    model, loss = table.model, table.loss
    return Task(
        user_code.code(model, base, nn.Module) if user_code.is_code(model) else model,
        loss=user_code.code(loss, base, nn.Module, Tensor) if user_code.is_code(loss) else loss,
        init=table.init if table.init in ("torch", "glorot") else str(base / table.init),
        seed=seed,
        example=example,
        metrics=[_metric(name, base) for name in table.metrics],
        args=table.args,
        dtype=table.dtype,
    )


def _metric(name: str, base: Path) -> str | Metric:
    return own_metric(user_code.code(name, base, Metric, float), name) if user_code.is_code(name) else name
