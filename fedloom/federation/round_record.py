"""What is known after a round: its record, and the snapshot from which a run can continue."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from fedloom.backends.protocol import Absences, Arrivals
from fedloom.clock.clock import RoundTime
from fedloom.data.federation import Federation
from fedloom.errors import TrainingError
from fedloom.federation.client_state import ClientStates
from fedloom.federation.cohort import Cohort
from fedloom.federation.evaluation import ByClient, Evaluation, Evaluator
from fedloom.federation.work import Report
from fedloom.machine import computing
from fedloom.task import Task
from fedloom.training.evaluation import Measured
from fedloom.tree import Groups

Public = tuple[int, str, int, float]  # client, name, about (another client, or the number's place), value
Phase = Literal["pre_fit", "post_fit", "final"]


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
    absences: Absences = field(default_factory=dict)  # clients that did not answer, and why
    federation: Federation | None = None  # the clients of the run in this round
    time: RoundTime | None = None  # in virtual time, with a fleet
    reached: bool = False  # whether the run stops here: it reached its target, or has no ε left for another round

    def values(self, measured: Measured, task: Task, client: int | None = None) -> dict[str, float]:
        """Return loss and metrics of a measurement of this round. An error of a metric says whose examples it had."""
        try:
            return measured.values(task)
        except TrainingError as error:
            whose = ""
            if client is not None and self.federation is not None:
                whose = f", client '{self.federation.name(client)}'"
            raise TrainingError(f"Round {self.round}{whose}: {error}") from error


def evaluated(evaluator: Evaluator, state: Groups, own: ClientStates, evaluation: Evaluation) -> RoundRecord:
    """Return a record of a round 0, in which nothing is trained and everything is measured."""
    began = time.perf_counter()
    everyone = tuple(range(evaluator.federation.clients))
    with computing():
        clients: dict[Phase, ByClient] = {"final": evaluator.clients(state, own, everyone, evaluation.splits, 0)}
        server = evaluator.server(state, evaluation.server)
    seconds = time.perf_counter() - began
    return RoundRecord(0, state, (), (), clients, server, {}, seconds=seconds, federation=evaluator.federation)


def public_numbers(cohort: Cohort) -> tuple[Public, ...]:
    """List what clients made public. A row with one number per client of the cohort is about those clients."""
    found: list[Public] = []
    for name, values in cohort.public.items():
        ids = cohort.publishers[name]
        for client, row in zip(ids, values.reshape(len(ids), -1).tolist(), strict=True):
            about = ids if len(row) == len(ids) > 1 else range(len(row))
            found += [(client, name, other, value) for other, value in zip(about, row, strict=True) if value == value]
    return tuple(found)
