"""The table that a run ends with on the screen."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.table import Table

from fedloom.errors import InputError, nearest
from fedloom.privacy.words import TEST_SET
from fedloom.results.clients_of_seeds import undefined_at
from fedloom.results.comparisons import (
    ABOUT_CLIENTS,
    UNTESTED,
    Comparison,
    best_labels,
    comparisons,
    finished,
    headline_of,
    in_common_seeds,
    main_comparison,
)
from fedloom.results.disclosure import not_evaluated
from fedloom.results.result import CellResult, Result
from fedloom.results.run_data import RunData
from fedloom.results.run_values import MetricInfo
from fedloom.results.sentences import say
from fedloom.results.table import show

UNITED = "global model, all tests"
COLUMNS = {  # in the order in which a round measures them
    "server_test": "server test",
    "pre_fit_test": "before local training",
    "post_fit_test": "after local training",
    "universal": "after local training, universal test",
    "test": "final model",
    "pooled_test": "final model, all tests",
}


def in_short(run: RunData) -> str:
    """The best algorithm that leaves the data where it is, or all that are tied, with the number; empty if none."""
    main = main_comparison(run)
    if main is None:
        return ""
    best, *tied = best_labels(run, main)
    mean = statistics.fmean(in_common_seeds(run, main).values[best].values())
    several = "" if not tied else f" and {tied[0] if len(tied) == 1 else f'{len(tied)} more'}"
    return f"{best}{several}: {show(mean, main.metric.number_format)} {main.metric.title}"


def table(result: Result, metric: str | None = None) -> Table:
    """One row per algorithm, one column per way of measuring a metric: means over the seeds that are finished.

    An algorithm without a finished seed has a row for each seed that has begun: they may be at different rounds.
    Without a name, the metric is the first that has numbers to show.
    """
    run = RunData.read(result.folder)
    known = {name for cell in result.runs for name in cell.headline}
    ways = (*COLUMNS, *UNTESTED)
    measured = [name for name in (*result.metrics, "loss") if any(f"{key}_{name}" in known for key in ways)]
    if metric is not None and metric not in measured:
        shown = ", ".join(measured) or "nothing yet"
        raise InputError(f"{result.folder} has no metric '{metric}'. Measured: {shown}.{nearest(metric, measured)}")
    metric = metric or next(iter(measured), "loss")
    columns = {key: title for key, title in COLUMNS.items() if f"{key}_{metric}" in known}
    columns = columns or {key: title for key, title in UNTESTED.items() if f"{key}_{metric}" in known}
    if "server_test" in columns and not run.server_holds("test"):
        columns["server_test"] = UNITED
    if "test" in columns:
        columns.pop("pooled_test", None)  # only for metrics that have no mean over clients
    seeds = len({cell.seed for cell in result.runs})
    done = finished(result.runs)
    over = f"{seeds} seeds" if len(done) == len(result.runs) else "the seeds that are finished"
    nothing = f"The model {not_evaluated(run)}. {TEST_SET}" if not measured and done and not_evaluated(run) else ""
    title = f"{result.name}: {'not evaluated' if nothing else run.metric(metric).title}" + (
        f", mean of {over}" if seeds > 1 and done else ""
    )
    unknown = [name for name in result.metrics if name not in measured] if measured else []
    drawn = {key: run.drawn(ABOUT_CLIENTS[key]) for key in columns if key in ABOUT_CLIENTS}
    caption = nothing or _caption(columns, result.rule, unknown, any(drawn.values()))
    compared = {one.key: one for one in comparisons(run, metric)} if done else {}
    if without := undefined_at(run, metric):
        caption += f" {run.metric(metric).title} is undefined at {without}: means leave them out."
    if any(one.common for one in compared.values()):
        caption += " " + say("note", "uneven", metric=run.metric(metric).title)
    made = Table(title=title, caption=caption)
    made.add_column("algorithm", no_wrap=True)  # in a narrow terminal, headings give way before names
    for column in ("rounds", *(name + drawn.get(key, "") for key, name in columns.items())):
        made.add_column(column, justify="right")
    for label in run.labels:
        cells = [cell for cell in result.runs if cell.algorithm == label]
        for name, some in _rows(label, cells).items():
            means = [_mean(run, some, key, metric, compared.get(key)) for key in columns]
            made.add_row(name, _rounds(some, cells), *means)
    return made


def _rows(label: str, cells: list[CellResult]) -> dict[str, list[CellResult]]:
    """The rows of an algorithm, with the cells that each is about."""
    if done := finished(cells):
        return {label: done}
    begun = [cell for cell in cells if cell.rounds] or cells[:1]
    return {label: begun} if len(cells) == 1 else {f"{label}, seed {cell.seed}": [cell] for cell in begun}


def _mean(run: RunData, cells: list[CellResult], key: str, metric: str, compared: Comparison | None) -> str:
    """The mean over a row's seeds: of finished cells what algorithms are compared by, else how far the cells are."""
    values = (
        headline_of(run, cell, key, metric, run.result.rule)
        if compared is None or cell.status != "done"
        else compared.values.get(cell.algorithm, {}).get(cell.seed)
        for cell in cells
    )
    known = [value for value in values if value is not None]
    return show(statistics.fmean(known) if known else None, MetricInfo(metric, True, True).number_format)


def _rounds(cells: list[CellResult], all_seeds: list[CellResult]) -> str:
    """The rounds of a row's cells, and how the cells of other seeds are if the row leaves them out."""
    rounds = sorted({cell.rounds for cell in cells})
    text = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]}–{rounds[-1]}"
    remarks = sorted({cell.status for cell in cells} - {"done"})
    if not remarks and len(cells) < len(all_seeds):
        others = sorted(Counter(cell.status for cell in all_seeds if cell.status != "done").items())
        remarks = [f"{len(cells)} of {len(all_seeds)} seeds", *(f"{count} {status}" for status, count in others)]
    abandoned = sum(cell.abandoned for cell in cells)
    remarks += [f"{abandoned} abandoned"] if abandoned else []
    return text + (f" ({', '.join(remarks)})" if remarks else "")


def _caption(columns: Mapping[str, str], rule: str, unknown: Sequence[str], drawn: bool) -> str:
    words = {"final": "", "best": " Best round of each column, chosen on the data that is shown."}
    when = words.get(rule, f" Mean of the last {rule.removeprefix('last:')} measured rounds.")
    if columns.keys() <= UNTESTED.keys() and columns:
        return f"Means over clients, each on its own validation split: nothing was tested.{when}"
    of_clients = columns.keys() - {"server_test"}
    means = "Clients' columns are means over clients, each on its own test split." if of_clients else ""
    training = " " + say("note", "local_training") if {"pre_fit_test", "post_fit_test"} <= columns.keys() else ""
    universal = " The universal test is the test splits of all clients." if "universal" in columns else ""
    together = "pooled_test" in columns or UNITED in columns.values()
    all_tests = " “All tests” are the test splits of all clients." if together else ""
    nothing = f" Undefined or withheld at every client: {', '.join(unknown)}." if unknown else ""
    some = " " + say("note", "drawn") if drawn else ""
    return (means + training + universal + all_tests + some + when + nothing).strip()
