"""The only round loop: a generator of round records. Checkpoints and progress are code in the loop that reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from fedloom.algorithm import Algorithm
from fedloom.backends.protocol import Backend
from fedloom.clock import choice
from fedloom.clock import clock as virtual
from fedloom.clock.fleet import Fleet
from fedloom.compression.table import CompressTable
from fedloom.data.federation import Federation
from fedloom.errors import Diverged, InputError, RoundAbandoned
from fedloom.federation.blame import initial_own, initial_state, server_half
from fedloom.federation.checks import check_settings, introduce
from fedloom.federation.client_state import ClientStates
from fedloom.federation.divergence import checked
from fedloom.federation.evaluation import ByClient, Evaluation, Evaluator
from fedloom.federation.round_record import Phase, RoundRecord, Snapshot, evaluated, public_numbers
from fedloom.federation.sampling import Sampling
from fedloom.machine import computing
from fedloom.privacy.dp.at_client import AtClients
from fedloom.privacy.protection import GROUP, Protection
from fedloom.task import Task

__all__ = ["Evaluation", "Phase", "RoundRecord", "Snapshot", "fit"]


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
    fleet: Fleet | None = None,
    compress: CompressTable = CompressTable(),
) -> Iterator[RoundRecord]:
    """Train until round `rounds` and yield a record after each round; `resume` continues after a snapshot.

    With `rounds` = 0, evaluate the initial model and yield one record, of round 0.

    The default backend is the serial one. `until` ends the run early, after the first record that it accepts.
    `protection` is the server's half of what protects the clients' answers, and `at_clients` says what
    clients do by themselves. With a `fleet`, the run has a virtual clock, which decides who answers in time.
    `compress` says how messages are made smaller.
    """
    introduce(federation, task, seed)
    initial = task.initial()
    check_settings(federation, algorithm, task, initial, rounds, sampling, protection, at_clients, fleet, compress)
    if backend is None:
        from fedloom.backends.serial import Serial

        backend = Serial(federation, task)
    if not isinstance(backend, Backend):
        raise InputError(f"A backend must inherit from fedloom.backends.protocol.Backend. Got {backend!r} instead.")
    kept = backend.keep({**initial_own(algorithm, task, initial), **compress.initial_own})
    own = ClientStates(kept, resume.own if resume else None)
    state = dict(resume.state) if resume else initial_state(algorithm, task, initial)
    if protection is not None and GROUP in state:
        protection.restore(state.pop(GROUP))
    clock = choice.start(fleet, federation, algorithm, sampling, seed, backend, state.pop(virtual.GROUP, None))
    del initial  # it may be large
    if rounds == 0:
        yield evaluated(Evaluator(backend, federation, algorithm, task, compress), state, own, evaluation)
    for round in range(resume.round + 1 if resume else 1, rounds + 1):
        began = time.perf_counter()
        federation, arrivals = backend.begin_round(round, federation)
        evaluator = Evaluator(backend, federation, algorithm, task, compress)
        with computing():
            ids = clock.begin(round) if clock is not None else ()
            if algorithm.pooled:
                ids = (federation.everyone,)
            elif protection is not None and (clock is None or protection.dp is not None):
                ids = protection.draw(round, seed)
            elif clock is None:
                ids = sampling.draw(federation.clients, round, seed)
            measuring = evaluation.is_due(round, rounds)
            splits = evaluation.splits if measuring else ()
            everyone = evaluation.splits and (algorithm.pooled or evaluation.clients == "all")
            measured = tuple(range(federation.clients)) if everyone else ids
            before = evaluation.before(round, rounds, algorithm.pooled, resume.round if resume else 0)
            clients: dict[Phase, ByClient] = {"pre_fit": evaluator.clients(state, own, measured, before, round)}
            new_cohort = partial(
                choice.cohort_kind(clock),
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
                outlier_factor=None if protection else sampling.longest(backend.remote),
                max_examples=sampling.max_examples,
                needed=sampling.needed(federation.clients),
                client_privacy=None if at_clients is None else at_clients.privacy,
                protection=protection,
                compress=compress,
                name=federation.name,
            )
            cohort = new_cohort()
            if at_clients is not None:
                cohort.note(**at_clients.charge(round, int(federation.sizes("train").min()), algorithm))
            noise_alone = protection is not None and protection.releases_noise_alone
            complete = algorithm.pooled or (len(ids) >= cohort.needed and (clock is None or clock.found_clients))
            # Poisson sampling may draw nobody: a round in which nothing changes, unless noise is released
            while complete and (ids or noise_alone or sampling.mode == "async"):
                try:
                    state = checked(server_half(algorithm, state, cohort), cohort, federation)
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
            passed = clock.end() if clock is not None else None
            remembered |= {virtual.GROUP: clock.state} if clock is not None else {}
            if round == rounds:
                backend.rest()
            record = RoundRecord(
                round,
                state | remembered,
                cohort.ids,
                tuple(cohort.reports),
                clients,
                evaluator.server(state, evaluation.server, round) if measuring else {},
                own.take_changed(),
                public_numbers(cohort),
                notes=cohort.notes,
                complete=complete,
                left_out=tuple(cohort.left_out),
                outliers=tuple(cohort.outliers),
                arrivals=arrivals,
                absences=dict(backend.absences()),
                federation=federation,
                time=passed,
            )
            reached = until is not None and until(record)
            reached = reached or (round < rounds and protection is not None and protection.is_spent)
            if round == rounds or reached:
                backend.rest()
                clients["final"] = evaluator.clients(state, own, measured or cohort.ids, evaluation.splits, round)
        record = replace(record, clients={phase: found for phase, found in clients.items() if found})
        yield replace(record, seconds=time.perf_counter() - began, reached=reached)
        if reached:
            return
