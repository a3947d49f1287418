"""One cell of an experiment: an algorithm with a seed, trained round by round, stored, checkpointed and resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedloom import tree
from fedloom.algorithm import Algorithm
from fedloom.backends.protocol import Backend
from fedloom.backends.worker_messages import imported_by_workers
from fedloom.clock.clock import GROUP
from fedloom.clock.fleet import Fleet
from fedloom.clock.in_flight import with_versions
from fedloom.data.federation import Federation
from fedloom.errors import FRESH, FedloomError, InputError, QuorumError, StoreError, TrainingError
from fedloom.experiment import checkpoint
from fedloom.experiment.checks import check_target
from fedloom.experiment.control import PAUSED, Control
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import AFTER_TRAINING, ASKED, CLOCK, ON_ALL_TESTS, ON_SERVER, TOOK_PART, Progress
from fedloom.experiment.run_folder import check_same_data, check_there, has_own_models
from fedloom.experiment.step_cost import step_seconds
from fedloom.experiment.store import Store
from fedloom.experiment.worker_groups import WorkerGroup
from fedloom.federation.engine import RoundRecord, Snapshot, fit
from fedloom.privacy.words import IN_A_WORD
from fedloom.results import headline
from fedloom.task import Task
from fedloom.training import generators
from fedloom.tree import Groups
from fedloom.user_code import has_own_class, named


@dataclass
class Cell:
    """One algorithm with one seed."""

    plan: Plan
    folder: Path
    number: int  # in the store
    label: str
    seed: int
    progress: Progress
    control: Control

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the cell's label."""
        return self.plan.algorithms[self.label]

    @property
    def title(self) -> str:
        return f"{self.label} (seed {self.seed})"

    @property
    def checkpoints(self) -> Path:
        return checkpoint.of_cell(self.folder, self.label, self.seed)

    def is_done(self, store: Store) -> bool:
        """Whether the cell has ended; if so, make sure that the store says so."""
        loaded = self._load(store)
        if loaded is None or not loaded.ends(self.plan.rounds):
            return False
        (status,) = (row["status"] for row in store.cells() if row["id"] == self.number)
        if status == "stopped":  # on its way to more rounds: its model was not measured as a final one
            raise InputError(
                f"{self.title} was stopped after round {loaded.snapshot.round}, which was not to be its last: ask for "
                f"more rounds than that, or use {FRESH} to start over."
            )
        # the process may have been killed between the last checkpoint and the store's update
        if status != "done":
            store.set_status(self.number, "done", weights_sha256=loaded.extra.get("weights_sha256"))
        self.progress.begin(self.title, self.plan.rounds, self.plan.rounds)
        self.progress.end(self.title)
        return True

    def has_begun(self) -> bool:
        """Whether the cell has a checkpoint."""
        return checkpoint.kept(self.checkpoints)[1] > 0

    def check_continues(self, store: Store) -> None:
        """Raise if the data or the frozen parameters of today are not those that the cell began with."""
        check_same_data(store, self.plan.federation(self.seed), self.seed)
        loaded = self._load(store)
        if loaded is not None:
            self._begun(loaded, self.plan.task(self.seed))

    def train(self, group: WorkerGroup, should_stop: Callable[[], bool]) -> bool:
        """Run from the last checkpoint to the end; false if it was asked to stop before."""
        store = group.store
        loaded = self._load(store)
        begun = loaded.snapshot if loaded else None
        notes = list(loaded.notes) if loaded else []
        if begun and (lost := store.lost(self.number, begun.round)):
            notes.append(
                f"{store.path} has lost {len(lost)} rounds, from {lost[0]} to {lost[-1]}: what they measured is gone. "
                f"The model continues from its checkpoint of round {begun.round}; {FRESH} measures all rounds again."
            )
        for note in notes:
            self.progress.note(f"{self.label}, seed {self.seed}: {note}")
        store.forget_after(self.number, begun.round if begun else 0)
        store.set_status(self.number, "running")
        self.progress.begin(self.title, begun.round if begun else 0, self.plan.rounds)
        finished = False
        try:
            finished = self._rounds(group, loaded, should_stop)
        except FedloomError as error:
            if should_stop():  # the error is that its workers were stopped, because of another cell
                store.set_status(self.number, "stopped")
            else:
                store.set_status(self.number, "failed", error=str(error))
            if isinstance(error, TrainingError) and len(self.plan.seeds) * len(self.plan.algorithms) > 1:
                error.args = (f"{self.title}: {error}",)  # which of the cells it was
            raise
        finally:
            self.progress.end(self.title, done=finished)
        if not finished:
            store.set_status(self.number, "stopped")
        return finished

    def _load(self, store: Store) -> checkpoint.Checkpoint | None:
        """Load the newest checkpoint, or the oldest one if the store lost its round: more rounds are measured again."""
        loaded = checkpoint.load(self.checkpoints)
        if loaded is None or loaded.snapshot.round not in store.lost(self.number, loaded.snapshot.round):
            return loaded
        loaded = checkpoint.load(self.checkpoints, oldest=True)
        if loaded is not None and loaded.ends(self.plan.rounds):
            raise StoreError(
                f"{self.title} is done, but {store.path} has lost what its last round measured, and no earlier "
                f"checkpoint is left to measure it again. Use {FRESH} to start over (the old folder is kept beside it)."
            )
        return loaded

    def _begun(self, loaded: checkpoint.Checkpoint, task: Task) -> Snapshot:
        """Return where the cell continues, without frozen parameters; refuse to continue with others."""
        begun = loaded.snapshot
        if loaded.extra.get(checkpoint.FROZEN, task.frozen_sha256) != task.frozen_sha256:
            raise InputError(
                f"The model's frozen parameters are not those that {self.title} began with, in {self.folder}. Restore "
                f"the file or the code that they come from, or use {FRESH} to start over."
            )
        state = task.without_frozen(begun.state)
        if GROUP in state:
            state = {**state, GROUP: with_versions(state[GROUP], task.without_frozen)}
        return Snapshot(begun.round, state, {one: task.without_frozen(groups) for one, groups in begun.own.items()})

    def _rounds(
        self, group: WorkerGroup, loaded: checkpoint.Checkpoint | None, should_stop: Callable[[], bool]
    ) -> bool:
        backend, federation, task = group.get(self.seed)
        backend.begin(self.label, self.seed, self.checkpoints)
        begun = None if loaded is None else self._begun(loaded, task)
        if task.frozen:
            checkpoint.keep_frozen(self.folder, task.frozen, task.frozen_sha256)
        own: dict[int, Groups] = dict(begun.own) if begun else {}
        unsaved: dict[int, Groups] = {}
        saved = begun.round if begun else 0
        protection = self.plan.protection(federation.clients, self.checkpoints, backend.remote)
        if protection is not None:
            for line in protection.lines():
                self.progress.once(line)
        records = fit(
            federation,
            task,
            self.algorithm,
            self.plan.rounds,
            seed=self.seed,
            sampling=self.plan.cohort,
            evaluation=self.plan.evaluate,
            backend=backend,
            resume=begun,
            until=self._target(task),
            protection=protection,
            at_clients=None if backend.remote else self.plan.at_clients(self.checkpoints),  # agents keep theirs
            fleet=self._fleet(group.store, federation, task),
            compress=self.plan.compress,
        )
        if not self._hold(group.store, saved, should_stop):
            return False
        abandoned = group.store.abandoned(self.number)
        for record in records if backend.remote else self._watched(records, group):
            if record.federation is not None and record.federation is not federation:  # on a network, others joined
                federation = record.federation
                group.store.set_clients(federation)
            abandoned += not record.complete
            own.update(record.own)
            unsaved.update(record.own)
            reasons = {
                "that are not finite, or made the model so": record.left_out,
                "that are far too long": record.outliers,
            }
            for why, clients in reasons.items():
                if clients:
                    names = ", ".join(f"'{federation.name(client)}'" for client in clients)
                    end = "" if record.complete else ", too many: the round does not count"
                    self.progress.note(f"{self.title}, round {record.round}: left out updates {why}, of {names}{end}.")
            values = headline.in_short(headline.of_round(record, task), task)
            if headline.is_after_training(record):
                values |= {(ON_ALL_TESTS if self.algorithm.pooled else AFTER_TRAINING): 1}
            if headline.is_of_server(record):
                values |= {(ON_SERVER if "test" in federation.server else ON_ALL_TESTS): 1}
            values |= {"abandoned": abandoned} if abandoned else {}
            counted = headline.clients_of_round(record)
            everyone = counted | {client for client, why in record.absences.items() if why != "surplus"}
            if record.complete and 0 < len(counted) < len(everyone):  # 0 where nothing is measured at clients
                values |= {TOOK_PART: len(counted), ASKED: len(everyone)}
            values |= {CLOCK: record.time.ended} if record.time is not None else {}
            values |= {word: record.notes[kind] for kind, word in IN_A_WORD.items() if kind in record.notes}
            self.progress.step(self.title, record.round, values, record.seconds)
            reached = record.reached
            if reached and protection is not None and protection.is_spent:
                self.progress.note(f"{self.title} stops after round {record.round}: it has no ε left for another one.")
            last = record.round == self.plan.rounds or reached
            stopping = not last and should_stop()
            saving = last or stopping or self.control.pauses
            saving = saving or record.round % self.plan.settings.checkpoint_every == 0
            check_there(self.folder)  # before more is computed for nothing, or a checkpoint makes the folder again
            group.store.save(self.number, record, task, durable=saving)
            if self.plan.settings.keep_models:
                model = self.algorithm.server_model(task, record.state)
                if model is not None:
                    checkpoint.keep_model(self.checkpoints, record.round, task.whole(model))
            sha = final_sha256(backend, self.algorithm, task, record.state, own) if last else None
            if saving and record.round:  # an evaluation alone has nothing to continue from
                extra = {"reached": reached, "weights_sha256": sha}
                extra |= {checkpoint.FROZEN: task.frozen_sha256} if task.frozen else {}
                keep = self.plan.settings.keep_checkpoints
                checkpoint.save(self.checkpoints, record.round, record.state, unsaved, extra, keep, since=saved)
                unsaved, saved = {}, record.round
            most = self.plan.cohort.max_abandoned
            if most is not None and abandoned > most:
                raise QuorumError(
                    f"{self.title}: {abandoned} of {record.round} rounds did not count, because too few clients took "
                    f"part or sent valid updates, and cohort.max_abandoned = {most}. Raise it to continue."
                )
            if last:
                if record.round and not group.store.learnt(self.number):
                    why = "" if record.time is None else f" cohort.deadline is {self.plan.cohort.deadline}."
                    cause = f"no round had enough clients.{why}"
                    if record.complete and record.cohort and not record.reports:
                        asks = "call cohort.reduce, cohort.map or cohort.exchange there"
                        cause = f"{named(self.algorithm.round)} asked no clients: {asks}."
                    if record.left_out or record.outliers:
                        cause = "updates were left out, because training diverges. A smaller lr or a clip may help."
                    raise QuorumError(f"Nothing was learnt by {self.label}: {cause}")
                group.store.set_status(self.number, "done", weights_sha256=sha)
                return True
            # a pause that comes after the checkpoint was due waits for the next one
            if stopping or (saving and not self._hold(group.store, record.round, should_stop)):
                return False
        return True

    def _watched(self, records: Iterator[RoundRecord], group: WorkerGroup) -> Iterator[RoundRecord]:
        """Pass on the rounds, and caution about your code: draws that nobody can repeat, values that workers lack."""
        own = has_own_class(self.algorithm)
        before = _positions() if own else None
        for record in records:
            for module, why in imported_by_workers().items():
                self._caution(
                    group.store,
                    f"Worker processes import your module {module} from its file, because {why}. Values that your "
                    "program sets in it later have no effect on training. They have if they are arguments "
                    '(functools.partial), or if this process computes (backend = "serial").',
                )
            if own and before != _positions():
                others = " (or of one that ran beside it)" if group.groups > 1 and len(self.plan.algorithms) > 1 else ""
                half = f"the server's half{others}, {named(self.algorithm.round)}"
                self._caution(
                    group.store,
                    f"{self.label}: {half}, draws from a global generator, so that another run gives other numbers. "
                    'Seed one of its own in each round, as in torch.Generator().manual_seed(cohort.key("noise")).',
                )
                own = False  # once is enough
            yield record
            before = _positions() if own else None

    def _caution(self, store: Store, text: str) -> None:
        """Show a caution about the algorithm, and keep it for the report."""
        with generators.GENERATOR:  # cells that run side by side add to the same list
            known = store.fact("cautions about algorithms") or []
            if text not in known:
                self.progress.caution(text)
                store.set_fact("cautions about algorithms", [*known, text])

    def _hold(self, store: Store, round: int, should_stop: Callable[[], bool]) -> bool:
        """Wait while the run is paused, and let others see that; return whether it goes on."""
        if not self.control.pauses:
            return True
        store.set_fact(PAUSED, round)
        try:
            return self.control.hold(should_stop)
        finally:
            store.set_fact(PAUSED, None)

    def _fleet(self, store: Store, federation: Federation, task: Task) -> Fleet | None:
        """Return the clients as machines, if the plan has a virtual clock."""
        system = self.plan.system
        if system is None or self.algorithm.pooled:
            return None
        step = None
        if system.step == "measure":
            step = step_seconds(store, self.label, federation, task, self.algorithm.train)
        return Fleet.of(system, federation, self.seed, step=step, base=self.plan.base)

    def _target(self, task: Task) -> Callable[[RoundRecord], bool] | None:
        """Return a function that says whether a round reaches the target, if the cell stops there."""
        check_target(self.plan.evaluate, task)
        if self.plan.evaluate.stop != "target":
            return None
        (metric, target), *_ = self.plan.evaluate.target.items()
        lower = metric == "loss" or any(m.name == metric and not m.higher_is_better for m in task.measures)

        def reached(record: RoundRecord) -> bool:
            value = headline.of_round(record, task).get(metric)
            return value is not None and (value <= target if lower else value >= target)

        return reached


def _positions() -> object:
    """Return where the global generators are, while no other thread has them on loan."""
    with generators.GENERATOR:
        return generators.positions()


def final_sha256(
    backend: Backend, algorithm: Algorithm, task: Task, state: Groups, own: Mapping[int, Groups]
) -> str | None:
    """Return the fingerprint of what a cell ends with: the global model, and every client's if it has its own.

    Models on other machines are fingerprinted there. If one is missing, there is no fingerprint.
    """
    model = algorithm.server_model(task, state)
    shared = None if model is None else tree.sha256(task.whole(model))
    if shared is not None and not (has_own_models(algorithm) and own):
        return shared
    found = backend.model_sha256(algorithm, task, state, own)
    if found.keys() != own.keys():
        return None
    lines = [f"{client} {found[client]}\n" for client in sorted(found)]
    return hashlib.sha256("".join([*([f"{shared}\n"] if shared else []), *lines]).encode()).hexdigest()
