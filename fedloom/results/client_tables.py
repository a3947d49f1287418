"""The tables of a run that show single clients, or statistics over clients.

`round_stats`, `user_stats`, `universal_test` and `summary` have the layout of Samani's experiments (average, standard
deviation, lowest, highest over clients). With several seeds, each statistic is computed per seed and then averaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from fedloom.data.split import SPLITS
from fedloom.results.common_clients import WORDS, common_clients, measured, only, shared
from fedloom.results.run_data import RunData
from fedloom.results.run_values import ClientValues, Stats
from fedloom.results.sentences import say
from fedloom.results.statistics import known_mean
from fedloom.results.table import STATISTICS, Table, Value, from_to, with_column

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
    for phase in PHASES:
        last, common = at_common_clients(run, phase, metric)
        found = {label: average([one.by_round() for one in values.values()]) for label, values in last.items()}
        stats = {label: one for label, one in found.items() if one is not None}
        rows: list[tuple[Value, ...]] = [
            (name, *(float(getattr(one, part)[-1]) for one in stats.values())) for name, part in STATISTICS.items()
        ]
        if stats:
            title = (
                f"{run.metric(metric).capital_title} over clients at the end, {PHASES[phase]}{run.drawn(phase)}{common}"
            )
            kinds = ("text", *[run.metric(metric).number_format] * len(stats))
            names = ("over clients", *stats)
            note = _seeds_in_words({label: len(last[label]) for label in stats})
            yield Table(f"summary_{metric}_{phase}", title, names, tuple(rows), kinds, note)


def at_common_clients(run: RunData, phase: str, metric: str) -> tuple[dict[str, dict[int, ClientValues]], str]:
    """All values of the last round, by algorithm and seed, at the same clients; and what titles say of these."""
    last = {label: run.last_round(label, phase, metric) for label in run.labels}
    words = ""
    for seed in run.seeds:
        labels = [label for label, values in last.items() if seed in values]
        if phase == "universal":  # which measures the pooled model once, at no client
            labels = [label for label in labels if not run.is_pooled(label)]
        common = None if run.metric(metric).is_mean else common_clients(run, labels, seed, phase, metric)
        if common is not None:
            words = WORDS
            for label in labels:
                last[label][seed] = only(last[label][seed], common)
    return {label: {seed: one for seed, one in values.items() if len(one)} for label, values in last.items()}, words


def universal_test(run: RunData, metric: str) -> Iterator[Table]:
    """Every client's model on the union of all test splits; the pooled model has one number."""
    found = {label: run.last_round(label, "universal", metric) for label in run.labels}
    found = {label: values for label, values in found.items() if values}
    per_client = {label: {} if run.is_pooled(label) else run.last_means(label, "universal", metric) for label in found}
    numbers = sorted({number for known in per_client.values() for number in known})
    rows: list[tuple[Value, ...]] = [
        (run.client_name(number), *(known.get(number) for known in per_client.values())) for number in numbers
    ]
    of_client = {label: _seeds_of_each(run, label, "universal", metric) for label in per_client if per_client[label]}
    behind = [{counts[number] for counts in of_client.values() if number in counts} for number in numbers]
    at_end, common = at_common_clients(run, "universal", metric)
    over = {label: len(at_end[label]) for label in found}
    for name, part in STATISTICS.items():
        values: list[Value] = []
        for label in found:
            per_seed = [float(getattr(one.by_round(), part)[-1]) for one in at_end[label].values()]
            one_model = run.is_pooled(label)  # which has no spread over clients
            values.append(None if one_model and name != "Average" else known_mean(per_seed))
        rows.append((name, *values))
        behind.append({over[label] for label, value in zip(found, values, strict=True) if value is not None})
    if found:
        info = run.metric(metric)
        title, kinds = f"Universal test: {info.title}", ("text", *[info.number_format] * len(found))
        note = run.about_clients(f"{say('note', 'universal_test')} {_rows_in_words(run, over)}")
        note += " " + say("note", "last_rows_in_common") if common else ""
        table = Table(f"universal_test_{metric}", title, ("user", *found), tuple(rows), kinds, note)
        yield _with_seeds(table, behind, len(run.seeds))


def clients(run: RunData, metric: str) -> Iterator[Table]:
    """How many examples every client has, and how it fares with each algorithm at the end."""
    phase = run.end_phase
    means = {label: run.last_means(label, phase, metric) for label in run.labels}
    means = {label: known for label, known in means.items() if known}
    measured = {client for label in means for client in run.last_means(label, phase, "loss")}
    of_client = [_seeds_of_each(run, label, phase, metric) for label in means]
    rows: list[tuple[Value, ...]] = []
    behind: list[set[int]] = []
    for client in run.clients:
        values = [known.get(client["client"]) for known in means.values()]
        # a client whose examples do not define the metric has a row, too, with empty cells
        if client["client"] in measured or any(value is not None for value in values):
            rows.append((run.client_name(client["client"]), *(client[split] for split in SPLITS), *values))
            behind.append({counts[client["client"]] for counts in of_client if client["client"] in counts})
    if means:
        columns, kind = ("client", *SPLITS, *means), run.metric(metric).number_format
        kinds = ("text", *["whole"] * len(SPLITS), *[kind] * len(means))
        seeds = len(run.seeds_of_clients)
        some = "over_some_seeds" if any(one - {seeds} for one in behind) else "over_seeds"
        drawn = "in_which_drawn" if run.leaves_out_clients(phase) else some
        mean = say("note", drawn) if seeds > 1 else ""
        title = f"Every client: {run.metric(metric).title}, {END[phase]}"
        note = run.about_clients(say("note", "clients", model=say("note", MODEL[phase]), mean=mean))
        yield _with_seeds(Table(f"clients_{metric}", title, columns, tuple(rows), kinds, note), behind, seeds)


def _seeds_of_each(run: RunData, label: str, phase: str, metric: str) -> Counter[int]:
    """Client → how many seeds its mean in `RunData.last_means` is over."""
    found = run.client_values_by_seed(label, phase, metric, run.seeds_of_clients).values()
    return Counter(client for values in found for client in values.last_round().clients.tolist())


def _with_seeds(table: Table, behind: Sequence[Collection[int]], seeds: int) -> Table:
    """The table with how many seeds are behind the numbers of each row, unless all of them always are."""
    if all({*counts} <= {seeds} for counts in behind):
        return table
    return with_column(table, "seeds", [*map(from_to, behind)], "whole")


def long_table(run: RunData, metric: str, axis: str, name_of: Callable[[int], Value]) -> Iterator[Table]:
    """Statistics over clients for every round, or over rounds for every client: one row per algorithm and phase too."""
    rows: list[tuple[Value, ...]] = []
    over_seeds: dict[str, int] = {}
    seeds = run.seeds if axis == "round" else run.seeds_of_clients
    for label in run.labels:
        for phase in PHASES:
            values = run.client_values_by_seed(label, phase, metric, seeds).values()
            stats = average([one.by_round() if axis == "round" else one.by_client() for one in values])
            if stats is not None:
                over_seeds[label] = max(len(values), over_seeds.get(label, 0))
                parts = zip(*(getattr(stats, part).tolist() for part in STATISTICS.values()), strict=True)
                index = stats.index.tolist()
                rows += [(label, phase, name_of(at), *part) for at, part in zip(index, parts, strict=True)]
    if rows:
        shown, deviation = run.metric(metric).number_format, run.metric(metric).deviation_format
        columns = ("algorithm", "phase", axis, *STATISTICS)
        kinds = ("text", "text", "whole" if axis == "round" else "text", shown, deviation, shown, shown)
        over = "clients" if axis == "round" else "rounds"
        title = f"{run.metric(metric).capital_title} on each client's test split, over {over}"
        note = _seeds_in_words(over_seeds) if len(seeds) == len(run.seeds) else run.about_clients("")
        note += " " + say("note", "never_drawn") if run.leaves_out_clients("post_fit") else ""
        note += " " + say("note", "clients_with_a_value") if axis == "round" and _is_uneven(run, metric) else ""
        yield Table(f"{axis}_stats_{metric}", title, columns, tuple(rows), kinds, note)


def _is_uneven(run: RunData, metric: str) -> bool:
    """Whether in some round an algorithm has no value of a metric at a client where another one has."""
    if run.metric(metric).is_mean:
        return False
    found = (
        [one for label in run.labels if len((one := measured(run, label, seed, phase, metric))[1])]
        for phase in PHASES
        for seed in run.seeds
    )
    return any(shared(of_all) is not None for of_all in found)


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


def _seeds_in_words(over: Mapping[str, int], what: str = "Computed") -> str:
    """How statistics are averaged, with each algorithm's number of seeds."""
    counts = {*over.values()}
    if counts == {1}:
        return "One seed."
    if len(counts) == 1:
        return f"{what} for each of {counts.pop()} seeds, then averaged over seeds."
    listed = ", ".join(f"{label} {count}" for label, count in over.items())
    return f"{what} for each seed, then averaged over the seeds that an algorithm has ({listed})."


def _rows_in_words(run: RunData, over: Mapping[str, int]) -> str:
    """How the rows of single clients are averaged, and the statistics over clients below them."""
    if {*over.values()} == {1}:
        return _seeds_in_words(over)
    client = say("note", "row_of_client") + " " if len(run.seeds_of_clients) > 1 else ""
    return client + _seeds_in_words(over, "The rows below the clients are computed")
