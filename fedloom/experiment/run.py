"""Run an experiment: every algorithm with every seed, on the same data, stored, checkpointed and resumable.

Python calls `run`; the command line, sweeps and the network coordinator call `run_plan` with the plan of a file.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedloom import tree
from fedloom.algorithm import Algorithm
from fedloom.clock.choice import NEEDS_CLOCK
from fedloom.clock.system import System
from fedloom.code_values import values_fingerprint
from fedloom.compression.table import NO_COMPRESSION, CompressTable
from fedloom.data.federation import Federation
from fedloom.errors import FRESH, UNKNOWN, FedloomError, InputError, ParameterError, nearest
from fedloom.experiment.cell import Cell
from fedloom.experiment.checks import check_start
from fedloom.experiment.control import PAUSED, Control
from fedloom.experiment.description import identity
from fedloom.experiment.experiment_file import check_label, check_top, described_system, seed_list
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress, Silent
from fedloom.experiment.run_folder import check_same_data, claimed, record_experiment, same_experiment
from fedloom.experiment.store import Store
from fedloom.experiment.tables import EvaluateTable, RunTable
from fedloom.experiment.worker_groups import Connect, name_first_seed, open_worker_groups, train_cells
from fedloom.federation.checks import check_algorithm, check_rounds, introduce
from fedloom.federation.engine import Evaluation
from fedloom.federation.sampling import Sampling
from fedloom.privacy.protection import check_plan
from fedloom.privacy.table import PrivacyTable
from fedloom.results.result import Result
from fedloom.task import Task
from fedloom.user_code import code_fingerprint


def run(
    federation: Federation | Callable[[int], Federation],
    task: Task | Callable[[int], Task],
    algorithms: Mapping[str, Algorithm] | Sequence[Algorithm] | Algorithm,
    rounds: int = 10,
    *,
    seeds: int | Sequence[int] = 1,
    cohort: Sampling = Sampling(),
    evaluate: Evaluation = EvaluateTable(),
    privacy: PrivacyTable = PrivacyTable(),
    system: System | None = None,
    compress: CompressTable = NO_COMPRESSION,
    name: str | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    description: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    verbose: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    connect: Connect | None = None,
    **settings: Any,
) -> Result:
    """Train every algorithm with every seed and keep the results in a folder; continue where an earlier run stopped.

    `federation` and `task` may be functions of the seed. `settings` are the keys of `[run]` in an experiment file, such
    as `workers=4` or `backend="serial"`. The folder is `out`, or `runs/NAME`. Without a name it is named after the
    experiment's fingerprint, so that another experiment gets another folder. `description` replaces what is recorded
    about the experiment to recognise it. `connect` makes a backend whose clients are elsewhere, such as on a network.
    """
    table = _settings(settings)
    labelled = _labelled(algorithms)
    rounds, chosen_seeds = _plain(rounds), seed_list(_plain(seeds))
    for given, kind, what in (
        (cohort, Sampling, "cohort"),
        (evaluate, Evaluation, "evaluate"),
        (privacy, PrivacyTable, "privacy"),
        *([(system, System, "system")] if system is not None else []),
        (compress, CompressTable, "compress"),
    ):
        if not isinstance(given, kind):
            raise InputError(f"'{what}' must be a fedloom.{kind.__name__}(…). Got {given!r} instead.")
    evaluation = evaluate if isinstance(evaluate, EvaluateTable) else EvaluateTable(**dict(evaluate))
    check_rounds(rounds)
    check_top({"seeds": chosen_seeds, **({"name": name} if name is not None else {})})
    _check_options(out, fresh, progress, should_stop, connect, description)
    # a class is a mistake, which is said when it is used
    is_function = callable(federation) and not isinstance(federation, type)
    # several algorithms and checks use the data of a seed, which may take long to load
    federations: Any = lru_cache(maxsize=1)(federation) if is_function else lambda seed: federation  # type: ignore[arg-type]
    tasks = task if callable(task) and not isinstance(task, (Task, nn.Module, type)) else lambda seed: task

    def task_of(seed: int) -> Task:
        return introduce(federations(seed), tasks(seed))

    plan = Plan(
        federation=federations,
        task=task_of,
        algorithms=labelled,
        rounds=rounds,
        seeds=tuple(chosen_seeds),
        cohort=cohort,
        evaluate=evaluation,
        settings=table,
        privacy=privacy,
        compress=compress,
        name=name,
        description=dict,
        system=system,
        draws_data=is_function and len(chosen_seeds) > 1,
        draws_clients=is_function and len(chosen_seeds) > 1,
    )
    described = description or _describe(plan)
    plan = replace(plan, description=lambda: described)
    progress = progress or Silent()
    result = run_plan(
        plan, out, fresh=fresh, progress=progress, verbose=verbose, should_stop=should_stop, connect=connect
    )
    if result.finished:
        _caution_about_numbers(result.folder, progress)
    return result


def _caution_about_numbers(folder: Path, progress: Progress) -> None:
    """Say what the terminal says below its table of results."""
    from fedloom.results.report_warnings import on_screen
    from fedloom.results.run_data import RunData

    for caution in on_screen(RunData.read(folder)):
        progress.caution(caution)


def run_plan(
    plan: Plan,
    out: str | Path | None = None,
    *,
    fresh: bool = False,
    progress: Progress | None = None,
    verbose: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    connect: Connect | None = None,
    say_if_done: bool = True,
) -> Result:
    """Run a plan in its folder. `connect` makes a backend whose clients are elsewhere, such as on other machines."""
    folder = Path(out or Path("runs") / (plan.name or f"run-{identity(plan.description())[:8]}"))
    progress = progress or Silent()
    check_plan(plan.privacy, plan.cohort, plan.algorithms)
    if plan.cohort.mode == "async" and plan.system is None and connect is None:
        raise InputError(NEEDS_CLOCK)
    checked = fresh and folder.exists() and connect is None
    if checked:
        check_start(plan)  # before the old folder is moved aside
    with claimed(folder, fresh), Store(folder) as store:
        try:
            same_experiment(store, folder, plan, remote=connect is not None)
        except InputError:
            if connect is None:
                check_start(plan)  # a mistake in the file says more than that the folder holds another experiment
            raise
        control = Control(folder, progress)

        def cells_of(seeds: Iterable[int]) -> list[Cell]:
            return [
                Cell(plan, folder, store.cell(label, seed), label, seed, progress, control)
                for seed in seeds
                for label in plan.algorithms
            ]

        had = {row["seed"] for row in store.cells()}
        new = [seed for seed in plan.seeds if seed not in had]
        progress.expect(len(plan.seeds) * len(plan.algorithms), plan.rounds)
        old = cells_of(seed for seed in plan.seeds if seed in had)
        cells = [cell for cell in old if not cell.is_done(store)]
        seeds = list(dict.fromkeys([*(cell.seed for cell in cells), *new]))  # that have something to compute
        begun = next((cell for cell in [*cells, *old] if cell.has_begun()), None)
        if seeds and begun is not None and connect is None:  # a refusal changes nothing
            begun.check_continues(store)
            for seed in (seed for seed in seeds if plan.draws_data and seed in had):
                check_same_data(store, plan.federation(seed), seed, own_data=True)
            check_start(plan, seeds)
            checked = True
        if not seeds and connect is None:
            _check_data(plan, store, progress)
        if new and had == {plan.seeds[0]} and plan.draws_clients:
            name_first_seed(plan, store)
        record_experiment(store, folder, plan)
        cells += cells_of(new)  # only now: a run that refuses them is as it was
        control.begin()
        if store.fact(PAUSED) is not None:  # a process ended during a pause
            store.set_fact(PAUSED, None)
        if not cells and say_if_done:
            progress.note(f"{folder} is finished: nothing is computed. Use {FRESH} to start over.")
        if cells:
            with ExitStack() as stack:
                seeds = [cell.seed for cell in cells]
                try:
                    groups = open_worker_groups(stack, plan, folder, seeds, progress, verbose, connect, checked)
                except FedloomError as error:  # the run is refused, such as for its data: no cell waits for its turn
                    for cell in (cell for cell in cells if not cell.has_begun()):
                        store.set_status(cell.number, "failed", error=str(error))
                    raise
                ended = {row["id"] for row in store.cells() if row["status"] == "done"}
                for cell in cells:
                    if cell.number in ended:  # it ended with fewer rounds than it gets now
                        store.set_status(cell.number, "waiting")
                kill = [group.kill for group in groups]
                train_cells(cells, groups, lambda: should_stop() or control.stops(), kill)
    return Result.read(folder, plan)


def _check_data(plan: Plan, store: Store, progress: Progress) -> None:
    """Refuse to show a finished run as that of data which has changed since."""
    for seed in plan.seeds:
        try:
            federation = plan.federation(seed)
        except FedloomError as error:  # such as a disk that is elsewhere: the results are still those of the run
            progress.caution(f"Whether the data is that of this run is not known: {error}")
            return
        check_same_data(store, federation, seed)


def _settings(given: Mapping[str, Any]) -> RunTable:
    """Check the settings; compare an unknown one with all parameters of `run`."""
    try:
        return RunTable(**given)
    except ParameterError as error:
        if error.problem != UNKNOWN:
            raise
        known = sorted({*inspect.signature(run).parameters, *RunTable.model_fields} - {"settings"})
        name = error.parameter
        advice = f" Got {given[name]!r} for it. Known: {', '.join(known)}.{nearest(name, known)}"
        raise ParameterError("run", name, UNKNOWN, advice) from None


def _labelled(algorithms: Mapping[str, Algorithm] | Sequence[Algorithm] | Algorithm) -> dict[str, Algorithm]:
    if isinstance(algorithms, (Algorithm, type, str)) or not isinstance(algorithms, Iterable):
        algorithms = [algorithms]
    if not isinstance(algorithms, Mapping):
        for algorithm in algorithms:
            check_algorithm(algorithm, "What you run")
        names = [type(algorithm).__name__.lower() for algorithm in algorithms]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise InputError(f"Two algorithms are called {twice}: give them labels, as in {{'a': …, 'b': …}}.")
        algorithms = dict(zip(names, algorithms, strict=True))
    for label, algorithm in algorithms.items():
        check_label(label)
        check_algorithm(algorithm, f"'{label}'")
    if not algorithms:
        raise InputError("There is nothing to run: give at least one algorithm.")
    return dict(algorithms)


def _plain(given: Any) -> Any:
    """Return numbers of numpy as those of Python."""
    return given.tolist() if isinstance(given, (np.ndarray, np.generic)) else given


def _check_options(
    out: object, fresh: object, progress: object, should_stop: object, connect: object, description: object
) -> None:
    """Raise if what is said about a run, and not about its result, is of another kind than it must be."""
    for what, given, fits, needed in (
        ("out", out, out is None or isinstance(out, (str, os.PathLike)), "the path of a folder"),
        ("fresh", fresh, isinstance(fresh, bool), "True or False"),
        (
            "progress",
            progress,
            progress is None or isinstance(progress, Progress),
            "a Progress; verbose=True says more",
        ),
        ("should_stop", should_stop, callable(should_stop), "a function that returns True or False"),
        ("connect", connect, connect is None or callable(connect), "a function that returns a backend"),
        ("description", description, description is None or isinstance(description, Mapping), "a dict"),
    ):
        if not fits:
            raise InputError(f"'{what}' must be {needed}. Got {given!r} instead.")


def _describe(plan: Plan) -> dict[str, Any]:
    """What decides the result of a run that was started from Python."""
    task, algorithms = plan.task(plan.seeds[0]), plan.algorithms
    parts = {type(part) for part in task.module.modules()}
    code = {code_fingerprint(part) for part in (*parts, task.model, task.loss, *algorithms.values(), *task.measures)}
    return {
        "data": plan.federation(plan.seeds[0]).fingerprint,
        "task": {"model": str(task.module), "loss": _name(task.loss), "init": tree.sha256(task.whole(task.initial()))},
        "code": sorted(code),
        "values": _values(task, algorithms),
        "metrics": [metric.name for metric in task.measures],
        "seeds": list(plan.seeds),
        "cohort": plan.cohort.identity(in_virtual_time=plan.system is not None),
        "evaluate": plan.evaluate.model_dump(mode="json", exclude_none=True),
        "algorithm": {k: {"name": type(a).__name__, **a.model_dump(mode="json")} for k, a in algorithms.items()},
        **({"system": described_system(plan.system, plan.base)} if plan.system is not None else {}),
        **({"privacy": private} if (private := plan.privacy.model_dump(mode="json", exclude_none=True)) else {}),
        **({"compress": packed} if (packed := plan.compress.model_dump(mode="json", exclude_none=True)) else {}),
    }


def _values(task: Task, algorithms: Mapping[str, Algorithm]) -> dict[str, str]:
    """Return hashes of what your own code uses, besides its text."""
    used = {
        "model": (task.model, task.module),
        "args": task.args,
        "loss": task.loss,
        **{f"metric {metric.name}": metric for metric in task.measures},
        **{f"algorithm {label}": algorithm for label, algorithm in algorithms.items()},
    }
    return {name: values_fingerprint(thing) for name, thing in used.items()}


def _name(thing: Any) -> str:
    return thing if isinstance(thing, str) else getattr(thing, "__qualname__", type(thing).__name__)
