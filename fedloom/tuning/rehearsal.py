"""A rehearsal of a round, in which one client with a few examples stands for all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedloom.algorithm import Algorithm
from fedloom.backends.protocol import Backend
from fedloom.compression.table import NO_COMPRESSION, CompressTable
from fedloom.data.federation import Federation
from fedloom.data.split import Split
from fedloom.errors import Diverged, FedloomError, InputError, TrainingError
from fedloom.federation.blame import initial_own, initial_state, server_half
from fedloom.federation.client_state import ClientStates
from fedloom.federation.cohort import Cohort
from fedloom.federation.work import ClientWork, Place, Report, Work
from fedloom.task import Task
from fedloom.training.probe import Probe
from fedloom.tree import Groups, expand, row

EXAMPLES = 20  # enough for a validation split with more than one class, most of the time
EPOCHS = 6.0  # of a rehearsal: enough steps to show that they are too large, on so few examples


@dataclass(frozen=True)
class MessageBytes:
    """Bytes in a round, of all clients together."""

    up: int
    down: int

    @staticmethod
    def of(reports: Sequence[Report]) -> MessageBytes:
        """Add up what clients report."""
        return MessageBytes(sum(report.bytes_up for report in reports), sum(report.bytes_down for report in reports))


def rehearse(
    algorithm: Algorithm,
    federation: Federation,
    task: Task,
    facts: Probe,
    cohort: int,
    compress: CompressTable = NO_COMPRESSION,
    epochs: float = EPOCHS,
    **more: Any,
) -> Sequence[Report] | None:
    """Return what the clients of a round with a cohort of this size report, as in a run; None if only it can tell.

    Raise what a run of this algorithm with this task would raise, in fedloom's checks or in your own code. `more` are
    fields of `Cohort`.
    """
    few = few_examples(federation)
    backend = _OneForAll(Place(few, task, facts.setup(group=1)))
    initial = task.initial()
    kept = {**initial_own(algorithm, task, initial), **compress.initial_own}
    own, ids = _AllAlike(kept), tuple(range(1 if algorithm.pooled else cohort))
    short = algorithm.replace(epochs=epochs, drop_last=algorithm.train.drop_last or _leaves_one(algorithm, few))
    clients = Cohort(backend, short, task, ids, federation.clients, round=1, seed=0, own=own, compress=compress, **more)
    try:
        server_half(short, initial_state(algorithm, task, initial), clients)
    except InputError:
        raise
    except FedloomError as error:
        if isinstance(error.__cause__, Diverged):
            return None  # a step made the loss infinite, which need not happen with all examples
        raise TrainingError(f"A rehearsal with {EXAMPLES} examples failed. {error}") from error
    if algorithm.pooled:
        return [replace(report, bytes_up=0, bytes_down=0) for report in clients.reports]
    return clients.reports


def few_examples(federation: Federation) -> Federation:
    """Make one client with a few examples from all clients, some of them repeatedly if there are not enough."""
    rows = torch.from_numpy(np.linspace(0, len(federation.y) - 1, EXAMPLES).astype(np.int64))
    return replace(
        federation,
        x=federation.x[rows],
        y=federation.y[rows],
        offsets=np.array([0, len(rows)]),
        split=Split(),
        split_sizes=None,
        names=None,
        server={},
    )


def _leaves_one(algorithm: Algorithm, few: Federation) -> bool:
    """Whether a last batch would be a single example, which batch normalisation refuses, and clients may not have."""
    count = int(few.sizes("train")[0])
    return any(count % size == 1 for size in algorithm.train.batch_sizes if isinstance(size, int))


class _AllAlike(ClientStates):
    """Every client keeps its initial state: one copy stands for all."""

    def gather(self, ids: Iterable[int], hidden: Collection[str] = ()) -> Groups:
        count = len(list(ids))
        return {group: expand(kept, count) for group, kept in self.initial.items()}

    def put(self, ids: Iterable[int], own: Groups) -> None:
        """Nothing is kept."""


class _OneForAll(Backend):
    """A backend that computes the first client and repeats its answer for the others."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def run(self, work: Work) -> Any:
        assert isinstance(work, ClientWork)
        found = work.part(0, 1).perform(self.place)
        (first,) = found.reports
        count = len(work.ids)

        def everybody(groups: Groups) -> Groups:
            return {group: expand(row(stacked, 0), count) for group, stacked in groups.items()}

        return replace(
            found,
            stack=everybody(found.stack),
            weights={group: weight.expand(count) for group, weight in found.weights.items()},
            public={name: value.expand(count, *value.shape[1:]) for name, value in found.public.items()},
            own=everybody(found.own),
            reports=tuple(
                replace(first, client=client, bytes_down=work.received(position))
                for position, client in enumerate(work.ids)
            ),
        )
