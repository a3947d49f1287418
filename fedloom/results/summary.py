"""The table that a run ends with on the screen."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from fedloom.errors import InputError, nearest
from fedloom.results.comparisons import ABOUT_CLIENTS, PHASES, at_clients, best_first, main_comparison
from fedloom.results.result import CellResult, Result
from fedloom.results.run_data import RunData
from fedloom.results.run_values import MetricInfo
from fedloom.results.sentences import say
from fedloom.results.table import show

COLUMNS = {  # in the order in which a round measures them
    "server_test": "server test",
    "pre_fit_test": "before training",
    "post_fit_test": "after training",
    "universal": "after training, all tests",
    "test": "final model",
    "pooled_test": "final model, all tests",
}


def in_short(run: RunData) -> str:
    """The best algorithm that leaves the data where it is, with its number; empty if no cell is done."""
    main = main_comparison(run)
    if main is None:
        return ""
    best = best_first(run, main)[0]
    mean = statistics.fmean(main.values[best].values())
    return f"{best}: {show(mean, main.metric.number_format)} {main.metric.name}"


def table(result: Result, metric: str | None = None) -> Table:
    """One row per algorithm, one column per way of measuring a metric: means over seeds.

    Without a name, the metric is the first that has numbers to show.
    """
    known = {name for cell in result.runs for name in cell.headline}
    measured = [name for name in (*result.metrics, "loss") if any(f"{key}_{name}" in known for key in COLUMNS)]
    if metric is not None and metric not in measured:
        shown = ", ".join(measured) or "nothing yet"
        raise InputError(f"{result.folder} has no metric '{metric}'. Measured: {shown}.{nearest(metric, measured)}")
    metric = metric or next(iter(measured), "loss")
    columns = {key: title for key, title in COLUMNS.items() if f"{key}_{metric}" in known}
    if "test" in columns:
        columns.pop("pooled_test", None)  # only for metrics that have no mean over clients
    seeds = len({cell.seed for cell in result.runs})
    title = f"{result.name}: {metric}" + (f", mean of {seeds} seeds" if seeds > 1 else "")
    unknown = [name for name in result.metrics if name not in measured] if measured else []
    run = RunData.read(result.folder)
    drawn = {key: run.drawn(ABOUT_CLIENTS[key]) for key in columns if key in ABOUT_CLIENTS}
    made = Table(title=title, caption=_caption(set(columns), result.rule, unknown, any(drawn.values())))
    made.add_column("algorithm", no_wrap=True)  # in a narrow terminal, headings give way before names
    for column in ("rounds", *(name + drawn.get(key, "") for key, name in columns.items())):
        made.add_column(column, justify="right")
    for label in run.labels:
        cells = [cell for cell in result.runs if cell.algorithm == label]
        means = [_mean(run, cells, key, metric, result.rule) for key in columns]
        made.add_row(label, _rounds(cells), *means)
    return made


def _mean(run: RunData, cells: list[CellResult], key: str, metric: str, rule: str) -> str:
    values = [cell.headline.get(f"{key}_{metric}") for cell in cells]
    if key in PHASES and run.is_pooled(cells[0].algorithm):
        values = [at_clients(run, cell.algorithm, cell.seed, key, metric, rule) for cell in cells]
    known = [value for value in values if value is not None]
    return show(statistics.fmean(known) if known else None, MetricInfo(metric, True, True).number_format)


def _rounds(cells: list[CellResult]) -> str:
    rounds = sorted({cell.rounds for cell in cells})
    text = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]}–{rounds[-1]}"
    remarks = sorted({cell.status for cell in cells} - {"done"})
    abandoned = sum(cell.abandoned for cell in cells)
    remarks += [f"{abandoned} abandoned"] if abandoned else []
    return text + (f" ({', '.join(remarks)})" if remarks else "")


def _caption(columns: set[str], rule: str, unknown: Sequence[str], drawn: bool) -> str:
    words = {"final": "", "best": " Best round of each column, chosen on the data that is shown."}
    when = words.get(rule, f" Mean of the last {rule.removeprefix('last:')} measured rounds.")
    means = "Clients' columns are means over clients, each on its own test split." if columns - {"server_test"} else ""
    all_tests = " “All tests” are the test splits of all clients." if columns & {"universal", "pooled_test"} else ""
    nothing = f" Undefined at every client: {', '.join(unknown)}." if unknown else ""
    some = " " + say("note", "drawn") if drawn else ""
    return (means + all_tests + some + when + nothing).strip()
