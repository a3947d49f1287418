"""The only round loop: a generator of round records. Checkpoints and progress are code in the loop that reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from fedloom.algorithm import Algorithm
from fedloom.backends.protocol import Arrivals, Backend
from fedloom.data.federation import Federation
from fedloom.data.split import SplitName
from fedloom.errors import Diverged, InputError, RoundAbandoned
from fedloom.federation.blame import server_half
from fedloom.federation.client_state import ClientStates
from fedloom.federation.cohort import Cohort
from fedloom.federation.divergence import checked
from fedloom.federation.evaluation import ByClient, Evaluator
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import Report
from fedloom.machine import computing
from fedloom.privacy.dp.at_client import AtClients
from fedloom.privacy.protection import GROUP, Protection
from fedloom.record import Count, Record
from fedloom.task import Task
from fedloom.training.evaluation import Measured
from fedloom.tree import Groups

Public = tuple[int, str, int, float]  # client, name, about (another client, or the number's place), value
Phase = Literal["pre_fit", "post_fit", "final"]


class Evaluation(Record):
    """What is measured, on which data and how often."""

    every: Count = 1
    """Evaluate in every round that is a multiple of this, in the first one and in the last one."""
    splits: tuple[SplitName, ...] = ("test",)
    """The splits of each client to evaluate on, before and after local training."""
    clients: Literal["all", "cohort"] = "all"
    """Evaluate at all clients before local training, or only at those of the cohort."""
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
    """Everything a run needs to continue after a round: the server's state and what the clients keep."""

    round: int
    state: Groups
    own: dict[int, Groups] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundRecord:
    """What happened in one round."""

    round: int
    state: Groups  # after this round
    cohort: tuple[int, ...]
    reports: tuple[Report, ...]  # one per client and call
    clients: dict[Phase, ByClient]
    server: dict[str, Measured]  # the new global model, per split
    own: dict[int, Groups]  # the states of clients that changed
    public: tuple[Public, ...] = ()  # numbers that clients made public, such as the scores they gave each other
    seconds: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)  # what the algorithm's server half noted
    complete: bool = True  # false if too few clients took part: then the state is the old one
    left_out: tuple[int, ...] = ()  # clients whose updates were not finite, or made the result not finite
    outliers: tuple[int, ...] = ()  # clients whose changes were far longer than the others', which sums leave out
    arrivals: Arrivals = field(default_factory=dict)  # clients that joined or whose agents were replaced before it
    federation: Federation | None = None  # the clients of the run in this round
    reached: bool = False  # whether the run stops here: it reached its target, or has no ε left for another round


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
    protection: Protection | None = None,
    at_clients: AtClients | None = None,
) -> Iterator[RoundRecord]:
    """Train until round `rounds` and yield a record after each round; `resume` continues after a snapshot.

    With `rounds` = 0, evaluate the initial model and yield one record, of round 0.

    The default backend is the serial one. `until` ends the run early, after the first record that it accepts.
    `protection` is the server's half of what protects the clients' answers, and `at_clients` says what
    clients do by themselves.
    """
    sampling.check(federation.clients)
    task.see(federation)
    algorithm.train.check_clients(lambda: [federation.name(client) for client in range(federation.clients)])
    if algorithm.divides_by_lr:
        algorithm.train.refuse_zero_rates(type(algorithm).__name__, rounds)
    if protection is not None:
        protection.check(algorithm, task.initial() if protection.table.has_distributed_noise else None)
    if at_clients is not None:
        at_clients.check(algorithm)
    if backend is None:
        from fedloom.backends.serial import Serial

        backend = Serial(federation, task)
    if not isinstance(backend, Backend):
        raise InputError(f"A backend must inherit from fedloom.backends.protocol.Backend. Got {backend!r} instead.")
    initial = task.initial()
    if not algorithm.takes_complex and any(leaf.is_complex() for leaf in initial.values()):
        raise InputError(f"The model has complex parameters, and {type(algorithm).__name__} computes with real ones.")
    own = ClientStates(backend.keep(algorithm.init_own(task, initial)), resume.own if resume else None)
    state = dict(resume.state) if resume else algorithm.init(task, initial)
    if protection is not None and GROUP in state:
        protection.restore(state.pop(GROUP))
    del initial  # it may be large
    if rounds == 0:
        yield _evaluated(Evaluator(backend, federation, algorithm, task), state, own, evaluation)
    for round in range(resume.round + 1 if resume else 1, rounds + 1):
        began = time.perf_counter()
        federation, arrivals = backend.begin_round(round, federation)
        evaluator = Evaluator(backend, federation, algorithm, task)
        with computing():
            draw = protection.draw if protection is not None else partial(sampling.draw, federation.clients)
            ids = (federation.everyone,) if algorithm.pooled else draw(round, seed)
            measuring = round % evaluation.every == 0 or round in (1, rounds)
            splits = evaluation.splits if measuring else ()
            everyone = evaluation.splits and (algorithm.pooled or evaluation.clients == "all")
            measured = tuple(range(federation.clients)) if everyone else ids
            clients: dict[Phase, ByClient] = {}
            clients["pre_fit"] = evaluator.clients(state, own, measured, splits, round)
            new_cohort = partial(
                Cohort,
                backend,
                algorithm,
                task,
                ids,
                federation.clients,
                round,
                seed,
                own,
                measure=splits,
                # a run that may stop after any round must be ready for its end in every round
                universal=evaluation.universal and (round == rounds or until is not None),
                watch_epochs=evaluation.epochs,
                validate=evaluator.validate,
                outlier_factor=None if protection or sampling.outlier_factor == "off" else sampling.outlier_factor,
                max_examples=sampling.max_examples,
                needed=sampling.needed(federation.clients),
                client_privacy=None if at_clients is None else at_clients.privacy,
                protection=protection,
            )
            cohort = new_cohort()
            if at_clients is not None:
                cohort.note(**at_clients.charge(round, int(federation.sizes("train").min()), algorithm))
            noise_alone = protection is not None and protection.releases_noise_alone
            complete = algorithm.pooled or len(ids) >= cohort.needed
            # Poisson sampling may draw nobody: a round in which nothing changes, unless noise is released
            while complete and (ids or noise_alone):
                try:
                    state = checked(server_half(algorithm, state, cohort), state, cohort, federation)
                    break
                except RoundAbandoned:
                    complete = False
                    own.undo()
                except Diverged as error:
                    if error.largest is None or not backend.leave_out(round, error.largest):
                        raise
                    own.undo()
                    cohort = new_cohort()
            clients["post_fit"] = {report.client: report.post_fit for report in cohort.reports if report.post_fit}
            remembered = {GROUP: protection.state} if protection is not None and protection.state else {}
            record = RoundRecord(
                round,
                state | remembered,
                cohort.ids,
                tuple(cohort.reports),
                clients,
                evaluator.server(state, evaluation.server, round) if measuring else {},
                own.take_changed(),
                tuple(_public(cohort)),
                notes=cohort.notes,
                complete=complete,
                left_out=tuple(cohort.left_out),
                outliers=tuple(cohort.outliers),
                arrivals=arrivals,
                federation=federation,
            )
            reached = until is not None and until(record)
            reached = reached or (round < rounds and protection is not None and protection.is_spent)
            if round == rounds or reached:
                clients["final"] = evaluator.clients(state, own, measured, evaluation.splits, round)
        record = replace(record, clients={phase: found for phase, found in clients.items() if found})
        yield replace(record, seconds=time.perf_counter() - began, reached=reached)
        if reached:
            return


def _evaluated(evaluator: Evaluator, state: Groups, own: ClientStates, evaluation: Evaluation) -> RoundRecord:
    """Return a record of a round 0, in which nothing is trained and everything is measured."""
    began = time.perf_counter()
    everyone = tuple(range(evaluator.federation.clients))
    with computing():
        clients: dict[Phase, ByClient] = {"final": evaluator.clients(state, own, everyone, evaluation.splits, 0)}
        server = evaluator.server(state, evaluation.server)
    seconds = time.perf_counter() - began
    return RoundRecord(0, state, (), (), clients, server, {}, seconds=seconds, federation=evaluator.federation)


def _public(cohort: Cohort) -> Iterator[Public]:
    """List what clients made public. A row with one number per client of the cohort is about those clients."""
    for name, values in cohort.public.items():
        ids = cohort.publishers[name]
        for client, row in zip(ids, values.reshape(len(ids), -1).tolist(), strict=True):
            about = ids if len(row) == len(ids) > 1 else range(len(row))
            yield from ((client, name, other, value) for other, value in zip(about, row, strict=True) if value == value)
