"""Turn a round into rows of the run's database."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import astuple
from typing import Any

from fedloom.federation.engine import RoundRecord
from fedloom.task import Task
from fedloom.training.evaluation import Measured, pool
from fedloom.tree import size

# public numbers for clients that were left out of a round; a network adds those of `Arrivals` and `Absences`
LEFT_OUT = "left_out"  # the update was not finite, or made the model so
OUTLIER = "outlier"  # the change was far longer than the others'


def fetching(record: RoundRecord, before: Iterable[int]) -> set[int]:
    """Return the clients of a round that fetch frozen parameters: one of each site that had no client `before`."""
    site = record.federation.site if record.federation is not None else int
    known = {site(client) for client in before}
    first = {site(report.client): report.client for report in reversed(record.reports)}
    return {client for where, client in first.items() if where not in known}


def tabulate(record: RoundRecord, task: Task, fetching: Collection[int] = ()) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of a round for each table, without the cell; some clients fetch the model's frozen parameters."""
    traffic: dict[int, tuple[int, int]] = {}
    epochs: dict[int, int] = {}
    history: list[tuple[Any, ...]] = []
    for report in record.reports:  # one per client and call: add up bytes, and number the epochs through
        up, down = traffic.get(report.client, (0, 0))
        traffic[report.client] = up + report.bytes_up, down + report.bytes_down
        for values in report.history:
            epochs[report.client] = epoch = epochs.get(report.client, 0) + 1
            history += [(record.round, report.client, epoch, metric, value) for metric, value in values.items()]
    for client in fetching:
        up, down = traffic[client]
        traffic[client] = up, down + size(task.frozen)
    if record.federation is not None and record.federation.everyone in traffic:
        traffic[record.federation.everyone] = 0, 0  # the pooled baseline trains where the data is: it sends no weights
    up, down = (sum(each) for each in zip(*traffic.values(), strict=True)) if traffic else (0, 0)
    clients: list[tuple[Any, ...]] = []
    pooled: list[tuple[Any, ...]] = []
    for phase, measured in record.clients.items():
        parts: dict[str, list[Measured]] = {}
        for client, splits in measured.items():
            for split, part in splits.items():
                # every client is measured on all test data: a separate phase, never pooled
                universal = split == "universal"
                place = ("universal", "test") if universal else (phase, split)
                if not universal:
                    parts.setdefault(split, []).append(part)
                clients += [(record.round, client, *place, *row) for row in _values(record, part, task, client)]
        for split, found in parts.items():
            pooled += [(record.round, phase, split, *row) for row in _values(record, pool(found), task)]
    times: dict[str, list[tuple[Any, ...]]] = {}
    if (passed := record.time) is not None:
        times["times"] = [(record.round, passed.began, passed.ended, passed.available, len(passed.clients))]
        times["client_times"] = [(record.round, *astuple(one)) for one in passed.clients]
    return times | {
        "rounds": [(record.round, record.seconds, len(traffic), record.complete, up, down)],
        "participants": [(record.round, client, *sums) for client, sums in traffic.items()],
        "client_metrics": clients,
        "pooled_metrics": pooled,
        "server_metrics": [
            *((record.round, split, *row) for split, m in record.server.items() for row in _values(record, m, task)),
            *((record.round, "notes", name, value, 1) for name, value in record.notes.items()),
        ],
        "history": history,
        "public_numbers": [
            *((record.round, *row) for row in record.public),
            *((record.round, client, LEFT_OUT, client, 1.0) for client in record.left_out),
            *((record.round, client, OUTLIER, client, 1.0) for client in record.outliers),
            *((record.round, client, why, client, 1.0) for why, some in record.arrivals.items() for client in some),
            *((record.round, client, why, client, 1.0) for client, why in record.absences.items()),
        ],
    }


def _values(
    record: RoundRecord, measured: Measured, task: Task, client: int | None = None
) -> Iterable[tuple[str, float, int]]:
    values = record.values(measured, task, client)
    return ((metric, value, measured.count) for metric, value in values.items())
