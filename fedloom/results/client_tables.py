"""A run's results client by client, and statistics over clients, as tables.

`round_stats`, `user_stats`, `universal_test` and `summary` have the layout of Samani's experiments (average, standard
deviation, lowest, highest over users); with several seeds each statistic is computed for every seed and then averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedloom.results.run_data import RunData, Stats, grouped
from fedloom.results.statistics import known_mean
from fedloom.results.table import STATISTICS, Table, Value

PHASES = {"pre_fit": "before local training", "post_fit": "after local training"}


def of_metric(view: RunData, metric: str) -> Iterator[Table]:
    """Every table of this kind that the run has numbers for."""
    for layout in (summary, universal_test, clients, round_stats, user_stats):
        yield from layout(view, metric)


def summary(view: RunData, metric: str) -> Iterator[Table]:
    """The last measured round: average, standard deviation, lowest and highest over users."""
    for phase, words in PHASES.items():
        all_stats = {label: _over_seeds(view, label, phase, metric, last=True) for label in view.labels}
        stats = {label: found for label, found in all_stats.items() if found is not None}
        if stats:
            shown = "percent" if view.metric(metric).percent else "number"
            rows: tuple[tuple[Value, ...], ...] = tuple(
                (name, *(float(_part(found, name)[-1]) for found in stats.values())) for name in STATISTICS
            )
            title = f"{metric.capitalize()} over users at the end, {words}"
            kinds = ("text", *[shown] * len(stats))
            yield Table(f"summary_{metric}_{phase}", title, ("", *stats), rows, kinds, _averaged(view))


def universal_test(view: RunData, metric: str) -> Iterator[Table]:
    """Every user's model on the union of all test splits; the non-federated model has one number."""
    found = {label: view.last_round(label, "universal", metric) for label in view.labels}
    found = {label: runs for label, runs in found.items() if runs}
    if not found:
        return
    shown = "percent" if view.metric(metric).percent else "number"
    pooled = {label for label in found if view.is_pooled(label)}
    per_user: dict[str, dict[int, float]] = {}
    for label, runs in found.items():
        if label not in pooled:
            clients = np.concatenate([run.clients for run in runs.values()])
            means = grouped(clients, np.concatenate([run.values for run in runs.values()]))
            per_user[label] = dict(zip(means.index.tolist(), means.mean.tolist(), strict=True))
    users = sorted({user for known in per_user.values() for user in known})
    rows: list[tuple[Value, ...]] = [
        (view.client_name(user), *(per_user.get(label, {}).get(user) for label in found)) for user in users
    ]
    per_seed = {label: [run.by_round() for run in runs.values()] for label, runs in found.items()}
    for name in STATISTICS:
        values: list[Value] = []
        for label, seeds in per_seed.items():
            several = label not in pooled  # one model has no spread over users
            last = [float(_part(stats, name)[-1]) for stats in seeds]
            values.append(known_mean(last) if several or name == "Average" else None)
        rows.append((name, *values))
    note = (
        "Each user's model after the local training of the last round, on the union of all users' test splits; users "
        "that were not drawn then are left out. The last average is not distributed, so rows differ also where there "
        "is one global model. " + _averaged(view)
    )
    columns, kinds = ("user", *found), ("text", *[shown] * len(found))
    yield Table(f"universal_test_{metric}", f"Universal test: {metric}", columns, tuple(rows), kinds, note)


def clients(view: RunData, metric: str) -> Iterator[Table]:
    """What every client holds, and how it fares with each algorithm at the end."""
    found: dict[str, dict[int, float]] = {}
    for label in view.labels:
        runs = list(view.last_round(label, "post_fit", metric).values())
        if runs:
            means = grouped(np.concatenate([r.clients for r in runs]), np.concatenate([r.values for r in runs]))
            found[label] = dict(zip(means.index.tolist(), means.mean.tolist(), strict=True))
    if not found:
        return
    shown = "percent" if view.metric(metric).percent else "number"
    rows: tuple[tuple[Value, ...], ...] = tuple(
        (
            client["name"],
            client["train"],
            client["validation"],
            client["test"],
            *(known.get(client["client"]) for known in found.values()),
        )
        for client in view.clients
        if any(client["client"] in known for known in found.values())
    )
    columns = ("client", "train", "validation", "test", *found)
    kinds = ("text", "whole", "whole", "whole", *[shown] * len(found))
    note = (
        "Examples in each split (with several partitions, the first seed's), and each client's model after the local "
        "training of the last measured round, on its own test split; mean of the seeds in which it was drawn then."
    )
    yield Table(f"clients_{metric}", f"Every client: {metric}", columns, rows, kinds, note)


def round_stats(view: RunData, metric: str) -> Iterator[Table]:
    """Statistics over users for every round."""
    yield from _long(view, metric, "round_stats", "round", lambda at: int(at))


def user_stats(view: RunData, metric: str) -> Iterator[Table]:
    """Statistics over rounds for every user."""
    yield from _long(view, metric, "user_stats", "user", view.client_name)


def _long(view: RunData, metric: str, name: str, axis: str, naming: Callable[[int], Value]) -> Iterator[Table]:
    rows: list[tuple[Value, ...]] = []
    for label in view.labels:
        for phase in PHASES:
            found = _over_seeds(view, label, phase, metric, users=axis == "user")
            if found is None:
                continue
            for place, at in enumerate(found.index):
                rows.append((label, phase, naming(int(at)), *(float(_part(found, s)[place]) for s in STATISTICS)))
    if rows:
        shown = "percent" if view.metric(metric).percent else "number"
        columns = ("algorithm", "phase", axis, *STATISTICS)
        over = "users" if axis == "round" else "rounds"
        kinds = ("text", "text", "whole" if axis == "round" else "text", *[shown] * 4)
        if shown == "percent":
            kinds = (*kinds[:4], "deviation", *kinds[5:])
        title = f"{metric.capitalize()} on each user's test split, over {over}"
        yield Table(f"{name}_{metric}", title, columns, tuple(rows), kinds, _averaged(view))


def _over_seeds(
    view: RunData, label: str, phase: str, metric: str, *, last: bool = False, users: bool = False
) -> Stats | None:
    """Statistics of each seed, averaged over seeds, where all seeds have them."""
    found = []
    for seed in view.seeds:
        series = view.client_values(label, seed, phase, metric)
        if len(series):
            series = series.last() if last else series
            found.append(series.by_client() if users else series.by_round())
    return average(found)


def average(found: Sequence[Stats]) -> Stats | None:
    """The mean of several seeds' statistics where all of them have some."""
    if not found:
        return None
    common = found[0].index
    for stats in found[1:]:
        common = np.intersect1d(common, stats.index)
    if not len(common):
        return None
    kept = [np.isin(stats.index, common) for stats in found]

    def mean(name: str) -> Any:
        return np.mean([getattr(stats, name)[keep] for stats, keep in zip(found, kept, strict=True)], axis=0)

    return Stats(common, mean("mean"), mean("std"), mean("low"), mean("high"))


def _part(stats: Stats, name: str) -> Any:
    return {"Average": stats.mean, "Standard deviation": stats.std, "Lowest": stats.low, "Highest": stats.high}[name]


def _averaged(view: RunData) -> str:
    if len(view.seeds) > 1:
        return f"Computed for each of {len(view.seeds)} seeds, then averaged over seeds."
    return "One seed."
