"""Run an experiment: every algorithm with every seed, on the same data, stored, checkpointed and resumable.

The command line and Python call the same function, `run`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom import machine, tree
from fedloom.algorithm import Algorithm
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Vector, Workers
from fedloom.clients import Setup
from fedloom.cohort import Backend, Sampling
from fedloom.data.describe import label_counts
from fedloom.data.federation import Federation
from fedloom.engine import Evaluation, RoundRecord, Snapshot, fit
from fedloom.errors import FedloomError, InputError, QuorumError, StoreError
from fedloom.evaluation import Measured
from fedloom.experiment import checkpoint, parallel
from fedloom.experiment.folder import claimed, same_experiment
from fedloom.experiment.progress import Progress, Silent
from fedloom.experiment.result import Result
from fedloom.experiment.spec import EvaluateTable, RunTable, check_label, check_top, identity
from fedloom.experiment.store import Store
from fedloom.local import Groups
from fedloom.probe import Probe, probe
from fedloom.resolve import code_fingerprint
from fedloom.task import GENERATOR, Task

if TYPE_CHECKING:
    from fedloom.backends.cluster import Cluster

Connect = Callable[[Federation, Task], Backend]


def run(
    federation: Federation | Callable[[int], Federation],
    task: Task | Callable[[int], Task],
    algorithms: Mapping[str, Algorithm] | Sequence[Algorithm] | Algorithm,
    rounds: int = 10,
    *,
    seeds: int | Sequence[int] = 1,
    cohort: Sampling = Sampling(),
    evaluate: Evaluation = EvaluateTable(),
    name: str | None = None,
    out: str | Path | None = None,
    backend: str = "vector",
    workers: int | str = "auto",
    group: int | str = "auto",
    compile: bool | str = "auto",
    device: str = "auto",
    cells: int | str = "auto",
    address: str = "local",
    nodes: int | str = "auto",
    checkpoint_every: int = 1,
    keep_models: bool = False,
    fresh: bool = False,
    description: Mapping[str, Any] | None = None,
    resolved: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    verbose: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    connect: Connect | None = None,
) -> Result:
    """Train every algorithm with every seed and keep all that happened in a folder; go on where an earlier run stopped.

    `federation` and `task` may be functions of the seed. The folder is `out`, or `runs/NAME`; without a name it
    is called after the experiment's fingerprint, so that another experiment gets another folder. `connect` makes a
    backend of another kind than the named ones, such as one whose clients are on other machines.
    """
    labelled = _labelled(algorithms)
    seed_list = tuple(range(1, seeds + 1)) if isinstance(seeds, int) else tuple(seeds)
    for given, kind, what in ((cohort, Sampling, "cohort"), (evaluate, Evaluation, "evaluate")):
        if not isinstance(given, kind):
            raise InputError(f"'{what}' must be a fedloom.{kind.__name__}(…). Got {given!r} instead.")
    evaluation = evaluate if isinstance(evaluate, EvaluateTable) else EvaluateTable(**_fields(evaluate))
    settings = RunTable(
        backend=backend,
        workers=workers,
        group=group,
        compile=compile,
        device=device,
        cells=cells,
        address=address,
        nodes=nodes,
        checkpoint_every=checkpoint_every,
        keep_models=keep_models,
    )
    _check_numbers(rounds, seed_list, name)
    federations = federation if callable(federation) else lambda seed: federation
    tasks = task if callable(task) and not isinstance(task, Task) else lambda seed: task
    described = dict(description or _describe(federations, tasks, labelled, seed_list, cohort, evaluation))
    title = name or f"run-{identity(described)[:8]}"
    folder = Path(out) if out is not None else Path("runs") / title
    told = progress or Silent()
    with claimed(folder, fresh), Store(folder) as store:
        same_experiment(store, folder, described, rounds, resolved)
        todo = [
            _Cell(folder, store.cell(label, seed), label, seed, algorithm, rounds, cohort, evaluation, settings, told)
            for seed in seed_list
            for label, algorithm in labelled.items()
        ]
        told.expect(len(todo), rounds)
        todo = [cell for cell in todo if not cell.is_done(store)]
        if todo:
            with ExitStack() as stack:
                lanes = _lanes(stack, folder, todo, federations, tasks, settings, cohort, told, verbose, connect)
                parallel.train(todo, lanes, should_stop, [lane.kill for lane in lanes])
    return Result.read(folder, tasks, labelled)


def _lanes(
    stack: ExitStack,
    folder: Path,
    todo: Sequence[_Cell],
    federations: Callable[[int], Federation],
    tasks: Callable[[int], Task],
    settings: RunTable,
    cohort: Sampling,
    progress: Progress,
    verbose: bool,
    connect: Connect | None,
) -> list[_Backends]:
    """Where cells are computed: in one lane with all workers, or in several with some of them each."""
    # first of all: they load torch while this process loads the data
    workers = start_workers(settings, progress.note) if connect is None else None
    if workers is not None:
        stack.callback(workers.close)
    everyone: list[Workers | Cluster | None] = [workers]
    if isinstance(workers, Workers):
        federation = federations(todo[0].seed)
        data = sum(array.nbytes for array in (federation.x, federation.y))
        wanted = settings.cells if settings.cells != "auto" else parallel.lanes(len(todo), len(workers), data)
        everyone = [*parallel.divide(workers, min(wanted, len(todo), len(workers)))]
    return [
        stack.enter_context(
            _Backends(
                federations,
                tasks,
                settings,
                cohort,
                stack.enter_context(Store(folder)),
                progress,
                verbose,
                group,
                connect,
            )
        )
        for group in everyone
    ]


def start_workers(settings: RunTable, tell: Callable[[str], None]) -> Workers | Cluster | None:
    """The processes that compute clients; None where this one does."""
    if settings.backend == "serial":
        return None
    if settings.backend == "vector":
        return Workers(machine.cores() if settings.workers == "auto" else settings.workers)
    from fedloom.backends.cluster import Cluster

    return Cluster(settings.address, settings.nodes, settings.workers, tell)


def backend_on(workers: Workers | Cluster | None, federation: Federation, task: Task, setup: Setup) -> Backend:
    """The backend that spreads work over these processes."""
    if workers is None:
        return Serial(federation, task, setup)
    if isinstance(workers, Workers):
        return Vector(federation, task, setup, workers)
    from fedloom.backends.ray import Ray

    return Ray(federation, task, setup, workers)


def _check_numbers(rounds: object, seeds: Sequence[object], name: object) -> None:
    if type(rounds) is not int or rounds < 1:
        raise InputError(f"rounds must be a whole number, at least 1. Got {rounds!r} instead.")
    check_top({"seeds": list(seeds), **({"name": name} if name is not None else {})})


def _labelled(algorithms: Mapping[str, Algorithm] | Sequence[Algorithm] | Algorithm) -> dict[str, Algorithm]:
    if isinstance(algorithms, Algorithm):
        algorithms = [algorithms]
    if not isinstance(algorithms, Mapping):
        names = [type(algorithm).__name__.lower() for algorithm in algorithms]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise InputError(f"Two algorithms are called {twice}: give them labels, as in {{'a': …, 'b': …}}.")
        algorithms = dict(zip(names, algorithms, strict=True))
    for label, algorithm in algorithms.items():
        check_label(label)
        if not isinstance(algorithm, Algorithm):
            raise InputError(f"'{label}' must be an algorithm, such as fedloom.FedAvg(). Got {algorithm!r} instead.")
    if not algorithms:
        raise InputError("There is nothing to run: give at least one algorithm.")
    return dict(algorithms)


def _describe(
    federations: Callable[[int], Federation],
    tasks: Callable[[int], Task],
    algorithms: Mapping[str, Algorithm],
    seeds: Sequence[int],
    cohort: Sampling,
    evaluation: EvaluateTable,
) -> dict[str, Any]:
    """What decides the result of a run that was started from Python."""
    task = tasks(seeds[0])
    parts = {type(part) for part in task.module.modules()}
    code = {code_fingerprint(part) for part in (*parts, task.model, task.loss, *algorithms.values(), *task.measures)}
    return {
        "data": federations(seeds[0]).fingerprint,
        "task": {"model": str(task.module), "loss": _name(task.loss), "init": tree.sha256(task.initial())},
        "code": sorted(code),
        "metrics": [metric.name for metric in task.measures],
        "seeds": list(seeds),
        "cohort": cohort.identity(),
        "evaluate": evaluation.model_dump(mode="json", exclude_none=True),
        "algorithm": {k: {"name": type(a).__name__, **a.model_dump(mode="json")} for k, a in algorithms.items()},
    }


def _name(thing: Any) -> str:
    return thing if isinstance(thing, str) else getattr(thing, "__qualname__", type(thing).__name__)


def _fields(evaluation: Evaluation) -> dict[str, Any]:
    return {name: getattr(evaluation, name) for name in Evaluation.model_fields}


@dataclass
class _Backends:
    """One backend for each pair of data and task, made when the first cell needs it."""

    federations: Callable[[int], Federation]
    tasks: Callable[[int], Task]
    settings: RunTable
    cohort: Sampling
    store: Store
    progress: Progress
    verbose: bool
    workers: Workers | Cluster | None
    connect: Connect | None = None

    def __enter__(self) -> _Backends:
        self._made: dict[tuple[int, int], tuple[Backend, Federation, Task]] = {}
        return self

    def __exit__(self, *failure: object) -> None:
        for backend, _, _ in self._made.values():
            backend.close()

    def kill(self) -> None:
        """End the workers at once, whatever they are doing."""
        for process in self.workers.processes if isinstance(self.workers, Workers) else ():
            process.kill()

    def get(self, seed: int) -> tuple[Backend, Federation, Task]:
        # one lane at a time: data is loaded once, models draw from torch's generator, the first one records the setup
        with GENERATOR:
            federation, task = self.federations(seed), self.tasks(seed)
            key = (id(federation), id(task))
            if key not in self._made:
                self._made = {key: (self._build(federation, task, seed), federation, task)}
            return self._made[key]

    def _build(self, federation: Federation, task: Task, seed: int) -> Backend:
        self.cohort.check(federation.clients)
        if self.connect is not None:
            self._same_data(federation, seed)
            self._introduce(federation)
            self.store.set_fact("network", True)
            return self.connect(federation, task)
        facts = probe(federation, task)
        setup = self._setup(facts, federation)
        self._same_data(federation, seed)
        if self.verbose:
            self._explain(federation, task, setup)
        return backend_on(self.workers, federation, task, setup)

    def _explain(self, federation: Federation, task: Task, setup: Setup) -> None:
        workers = f"{self.workers} for a cell" if self.workers is not None else "this process"
        self.progress.note(f"{federation}, a model of {task.parameters:,} parameters")
        self.progress.note(f"computed in {workers}, {setup}")
        self.progress.note(", ".join(f"{name} {value}" for name, value in machine.facts().items()))

    def _setup(self, facts: Probe, federation: Federation) -> Setup:
        """How to compute: as recorded when the run began, so that going on gives the same bits; else as asked."""
        recorded = self.store.fact("setup")
        if recorded is not None:
            known = {field.name for field in fields(Setup)}
            setup = Setup(**{name: value for name, value in recorded.items() if name in known})
            if self.settings.group not in ("auto", setup.group):
                self.progress.note(f"This run began with a group size of {setup.group}, and goes on with it.")
            return setup
        setup = choose_setup(facts, self.settings, self.cohort.size(federation.clients))
        reason = facts.__dict__.get("cannot_group")  # known only where side by side was wanted
        if reason:
            self.progress.note(f"Clients are trained one by one in each worker, because {reason}")
            self.store.set_fact("one by one", reason)
        self.store.set_fact("setup", asdict(setup))
        self._introduce(federation)
        return setup

    def _introduce(self, federation: Federation) -> None:
        self.store.set_fact("machine", machine.facts())
        if not self.store.rows("clients"):
            self.store.set_clients(federation)
            held = label_counts(federation) if len(federation.y) else None  # elsewhere, labels are not known here
            if held is not None:
                self.store.set_fact("labels", held)

    def _same_data(self, federation: Federation, seed: int) -> None:
        known = self.store.fact(f"data of seed {seed}")
        if known is not None and known != federation.fingerprint:
            raise StoreError("The data has changed since this run began. Use --fresh to start anew with the new data.")
        self.store.set_fact(f"data of seed {seed}", federation.fingerprint)


@dataclass
class _Cell:
    """One algorithm with one seed."""

    folder: Path
    number: int
    label: str
    seed: int
    algorithm: Algorithm
    rounds: int
    cohort: Sampling
    evaluation: EvaluateTable
    settings: RunTable
    progress: Progress

    @property
    def title(self) -> str:
        return f"{self.label} (seed {self.seed})"

    @property
    def checkpoints(self) -> Path:
        return checkpoint.of_cell(self.folder, self.label, self.seed)

    def is_done(self, store: Store) -> bool:
        """Whether there is nothing left to do; the store is told, if it was not."""
        loaded = checkpoint.load(self.checkpoints)
        if loaded is None or not loaded.ends(self.rounds):
            return False
        # a kill may have come after the last checkpoint and before the store was told
        store.set_status(self.number, "done", weights_sha256=loaded.extra.get("weights_sha256"))
        self.progress.begin(self.title, self.rounds, self.rounds)
        self.progress.end(self.title)
        return True

    def train(self, lane: _Backends, should_stop: Callable[[], bool]) -> bool:
        """Run to the end, or from the last checkpoint to the end; false when asked to stop before that."""
        store = lane.store
        loaded = checkpoint.load(self.checkpoints)
        for note in loaded.notes if loaded else ():
            self.progress.note(f"{self.label}, seed {self.seed}: {note}")
        begun = loaded.snapshot if loaded else None
        store.forget_after(self.number, begun.round if begun else 0)
        store.set_status(self.number, "running")
        self.progress.begin(self.title, begun.round if begun else 0, self.rounds)
        try:
            finished = self._rounds(lane, begun, should_stop)
        except FedloomError as error:
            if not should_stop():  # otherwise its workers were taken away
                store.set_status(self.number, "failed", error=str(error))
            raise
        finally:
            self.progress.end(self.title)
        if not finished:
            store.set_status(self.number, "stopped")
        return finished

    def _rounds(self, lane: _Backends, begun: Snapshot | None, should_stop: Callable[[], bool]) -> bool:
        backend, federation, task = lane.get(self.seed)
        if hasattr(backend, "begin"):
            backend.begin(self.label, self.seed, self.checkpoints)
        own: dict[int, Groups] = dict(begun.own) if begun else {}
        unsaved: dict[int, Groups] = {}
        saved = begun.round if begun else 0
        records = fit(
            federation,
            task,
            self.algorithm,
            self.rounds,
            seed=self.seed,
            sampling=self.cohort,
            evaluation=self.evaluation,
            backend=backend,
            resume=begun,
            until=self._target(task),
        )
        complete = False
        for record in records:
            complete = complete or record.complete
            own.update(record.own)
            unsaved.update(record.own)
            values = headline_values(record, task)
            self.progress.step(self.title, record.round, values, record.seconds)
            reached = record.reached
            last = record.round == self.rounds or reached
            stopping = not last and should_stop()
            saving = last or stopping or record.round % self.settings.checkpoint_every == 0
            lane.store.save(self.number, record, task, durable=saving)
            if self.settings.keep_models:
                checkpoint.keep_model(self.checkpoints, record.round, self.algorithm.server_model(task, record.state))
            sha = final_sha256(backend, self.algorithm, task, record.state, own) if last else None
            if saving:
                extra = {"reached": reached, "weights_sha256": sha}
                checkpoint.save(self.checkpoints, record.round, record.state, unsaved, extra, since=saved)
                unsaved, saved = {}, record.round
            if last:
                if not complete and begun is None:
                    raise QuorumError(f"No round of {self.label} had enough clients: nothing was learnt.")
                lane.store.set_status(self.number, "done", weights_sha256=sha)
                return True
            if stopping:
                return False
        return True

    def _target(self, task: Task) -> Callable[[RoundRecord], bool] | None:
        """Whether a round reaches what the run should stop at."""
        if self.evaluation.stop != "target":
            return None
        (metric, target), *_ = self.evaluation.target.items()
        known = ["loss", *(measure.name for measure in task.measures)]
        if metric not in known:
            raise InputError(f"[evaluate] target must be about one of {', '.join(known)}. Got '{metric}' instead.")
        lower = metric == "loss" or any(m.name == metric and not m.higher_is_better for m in task.measures)

        def reached(record: RoundRecord) -> bool:
            value = headline_values(record, task).get(metric)
            return value is not None and (value <= target if lower else value >= target)

        return reached


def choose_setup(facts: Probe, settings: RunTable, cohort: int) -> Setup:
    """How clients are computed: what was asked for, or a rule on facts that are known before the first round."""
    compiled = settings.compile is True and settings.backend != "serial"
    if compiled and not machine.has_compiler():
        raise InputError(
            "[run] compile = true needs a C++ compiler (g++ or clang++), and there is none on this machine."
        )
    group = facts.group(cohort, compiled) if settings.group == "auto" else settings.group
    if settings.backend == "serial":
        group = 1
    setup = facts.setup(group, device=machine.device("cpu" if settings.backend == "ray" else settings.device))
    return replace(setup, compile=compiled and setup.group > 1)


def headline_values(record: RoundRecord, task: Task) -> dict[str, float]:
    """Loss and metrics of a round in a nutshell: on the server's test data if there is some, else the clients' mean."""
    if record.server:
        measured = record.server.get("test") or next(iter(record.server.values()))
        return measured.values(task)
    for phase in ("final", "post_fit", "pre_fit"):
        graded = [
            splits.get("test") or next(iter(splits.values()))
            for splits in record.clients.get(phase, {}).values()
            if splits
        ]
        graded = [measured for measured in graded if measured.count]
        if graded:
            means = ["loss", *(measure.name for measure in task.measures if measure.is_mean)]
            values = [measured.values(task) for measured in graded]
            found = {name: sum(value[name] for value in values) / len(values) for name in means}
            if len(means) <= len(task.measures):  # what is no mean is made from everybody's scores together
                found = {**sum(graded, Measured()).values(task), **found}
            return found
    return {}


def final_sha256(
    backend: Backend, algorithm: Algorithm, task: Task, state: Groups, own: Mapping[int, Groups]
) -> str | None:
    """The fingerprint of what a run ends with: the global model, or every client's where there is none.

    Clients' models that are elsewhere are fingerprinted there; without all of them there is no fingerprint.
    """
    model = algorithm.server_model(task, state)
    if model is not None:
        return tree.sha256(model)
    if hasattr(backend, "model_sha256"):
        found: Mapping[int, str] = backend.model_sha256(algorithm, state, own)
    else:
        found = {client: tree.sha256(algorithm.model(task, state, own[client])) for client in own}
    if found.keys() != own.keys():
        return None
    return hashlib.sha256("".join(f"{client} {found[client]}\n" for client in sorted(found)).encode()).hexdigest()
