"""The tables of a run that show single clients, or statistics over clients.

`round_stats`, `user_stats`, `universal_test` and `summary` have the layout of Samani's experiments (average, standard
deviation, lowest, highest over clients). With several seeds, each statistic is computed per seed and then averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fedloom.data.split import SPLITS
from fedloom.results.run_data import RunData
from fedloom.results.run_values import Stats
from fedloom.results.sentences import say
from fedloom.results.statistics import known_mean
from fedloom.results.table import STATISTICS, Table, Value

END = {"final": "final model", "post_fit": "after local training"}
MODEL = {"final": "clients_final", "post_fit": "clients_post_fit"}  # the same as sentences
PHASES = {"pre_fit": "before local training", "post_fit": "after local training"}


def all_tables(run: RunData, metric: str) -> Iterator[Table]:
    """Every table about clients that the run has numbers for."""
    for maker in (summary, universal_test, clients):
        yield from maker(run, metric)
    yield from long_table(run, metric, "round", lambda round: round)
    yield from long_table(run, metric, "user", run.client_name)


def summary(run: RunData, metric: str) -> Iterator[Table]:
    """The last measured round: average, standard deviation, lowest and highest over clients."""
    for phase, words in PHASES.items():
        last = {label: run.last_round(label, phase, metric).values() for label in run.labels}
        found = {label: average([one.by_round() for one in values]) for label, values in last.items()}
        stats = {label: one for label, one in found.items() if one is not None}
        rows: list[tuple[Value, ...]] = [
            (name, *(float(getattr(one, part)[-1]) for one in stats.values())) for name, part in STATISTICS.items()
        ]
        if stats:
            title = f"{run.metric(metric).capital_title} over clients at the end, {words}{run.drawn(phase)}"
            kinds = ("text", *[run.metric(metric).number_format] * len(stats))
            names = ("over clients", *stats)
            yield Table(f"summary_{metric}_{phase}", title, names, tuple(rows), kinds, _seeds_in_words(run))


def universal_test(run: RunData, metric: str) -> Iterator[Table]:
    """Every client's model on the union of all test splits; the pooled model has one number."""
    found = {label: run.last_round(label, "universal", metric) for label in run.labels}
    found = {label: values for label, values in found.items() if values}
    per_client = {label: {} if run.is_pooled(label) else run.last_means(label, "universal", metric) for label in found}
    numbers = sorted({number for known in per_client.values() for number in known})
    rows: list[tuple[Value, ...]] = [
        (run.client_name(number), *(known.get(number) for known in per_client.values())) for number in numbers
    ]
    for name, part in STATISTICS.items():
        values: list[Value] = []
        for label, seeds in found.items():
            per_seed = [float(getattr(one.by_round(), part)[-1]) for one in seeds.values()]
            one_model = run.is_pooled(label)  # which has no spread over clients
            values.append(None if one_model and name != "Average" else known_mean(per_seed))
        rows.append((name, *values))
    if found:
        info = run.metric(metric)
        title, kinds = f"Universal test: {info.title}", ("text", *[info.number_format] * len(found))
        note = run.about_clients(say("note", "universal_test", seeds=_seeds_in_words(run)))
        yield Table(f"universal_test_{metric}", title, ("user", *found), tuple(rows), kinds, note)


def clients(run: RunData, metric: str) -> Iterator[Table]:
    """How many examples every client has, and how it fares with each algorithm at the end."""
    phase = run.end_phase
    means = {label: run.last_means(label, phase, metric) for label in run.labels}
    means = {label: known for label, known in means.items() if known}
    measured = {client for label in means for client in run.last_means(label, phase, "loss")}
    rows: list[tuple[Value, ...]] = []
    for client in run.clients:
        values = [known.get(client["client"]) for known in means.values()]
        # a client whose examples do not define the metric has a row, too, with empty cells
        if client["client"] in measured or any(value is not None for value in values):
            rows.append((run.client_name(client["client"]), *(client[split] for split in SPLITS), *values))
    if means:
        columns, kind = ("client", *SPLITS, *means), run.metric(metric).number_format
        kinds = ("text", *["whole"] * len(SPLITS), *[kind] * len(means))
        drawn = "in_which_drawn" if run.leaves_out_clients(phase) else "over_seeds"
        mean = say("note", drawn) if len(run.seeds_of_clients) > 1 else ""
        title = f"Every client: {run.metric(metric).title}, {END[phase]}"
        note = run.about_clients(say("note", "clients", model=say("note", MODEL[phase]), mean=mean))
        yield Table(f"clients_{metric}", title, columns, tuple(rows), kinds, note)


def long_table(run: RunData, metric: str, axis: str, name_of: Callable[[int], Value]) -> Iterator[Table]:
    """Statistics over clients for every round, or over rounds for every client: one row per algorithm and phase too."""
    rows: list[tuple[Value, ...]] = []
    seeds = run.seeds if axis == "round" else run.seeds_of_clients
    for label in run.labels:
        for phase in PHASES:
            values = run.client_values_by_seed(label, phase, metric, seeds).values()
            stats = average([one.by_round() if axis == "round" else one.by_client() for one in values])
            if stats is not None:
                parts = zip(*(getattr(stats, part).tolist() for part in STATISTICS.values()), strict=True)
                index = stats.index.tolist()
                rows += [(label, phase, name_of(at), *part) for at, part in zip(index, parts, strict=True)]
    if rows:
        shown, deviation = run.metric(metric).number_format, run.metric(metric).deviation_format
        columns = ("algorithm", "phase", axis, *STATISTICS)
        kinds = ("text", "text", "whole" if axis == "round" else "text", shown, deviation, shown, shown)
        over = "clients" if axis == "round" else "rounds"
        title = f"{run.metric(metric).capital_title} on each client's test split, over {over}"
        note = _seeds_in_words(run) if len(seeds) == len(run.seeds) else run.about_clients("")
        note += " " + say("note", "never_drawn") if run.leaves_out_clients("post_fit") else ""
        yield Table(f"{axis}_stats_{metric}", title, columns, tuple(rows), kinds, note)


def average(found: Sequence[Stats]) -> Stats | None:
    """The mean of several seeds' statistics, for the rounds or clients that all seeds have; None if there are none."""
    if not found:
        return None
    common = found[0].index
    for stats in found[1:]:
        common = np.intersect1d(common, stats.index)
    if not len(common):
        return None
    kept = [np.isin(stats.index, common) for stats in found]
    means = (
        np.mean([getattr(stats, part)[keep] for stats, keep in zip(found, kept, strict=True)], axis=0)
        for part in STATISTICS.values()
    )
    return Stats(common, *means)


def _seeds_in_words(run: RunData) -> str:
    if len(run.seeds) > 1:
        return f"Computed for each of {len(run.seeds)} seeds, then averaged over seeds."
    return "One seed."
