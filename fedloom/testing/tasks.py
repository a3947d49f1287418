"""One check that every model and loss must pass: yours, on your own data.

`check_task(task, federation)` trains on a few of your examples with a plain torch loop and in every way that fedloom
has, and raises an AssertionError with one clear sentence where they differ.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedloom.backends.serial import Serial
from fedloom.backends.vector import Workers
from fedloom.data.federation import Federation
from fedloom.errors import FedloomError, InputError
from fedloom.task import Task
from fedloom.testing.comparison import Comparison, Found
from fedloom.training.settings import Training

ROUNDS, BATCH = 2, 4
TARGETS = (10, 7, 11)  # training examples of three unequal clients: their last batches have 2, 3 and 3
TRAINING = Training(lr=0.02, momentum=0.9, weight_decay=0.01, epochs=2, batch_size=BATCH)
PATIENCE = 2.0  # seconds before it shows progress


@dataclass(frozen=True)
class TaskReport:
    """The differences from the plain loop, and how the task can be computed."""

    ways: dict[str, float]  # way to compute → its largest difference
    precision: str
    tolerance: float
    replayed: str  # empty if steps are recorded and replayed, else why not
    grouped: str  # empty if clients are trained side by side, else why not
    described: str

    @property
    def furthest(self) -> float:
        """The largest difference from the plain loop."""
        return max(self.ways.values())

    def __str__(self) -> str:
        lines = [
            f"{len(self.ways)} ways of computing give what a plain torch loop gives. The largest difference is "
            f"{self.furthest:.1e}; up to {self.tolerance:g} is allowed in {self.precision}.",
            f"Compared on {self.described}.",
            f"Steps are replayed: {'no, ' + self.replayed if self.replayed else 'yes'}",
            f"Clients are trained side by side: {'no, ' + self.grouped if self.grouped else 'yes'}",
            *(f"  {far:7.1e}  {way}" for way, far in self.ways.items()),
        ]
        return "\n".join(lines)


def check_task(
    task: Task, federation: Federation, *, training: Training = TRAINING, workers: int = 0, rounds: int = ROUNDS
) -> TaskReport:
    """Check that fedloom trains your model with your loss as plain torch does. This takes less than a minute.

    FedAvg is computed on about ten examples of three clients by a plain loop (`fedloom.testing.plain_loop`: a module,
    torch.optim, `loss(module(x), y).backward()`), and then by fedloom in every way that it has: step by step, with
    replayed steps, side by side, with the cohort cut in several places, as agents on a network, and on this number of
    `workers`. Weights, training losses and metrics must agree to 1e-9 in float64, and to the bit where fedloom promises
    that. A model that does not run in float64 is compared in float32, to 1e-3.

    An AssertionError says what differs. A task that fedloom cannot train raises an InputError.

    >>> from torch import nn
    >>> data = Federation.from_arrays(np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 2, clients=3)
    >>> report = check_task(Task(nn.Linear, args={"in_features": 4, "out_features": 2}), data)
    >>> report.furthest < 1e-9
    True
    >>> print(report)
    11 ways of computing give what a plain torch loop gives. The largest difference is ...; up to 1e-09 is allowed in
    float64.
    Compared on 3 clients with 28 training examples, 2 rounds of 2 epochs in batches of 4, sgd.
    Steps are replayed: yes
    Clients are trained side by side: yes
    ...
    """
    # metrics are compared as they are computed: in units of the labels, a plain loop knows nothing of scale_target
    federation = replace(federation, preprocessing=federation.preprocessing.replace(target=None))
    task.see(federation)
    with closing(Workers(workers)) if workers else nullcontext() as crew:
        few = a_few(federation, BATCH if training.batch_size == "full" else training.batch_size)
        comparison = _runnable(task, few, training, rounds, [crew] if crew else [])
        found = []
        for one in _shown(comparison):
            found.append(one)
            assert not one.sentence, f"This task is not trained as plain torch trains it. Computed by {one.sentence}"
        return _report(comparison, found)


def a_few(federation: Federation, batch: int) -> Federation:
    """Return three unequal clients with a few of their examples. Last batches are short, but never one example."""
    rows, sizes, names = [], [], []
    counts = federation.sizes("train")
    large = [int(client) for client in np.argsort(-counts, kind="stable") if counts[client] > 1]
    if not large:
        raise InputError("check_task needs a client with at least two training examples.")
    for client, target in zip(large, TARGETS):  # noqa: B905 (there may be fewer clients)
        begin, end = int(federation.offsets[client]), int(federation.offsets[client + 1])
        lengths = np.arange(1, end - begin + 1)
        trained = federation.split.sizes(lengths)[0]
        fitting = lengths[(trained <= target) & (trained > 1) & (trained % batch != 1)]
        length = int(fitting.max()) if len(fitting) else end - begin
        rows.append(torch.arange(begin, begin + length))
        sizes.append(length)
        names.append(federation.name(client))
    chosen = torch.cat(rows)
    return replace(
        federation,
        x=federation.x[chosen],
        y=federation.y[chosen],
        offsets=np.cumsum([0, *sizes]),
        names=names,
        server={},
        split_sizes=None,
    )


def _runnable(
    task: Task, federation: Federation, training: Training, rounds: int, crews: Sequence[Workers]
) -> Comparison:
    """Return the comparison in float64, or in float32 if the model or its loss does not run in float64."""
    for dtype in ("float64", "float32"):
        one = replace(task, dtype=dtype)
        comparison = Comparison(one, federation, training, rounds, evaluation_batch=BATCH, crews=crews)
        try:
            _ = comparison.reference
            return comparison
        except Exception as error:
            why = error
    try:
        comparison.run(Serial(federation, comparison.task, comparison.setup(1)))
    except FedloomError:
        raise  # its message is better
    raise AssertionError(
        f"A plain torch loop cannot train this task, but fedloom does: {type(why).__name__}: {why}"
    ) from why


def _shown(comparison: Comparison) -> Iterator[Found]:
    """Iterate over the results of all ways. After a moment, show progress."""
    began = time.perf_counter()
    ways = list(comparison.ways())
    for number, way in enumerate(ways):
        if time.perf_counter() - began > PATIENCE:
            print(f"check_task: {number + 1} of {len(ways)}, {way.name}", file=sys.stderr, flush=True)
        yield comparison.try_out(way)


def _report(comparison: Comparison, found: list[Found]) -> TaskReport:
    training, federation = comparison.training, comparison.federation
    pairs = comparison.setup(2)
    examples = int(federation.sizes("train").sum())
    return TaskReport(
        ways={one.way: one.far for one in found},
        precision=comparison.task.dtype,
        tolerance=comparison.tolerance,
        replayed=comparison.found.cannot_replay,
        grouped="" if pairs.group > 1 else comparison.found.cannot_group,
        described=f"{federation.clients} clients with {examples} training examples, {comparison.rounds} rounds of "
        f"{training.epochs:g} epochs in batches of {training.batch_size}, {training.optimizer}",
    )
