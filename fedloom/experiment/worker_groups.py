"""Where cells are computed: processes with backends on them, one group of processes for every cell of a moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom import machine
from fedloom.backends.protocol import Backend
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Vector, Workers
from fedloom.data.describe import label_counts
from fedloom.data.federation import Federation
from fedloom.errors import StoreError
from fedloom.experiment import parallel
from fedloom.experiment.experiment_file import RunTable
from fedloom.experiment.progress import Progress
from fedloom.experiment.store import Store
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.training.clients import Setup
from fedloom.training.generators import GENERATOR
from fedloom.training.probe import Probe, probe

if TYPE_CHECKING:
    from fedloom.backends.ray_cluster import Cluster

Connect = Callable[[Federation, Task], Backend]


def open_tracks(
    stack: ExitStack,
    folder: Path,
    seeds: Sequence[int],
    federations: Callable[[int], Federation],
    tasks: Callable[[int], Task],
    settings: RunTable,
    cohort: Sampling,
    progress: Progress,
    verbose: bool,
    connect: Connect | None,
) -> list[Track]:
    """For cells with these seeds: one track with all workers, or several with some of them each."""
    # first of all: they load torch while this process loads the data
    workers = start_workers(settings, progress.note) if connect is None else None
    if workers is not None:
        stack.callback(workers.close)
    everyone: list[Workers | Cluster | None] = [workers]
    if isinstance(workers, Workers):
        federation = federations(seeds[0])
        data = sum(array.nbytes for array in (federation.x, federation.y))
        wanted = settings.cells if settings.cells != "auto" else parallel.tracks(len(seeds), len(workers), data)
        everyone = [*parallel.divide(workers, min(wanted, len(seeds), len(workers)))]
    return [
        stack.enter_context(
            Track(
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


@dataclass
class Track:
    """Some workers, and on them a backend for each pair of data and task, made when the first cell needs it."""

    federations: Callable[[int], Federation]
    tasks: Callable[[int], Task]
    settings: RunTable
    cohort: Sampling
    store: Store
    progress: Progress
    verbose: bool
    workers: Workers | Cluster | None
    connect: Connect | None = None

    def __enter__(self) -> Track:
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
        # one track at a time: data is loaded once, models draw from torch's generator, the first one records the setup
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
            self._explain(federation, task, setup, facts)
        return backend_on(self.workers, federation, task, setup)

    def _explain(self, federation: Federation, task: Task, setup: Setup, facts: Probe) -> None:
        workers = f"{self.workers} for a cell" if self.workers is not None else "this process"
        self.progress.note(f"{federation}, a model of {task.parameters:,} parameters")
        self.progress.note(f"computed in {workers}, {setup}")
        if setup.replay and facts.cannot_replay:
            self.progress.note(f"Training steps are not recorded and replayed, because {facts.cannot_replay}")
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


def start_workers(settings: RunTable, tell: Callable[[str], None]) -> Workers | Cluster | None:
    """The processes that compute clients; None where this one does."""
    if settings.backend == "serial":
        return None
    if settings.backend == "vector":
        return Workers(machine.cores() if settings.workers == "auto" else settings.workers)
    from fedloom.backends.ray_cluster import Cluster

    return Cluster(settings.address, settings.nodes, settings.workers, tell)


def backend_on(workers: Workers | Cluster | None, federation: Federation, task: Task, setup: Setup) -> Backend:
    """The backend that spreads work over these processes."""
    if workers is None:
        return Serial(federation, task, setup)
    if isinstance(workers, Workers):
        return Vector(federation, task, setup, workers)
    from fedloom.backends.ray import Ray

    return Ray(federation, task, setup, workers)


def choose_setup(facts: Probe, settings: RunTable, cohort: int) -> Setup:
    """How clients are computed: what was asked for, or a rule on facts that are known before the first round."""
    group = facts.group(cohort) if settings.group == "auto" else settings.group
    if settings.backend == "serial":
        group = 1
    device = machine.device("cpu" if settings.backend == "ray" else settings.device)
    return facts.setup(group, device=device, replay=settings.replay)
