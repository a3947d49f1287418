"""The table that a run ends with on screen."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from fedloom.results.comparisons import PHASES, at_clients
from fedloom.results.result import Result
from fedloom.results.run_data import RunData

COLUMNS = {
    "server_test": "server test",
    "pre_fit_test": "before training",
    "post_fit_test": "after training",
    "test": "final model",
    "pooled_test": "all tests together",
    "universal": "on all clients' tests",
}


def table(result: Result) -> Table:
    """One row per algorithm, one column per way of measuring; mean over seeds."""
    metric = _metric(result)
    labels = list(dict.fromkeys(run.algorithm for run in result.runs))
    shown = {
        key: title for key, title in COLUMNS.items() if any(f"{key}_{metric}" in run.headline for run in result.runs)
    }
    if "test" in shown:
        shown.pop("pooled_test", None)  # for metrics that have no mean over clients
    seeds = len({run.seed for run in result.runs})
    title = f"{result.name}: {metric}" + (f", mean of {seeds} seeds" if seeds > 1 else "")
    made = Table(title=title, caption=_caption(shown, result.rule))
    made.add_column("algorithm")
    made.add_column("rounds", justify="right")
    for column in shown.values():
        made.add_column(column, justify="right")
    view = RunData.read(result.folder)
    for label in labels:
        runs = [run for run in result.runs if run.algorithm == label]
        values = {key: [run.headline.get(f"{key}_{metric}") for run in runs] for key in shown}
        for key in values.keys() & PHASES.keys() if view.is_pooled(label) else ():  # for the clients of the others
            values[key] = [at_clients(view, label, run.seed, key, metric, result.rule) for run in runs]
        cells = [_number(metric, values[key]) for key in shown]
        rounds = sorted({run.rounds for run in runs})
        text = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]}–{rounds[-1]}"
        unfinished = {run.status for run in runs} - {"done"}
        made.add_row(label, text + (f" ({', '.join(sorted(unfinished))})" if unfinished else ""), *cells)
    return made


def _metric(result: Result) -> str:
    """The first metric that was asked for and has numbers to show."""
    shown = {name for run in result.runs for name in run.headline}
    for metric in (*result.metrics, "loss"):
        if any(f"{column}_{metric}" in shown for column in COLUMNS):
            return metric
    return "loss"


def _number(metric: str, values: list[Any]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = statistics.fmean(known)
    return f"{100 * mean:.2f} %" if metric == "accuracy" or metric.startswith("top_") else f"{mean:.4g}"


def _caption(shown: dict[str, str], rule: str) -> str:
    words = {"final": "", "best": " Best round of each column, chosen on the very data shown."}
    when = words.get(rule, f" Mean of the last {rule.removeprefix('last:')} measured rounds.")
    means = (
        "Clients' columns are means over clients, each on its own test split." if set(shown) - {"server_test"} else ""
    )
    return (means + when).strip()
