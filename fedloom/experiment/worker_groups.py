"""Where cells are computed: groups of worker processes with backends, one group per concurrently running cell."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Protocol

from fedloom import machine, tree
from fedloom.backends.protocol import Backend
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Vector, Workers
from fedloom.data import scarcity
from fedloom.data.describe import LABELS_OF_SEED, TESTED, describe, label_counts
from fedloom.data.federation import Federation
from fedloom.errors import InputError
from fedloom.experiment import unequal_weights
from fedloom.experiment.cautions import cautions, weights_of
from fedloom.experiment.checks import check_start
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress
from fedloom.experiment.run_folder import DATA_OF_SEED, check_same_data, preprocessing_file
from fedloom.experiment.store import Store
from fedloom.experiment.tables import RunTable
from fedloom.task import Task
from fedloom.training.clients import Setup
from fedloom.training.generators import GENERATOR
from fedloom.training.probe import Probe, probe
from fedloom.training.trainers import lanes

if TYPE_CHECKING:
    from fedloom.backends.ray_cluster import Cluster


Connect = Callable[[Federation, Task], Backend]
MOST_DATA = 1_000_000_000  # bytes of examples in shared memory: every worker group has a copy


def open_worker_groups(
    stack: ExitStack,
    plan: Plan,
    folder: Path,
    seeds: Sequence[int],
    progress: Progress,
    verbose: bool,
    connect: Connect | None,
    checked: bool = False,
) -> list[WorkerGroup]:
    """Start workers for cells with these seeds, in one group or divided into several. Refuse what cannot be trained."""
    settings = plan.settings
    # first of all: they load torch while this process loads the data
    workers = start_workers(settings, progress.note) if connect is None else None
    if workers is not None:
        stack.callback(workers.close)
    if connect is None and not checked:
        check_start(plan, list(dict.fromkeys(seeds)))
    groups: list[Workers | Cluster | None] = [workers]
    if isinstance(workers, Workers):
        federation = plan.federation(seeds[0])
        data = sum(array.nbytes for array in (federation.x, federation.y))
        wanted = settings.cells if settings.cells != "auto" else group_count(len(seeds), len(workers), data)
        divided = divide(workers, min(wanted, len(seeds), len(workers)))
        for group in divided:  # their workers may be replaced by others
            stack.callback(group.close)
        groups = [*divided]
    stores = [stack.enter_context(Store(folder)) for _ in groups]
    return [
        stack.enter_context(WorkerGroup(plan, store, progress, verbose, group, connect, len(groups)))
        for store, group in zip(stores, groups, strict=True)
    ]


@dataclass
class WorkerGroup:
    """Some workers, and on them a backend for each pair of data and task, made when a cell first needs it."""

    plan: Plan
    store: Store
    progress: Progress
    verbose: bool
    workers: Workers | Cluster | None
    connect: Connect | None = None
    groups: int = 1  # that run at the same time

    def __enter__(self) -> WorkerGroup:
        self._made: dict[tuple[int, int], tuple[Backend, Federation, Task]] = {}
        return self

    def __exit__(self, *failure: object) -> None:
        for backend, _, _ in self._made.values():
            backend.close()

    def kill(self) -> None:
        """End the workers at once, even in the middle of a round."""
        if isinstance(self.workers, Workers):
            self.workers.kill()

    def get(self, seed: int) -> tuple[Backend, Federation, Task]:
        """Return the backend, the data and the task for a seed."""
        # one group at a time: data is loaded once, models draw from torch's generator, the first one records the setup
        with GENERATOR:
            federation, task = self.plan.federation(seed), self.plan.task(seed)
            own_data = self.plan.draws_data or self.connect is not None  # a network may get clients between seeds
            check_same_data(self.store, federation, seed, own_data)
            task.see(federation)
            key = (id(federation), id(task))
            if key not in self._made:
                self._made = {key: (self._build(federation, task, seed), federation, task)}
            self._record_data(federation, seed)
            return self._made[key]

    def _build(self, federation: Federation, task: Task, seed: int) -> Backend:
        self.plan.cohort.check(federation.clients)
        if self.connect is not None:
            if any(algorithm.train.clients for algorithm in self.plan.algorithms.values()):
                raise InputError("[train] clients is for simulations: on a network, sites have names of their own.")
            self._record_machine_and_clients(federation, seed)
            self.store.set_fact("network", True)
            self._caution(cautions(self.plan, task, federation, seed))
            return self.connect(federation, task)
        facts = probe(federation, task)
        if self.store.fact("setup") is None:  # else all was said, and the probe need not look again
            self._caution([*cautions(self.plan, task, federation, seed), *filter(None, [facts.caution])])
        setup = self._setup(facts, federation, seed)
        self._record_test_labels(federation, seed)
        if self.plan.draws_clients:
            self._record_scarcity(federation, seed)
        self._check_memory(federation, facts, setup)
        if self.verbose:
            self._note_details(federation, task, setup, facts)
        return backend_on(self.workers, federation, task, setup)

    def _caution(self, known: list[str]) -> None:
        """Say what a reader should know, once for a run, and record it for the report."""
        if self.store.fact("cautions about algorithms") is None:
            self.store.set_fact("cautions about algorithms", known)
            self.store.set_fact(unequal_weights.FACT, weights_of(self.plan))
            for caution in known:
                self.progress.caution(caution)

    def _check_memory(self, federation: Federation, facts: Probe, setup: Setup) -> None:
        """Raise if as many workers as asked for need more memory than there is; warn if they were not asked for."""
        free = machine.free_memory()
        if not isinstance(self.workers, Workers) or free is None:
            return
        count = self.groups * len(self.workers)
        data = self.groups * tree.size({"x": federation.x, "y": federation.y})
        needed = data + count * working_bytes(facts.bytes, setup.group)
        if needed > free and count > 1:
            found = f"{count} worker processes need about {needed / 1e9:.1f} GB for this model and these examples"
            advice = f"{free / 1e9:.1f} GB are free. Use [run] workers = {max(count * free // needed, 1)}"
            if self.plan.settings.workers != "auto":
                raise InputError(f"{found}, and {advice}.")
            self.progress.once(f"{found}, and {advice} if they are killed.")

    def _note_details(self, federation: Federation, task: Task, setup: Setup, facts: Probe) -> None:
        workers = f"{self.workers} for a cell" if self.workers is not None else "this process"
        self.progress.note(f"{federation}, a model of {task.parameters:,} parameters")
        self.progress.note(f"computed in {workers}, {setup}")
        if setup.replay and facts.cannot_replay:
            self.progress.note(f"Training steps are not recorded and replayed, because {facts.cannot_replay}")
        self.progress.note(", ".join(f"{name} {value}" for name, value in machine.facts().items()))

    def _setup(self, facts: Probe, federation: Federation, seed: int) -> Setup:
        """Choose how to compute: as recorded when the run began, so that the bits stay the same, or as asked."""
        recorded = self.store.fact("setup")
        if recorded is not None:
            known = {field.name for field in fields(Setup)}
            setup = Setup(**{name: value for name, value in recorded.items() if name in known})
            if self.plan.settings.group not in ("auto", setup.group):
                self.progress.note(f"This run began with a group size of {setup.group} and continues with it.")
            return setup
        setup = choose_setup(facts, self.plan.settings, self.plan.cohort.size(federation.clients))
        reason = facts.__dict__.get("cannot_group")  # known only where side by side was wanted
        if reason:
            self.progress.once(f"Clients are trained one by one in each worker, because {reason}")
            self.store.set_fact("one by one", reason)
        self.store.set_fact("setup", asdict(setup))
        self.store.set_fact("not replayed", self._not_replayed(facts, setup))
        self._record_machine_and_clients(federation, seed)
        return setup

    def _not_replayed(self, facts: Probe, setup: Setup) -> str:
        """Why training steps are not recorded and replayed, though they might be; empty if they are."""
        if not setup.replay:
            return ""
        if all(algorithm.train.batch_size == "full" for algorithm in self.plan.algorithms.values()):
            return "every batch has all examples"
        if self.plan.privacy.example_dp is not None:
            return "differential privacy of examples clips the gradient of each"
        return facts.cannot_replay

    def _record_machine_and_clients(self, federation: Federation, seed: int) -> None:
        self.store.set_fact("machine", machine.facts())
        first = self.plan.seeds[0]
        if self.plan.draws_clients and seed != first:  # of groups side by side, another one may come first
            federation = self.plan.federation(first)
        if self.store.rows("clients"):
            self.store.set_policies(federation)  # which may have changed
        else:
            self.store.set_clients(federation)
            # on a network, the coordinator does not have the clients' data
            if len(federation.y):
                where = self.plan.in_seed(first)
                warnings = describe(federation, where).warnings
                for warning in warnings:
                    self.progress.caution(warning)
                # what every seed has its own numbers of is in facts of its own
                counted = {*scarcity.sentences(federation, where)} if where else set()
                self.store.set_fact("cautions about the data", [one for one in warnings if one not in counted])
            held = label_counts(federation)
            if held is not None:
                self.store.set_fact("labels", held)
            self.store.set_fact("server", {split: len(y) for split, (_, y) in federation.server.items()})

    def _record_test_labels(self, federation: Federation, seed: int) -> None:
        """Record the labels of a seed's test examples if they are not those of the run: guessing depends on them."""
        held, first = label_counts(federation), self.store.fact("labels")
        if held is not None and first is not None:
            tested = {name: counts for name, counts in held.items() if name in TESTED}
            if tested != {name: first.get(name) for name in tested}:
                self.store.set_fact(f"{LABELS_OF_SEED}{seed}", tested)

    def _record_scarcity(self, federation: Federation, seed: int) -> None:
        """Record how many clients of a seed have too little of something, and say what changes its numbers."""
        self.store.set_fact(f"{scarcity.COUNTED}{seed}", scarcity.in_numbers(federation))
        for sentence in scarcity.sentences(federation, self.plan.in_seed(seed), only=(scarcity.NO_TEST,)):
            self.progress.caution(sentence)

    def _record_data(self, federation: Federation, seed: int) -> None:
        """Record for every seed, also if all have the same data: its models are used by themselves afterwards."""
        self.store.set_fact(f"{DATA_OF_SEED}{seed}", federation.fingerprint)
        self.store.set_fact(f"test of seed {seed}", federation.test_fingerprint)
        # on a network, sites prepare their data themselves, perhaps in a way that they agreed on
        if self.connect is None or federation.preprocessing.columns:
            federation.preprocessing.write(preprocessing_file(self.store.path.parent, seed))


def name_first_seed(plan: Plan, store: Store) -> None:
    """Say whose clients the facts of a run are about, because it had one seed and gets others with other clients."""
    first, before = plan.seeds[0], replace(plan, draws_clients=False)
    federation, task, where = plan.federation(first), plan.task(first), plan.in_seed(first)
    task.see(federation)
    said, named = (
        [*cautions(one, task, federation), *describe(federation, one.in_seed(first)).warnings] for one in (before, plan)
    )
    renamed, counted = dict(zip(said, named, strict=True)), {*scarcity.sentences(federation, where)}
    for fact in ("cautions about algorithms", "cautions about the data"):
        sentences = [renamed.get(text, text) for text in store.fact(fact) or ()]
        store.set_fact(fact, [text for text in sentences if text not in counted])
    store.set_fact(f"{scarcity.COUNTED}{first}", scarcity.in_numbers(federation))


def working_bytes(model: int, group: int) -> int:
    """Return how much memory a worker takes for a model of this size, besides what it takes before it has work."""
    return model * (6 * group + 4)


def start_workers(settings: RunTable, note: Callable[[str], None]) -> Workers | Cluster | None:
    """Start the processes that compute clients; None if this process computes them."""
    if settings.backend == "serial":
        return None
    if settings.backend == "vector":
        if not machine.has_worker_processes():
            note("Worker processes need Linux or macOS: this run computes in one process, with the same results.")
            return None
        return Workers(machine.worker_count(settings.workers), note)
    from fedloom.backends.ray_cluster import Cluster

    return Cluster(settings.address, settings.nodes, settings.workers, note)


def backend_on(workers: Workers | Cluster | None, federation: Federation, task: Task, setup: Setup) -> Backend:
    """Make the backend that spreads work over these processes."""
    if workers is None:
        return Serial(federation, task, setup)
    if isinstance(workers, Workers):
        return Vector(federation, task, setup, workers)
    from fedloom.backends.ray import Ray

    return Ray(federation, task, setup, workers)


def choose_setup(facts: Probe, settings: RunTable, cohort: int) -> Setup:
    """Choose how clients are computed: as asked, or by a rule on facts that are known before the first round."""
    alone = settings.backend == "serial" or (settings.backend == "vector" and not machine.has_worker_processes())
    group = 1 if alone else lanes(settings.group, facts.bytes, cohort)
    device = machine.device("cpu" if settings.backend == "ray" else settings.device)
    return facts.setup(group, device=device, replay=settings.replay)


# --- cells side by side: each has its own workers, so that no worker waits for the end of a round. A cell's bits do not
# depend on its number of workers, so they do not depend on this either


class Trainable(Protocol):
    """A cell."""

    def train(self, group: WorkerGroup, should_stop: Callable[[], bool]) -> bool:
        """Run to the end; false if it was asked to stop before."""


def group_count(cells: int, workers: int, data: int = 0) -> int:
    """Choose how many cells to run at once: as many as leave no worker idle for long.

    >>> [group_count(cells, workers) for cells, workers in ((21, 2), (3, 2), (2, 8), (1, 8))]
    [2, 1, 2, 1]
    """
    side_by_side = min(cells, workers)
    uneven = cells < 2 * workers and cells % max(side_by_side, 1)  # the last cells would have most workers idle
    too_large = side_by_side * data > MOST_DATA
    return 1 if side_by_side < 2 or uneven or too_large else side_by_side


def divide(workers: Workers, count: int) -> list[Workers]:
    """Divide the processes into groups of about equal size."""
    groups = [Workers(0, workers.note) for _ in range(count)]
    for number, (process, connection) in enumerate(zip(workers.processes, workers.connections, strict=True)):
        groups[number % count].processes.append(process)
        groups[number % count].connections.append(connection)
    return groups


def train_cells(
    cells: Sequence[Trainable],
    groups: Sequence[WorkerGroup],
    should_stop: Callable[[], bool],
    kill: Sequence[Callable[[], None]],
) -> None:
    """Train all cells: a group takes the next cell when it has finished one. The first failure stops all and is raised.

    `kill` makes running cells fail at once, for an interruption that does not wait for the end of their rounds.
    """
    if len(groups) == 1:  # in this thread, in order
        for cell in cells:
            if not cell.train(groups[0], should_stop):
                return
        return
    waiting, lock = deque(cells), Lock()
    failures: list[BaseException] = []
    stopped = False

    def stop() -> bool:
        return stopped or bool(failures) or should_stop()

    def work(group: WorkerGroup, ended: Event) -> None:
        try:
            take_cells(group)
        finally:
            ended.set()

    def take_cells(group: WorkerGroup) -> None:
        nonlocal stopped
        while True:
            with lock:
                if stopped or failures or not waiting:
                    return
                cell = waiting.popleft()
            try:
                stopped = not cell.train(group, stop) or stopped
            except BaseException as failure:
                failures.append(failure)
                return

    all_ended = []  # an interrupted `Thread.join` takes the thread for ended (Python 3.11): these do not
    try:
        for group in groups:
            ended = Event()
            Thread(target=work, args=(group, ended), daemon=True).start()
            all_ended.append(ended)
        for ended in all_ended:
            while not ended.wait(0.2):  # not for ever: Ctrl-C is handled in between
                pass
    except BaseException:
        stopped = True
        for end in kill:
            end()
        for ended in all_ended:  # a thread that still used what is closed next would crash the process
            ended.wait(10)
        raise
    if failures:
        raise failures[0]
