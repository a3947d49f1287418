"""The only round loop: a generator of round records. Checkpoints and progress are code in the loop that reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from fedloom import tree
from fedloom.algorithm import Algorithm
from fedloom.backends.protocol import Backend
from fedloom.data.federation import Federation
from fedloom.data.split import SPLITS, SplitName
from fedloom.errors import InputError, RoundAbandoned, TrainingError
from fedloom.federation.client_state import ClientStates
from fedloom.federation.cohort import Cohort
from fedloom.federation.evaluation import EvaluationWork, ServerEvaluation
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import Report
from fedloom.machine import computing
from fedloom.record import Count, Record
from fedloom.task import Task
from fedloom.training.evaluation import Measured
from fedloom.training.local import Groups

Public = tuple[int, str, int, float]  # client, name, about (another client, or the number's place), value
Phase = Literal["pre_fit", "post_fit", "final"]


class Evaluation(Record):
    """What is measured, on which data and how often."""

    every: Count = 1
    """Evaluate in every round that is a multiple of this, in the first one and in the last one."""
    splits: tuple[SplitName, ...] = ("test",)
    """The splits of each client to evaluate on, before and after local training."""
    clients: Literal["all", "cohort"] = "all"
    """Evaluate at all clients before local training, or only at the cohort's."""
    universal: bool = False
    """At the end, evaluate every client's model on the union of all test splits."""
    epochs: bool = False
    """Also evaluate on the validation split after every local epoch."""
    server: tuple[Literal["train", "validation", "test"], ...] | None = None
    """The splits to evaluate the global model on: the server's own data, or else the union of the clients'. By
    default, whatever the server holds.
    """


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to go on after a round: the server's state and what the clients keep."""

    round: int
    state: Groups
    own: dict[int, Groups] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundRecord:
    """What happened in one round."""

    round: int
    state: Groups  # the new state, after this round
    cohort: tuple[int, ...]
    reports: tuple[Report, ...]  # one per client and call
    clients: dict[Phase, dict[int, dict[str, Measured]]]  # phase → client → split
    server: dict[str, Measured]  # the new global model, per split
    own: dict[int, Groups]  # the states of clients that changed
    public: tuple[Public, ...] = ()  # numbers that clients made public, such as scores they gave each other
    seconds: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)  # what the algorithm's server half noted
    complete: bool = True  # false when too few took part: the state is then the old one
    left_out: tuple[int, ...] = ()  # clients whose updates were not finite, which a robust rule leaves out
    reached: bool = False  # what the run was to stop at


def fit(
    federation: Federation,
    task: Task,
    algorithm: Algorithm,
    rounds: int,
    *,
    seed: int = 0,
    sampling: Sampling = Sampling(),
    evaluation: Evaluation = Evaluation(),
    backend: Backend | None = None,
    resume: Snapshot | None = None,
    until: Callable[[RoundRecord], bool] | None = None,
) -> Iterator[RoundRecord]:
    """Train for `rounds` rounds in all and yield a record after each; `resume` continues after the snapshot's round.

    Without a backend the serial one is used.
    """
    sampling.check(federation.clients)
    if backend is None:
        from fedloom.backends.serial import Serial

        backend = Serial(federation, task)
    initial = task.initial()
    if not algorithm.takes_complex and any(leaf.is_complex() for leaf in initial.values()):
        raise InputError(f"The model has complex parameters, and {type(algorithm).__name__} computes with real ones.")
    own = ClientStates(backend.keep(algorithm.init_own(task, initial)), resume.own if resume else None)
    state = resume.state if resume else algorithm.init(task, initial)
    del initial  # which may be large
    for round in range(resume.round + 1 if resume else 1, rounds + 1):
        began = time.perf_counter()
        with computing():
            measuring = round % evaluation.every == 0 or round in (1, rounds)
            splits = evaluation.splits if measuring else ()
            ids = (federation.everyone,) if algorithm.pooled else sampling.draw(federation.clients, round, seed)
            everyone = algorithm.pooled or evaluation.clients == "all"
            # a million numbers are made only when somebody is measured
            observed = (tuple(range(federation.clients)) if everyone else ids) if evaluation.splits else ()
            clients: dict[Phase, dict[int, dict[str, Measured]]] = {}
            if splits and observed:
                clients["pre_fit"] = backend.run(
                    EvaluationWork.of(algorithm, state, own.gather(observed), observed, splits, round)
                )
            cohort = Cohort(backend, algorithm, task, ids, federation.clients, round, seed, own)
            cohort.measure, cohort.watch_epochs = splits, evaluation.epochs
            cohort.server_examples = {split: len(labels) for split, (_, labels) in federation.server.items()}
            # whoever may stop at any round must be ready for its end in every round
            cohort.universal = evaluation.universal and (round == rounds or until is not None)
            complete = algorithm.pooled or len(ids) >= max(sampling.needed(federation.clients), 1)
            if complete:
                try:
                    state = _checked(algorithm.round(state, cohort), state, task, cohort, federation)
                    _check_kept(own, task, cohort, federation)
                except RoundAbandoned:
                    complete = False
                    own.undo()
            for report in cohort.reports:
                if report.post_fit:
                    clients.setdefault("post_fit", {})[report.client] = report.post_fit
            server = _examine_server(backend, federation, task, algorithm, state, evaluation) if measuring else {}
            changed, public = own.take_changed(), tuple(_public(cohort))
            record = RoundRecord(
                round,
                state,
                cohort.ids,
                tuple(cohort.reports),
                clients,
                server,
                changed,
                public,
                notes=cohort.notes,
                complete=complete,
                left_out=tuple(cohort.left_out),
            )
            reached = until is not None and until(record)
            if (round == rounds or reached) and evaluation.splits and observed:
                final = EvaluationWork.of(algorithm, state, own.gather(observed), observed, evaluation.splits, round)
                clients["final"] = backend.run(final)
        yield replace(record, seconds=time.perf_counter() - began, reached=reached)
        if reached:
            return


def _checked(state: Groups, before: Groups, task: Task, cohort: Cohort, federation: Federation) -> Groups:
    """The new state, if it is sound."""
    for name, group in state.items():
        if not tree.is_sound(group, task.trainable):
            raise _diverged(f"the new {name}", cohort, federation)
    # averaging equal numbers may change their last bits, and frozen parameters must not drift
    return {
        name: {**group, **{leaf: before[name][leaf] for leaf in task.frozen if leaf in group and leaf in before[name]}}
        if name in before
        else group
        for name, group in state.items()
    }


def _check_kept(own: ClientStates, task: Task, cohort: Cohort, federation: Federation) -> None:
    """What clients keep must be sound as well: it may be their model. On a network, agents look themselves."""
    for client in sorted(own.changed):
        for name, group in own.states[client].items():
            if not tree.is_sound(group, task.trainable):
                raise _diverged(f"the {name} that client '{federation.name(client)}' keeps", cohort, federation)


def _diverged(what: str, cohort: Cohort, federation: Federation) -> TrainingError:
    """An error that names those whose answers were not finite, unless that is all of several."""
    everyone = {report.client for report in cohort.reports}
    wrong = sorted({report.client for report in cohort.reports if not report.finite})
    names = ", ".join(f"'{federation.name(client)}'" for client in wrong[:3])
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    why = f", because the update of {names}{more} is not" if len(wrong) in range(1, max(len(everyone), 2)) else ""
    return TrainingError(f"Round {cohort.round}: {what} is not finite{why}. A smaller lr or a clip may help.")


def _examine_server(
    backend: Backend, federation: Federation, task: Task, algorithm: Algorithm, state: Groups, evaluation: Evaluation
) -> dict[str, Measured]:
    """The global model on what the server holds; `train` is the union of the clients' training splits."""
    weights = algorithm.server_model(task, state)
    if weights is None:
        return {}
    measured: dict[str, Measured] = {}
    for split in SPLITS if evaluation.server is None else evaluation.server:
        if split in federation.server:
            examples = len(federation.server[split][1])
            work = ServerEvaluation(weights, split, range(-(-examples // ServerEvaluation.piece)))
            measured[split] = sum(backend.run(work), Measured())
        elif evaluation.server is not None:
            everyone = tuple(range(federation.clients))
            graded = backend.run(EvaluationWork.of(algorithm, {}, {}, everyone, (split,), model=weights))
            answered = [graded[client] for client in everyone if client in graded]  # on a network some may not
            measured[split] = sum((found[split] for found in answered if split in found), Measured())
    return measured


def _public(cohort: Cohort) -> Iterator[Public]:
    """What clients made public in a round; a row with one number per client of the cohort is about those clients."""
    for name, values in cohort.public.items():
        ids = cohort.publishers[name]
        for client, row in zip(ids, values.reshape(len(ids), -1).tolist(), strict=True):
            about = ids if len(row) == len(ids) > 1 else range(len(row))
            yield from ((client, name, other, value) for other, value in zip(about, row, strict=True) if value == value)
