"""The model card of an export: what a model does, what it was trained on, how well it does, and which files it is."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedloom import __version__
from fedloom.data.preprocessing import Preprocessing
from fedloom.errors import FedloomError
from fedloom.files import write_atomically
from fedloom.results.comparisons import ABOUT_CLIENTS, PHASES, Comparison, comparisons, measured_on
from fedloom.results.disclosure import not_evaluated, what_left
from fedloom.results.report_warnings import cautions
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from fedloom.results.safe_text import visible
from fedloom.results.sentences import first_three, page
from fedloom.results.statistics import spread
from fedloom.results.table import show

MOST_CLIENTS = 50  # in the card's table
MOST_INPUTS = 100  # in the table of columns
NAME = "MODEL_CARD.md"
AT_THE_END = ("server_test", "test", "universal")  # what is measured in the last round, whatever the headline is


def write_card(result: Result, folder: Path, files: Iterable[Path]) -> Path:
    """Write the card beside the exported files, and return its path."""
    run = RunData.read(result.folder)
    task = run.description.get("task") or {}
    # Markdown, so it is not escaped as HTML is: `cell` and `listed` escape what others may have written
    template = page("model_card.md.j2", escape=False, cell=_cell, listed=_listed)
    machine = run.facts.get("machine") or {}
    shown = [{**client, "name": run.client_name(int(client["client"]))} for client in run.clients[:MOST_CLIENTS]]
    preprocessing = result.preprocessing(result.runs[0].seed)
    labels = {cell.algorithm for cell in result.runs}
    exported, measured = list(_exported(result, run)), list(_measured(run, labels))
    unknown = f"The model {not_evaluated(run) or 'was not evaluated'}. Nobody knows how good it is."
    text = template.render(
        run=run,
        preprocessing=preprocessing,
        inputs=list(_inputs(preprocessing)),
        model=task.get("model", "a torch module"),
        loss=task.get("loss", "of its own"),
        clients=shown,
        examples=f"{sum(client['train'] for client in run.clients):,}",
        held=_held(run),
        not_evaluated=not_evaluated(run),
        metrics=[run.metric(name).title for name in run.metrics],
        exported=exported,
        cells={(cell.algorithm, cell.seed): run.cells[cell.algorithm, cell.seed] for cell in result.runs},
        measured=measured,
        cautions=[*([] if exported or measured else [unknown]), *cautions(run, labels), *preprocessing.doubts],
        privacy=what_left(run, labels),
        versions={"fedloom": __version__}
        | {name: str(machine[name]) for name in ("torch", "python") if name in machine},
        files={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    )
    write_atomically(folder / NAME, text.encode())
    return folder / NAME


def _inputs(preprocessing: Preprocessing) -> Iterator[Sequence[str]]:
    """One row for each column: its name, its kind, and for scaled numbers bounds, or what they were in training."""
    first = 0
    for column in preprocessing.columns[:MOST_INPUTS]:
        count = len(column.categories)
        kind = f"{count} categor{'y' if count == 1 else 'ies'}" if count else "number"
        known = bool(preprocessing.mean) and not count
        mean, std = (preprocessing.mean[first], preprocessing.std[first]) if known else (0.0, 0.0)
        usual = f"{mean:.4g} ± {std:.3g}" if math.isfinite(std) else "no values"
        if preprocessing.bounds:
            low, high = preprocessing.bounds.get(column.name, (0.0, 0.0))
            known, usual = column.name in preprocessing.bounds, f"{low:g} to {high:g}"
        yield column.name, kind, usual if known else ""
        first += len(column.features)


def _held(run: RunData) -> list[str]:
    """How often each class occurs, if that is known here."""
    known = run.facts.get("labels") or {"classes": (), "counts": ()}
    totals = map(sum, zip(*known["counts"], strict=True))
    return [f"{count:,} of {name}" for name, count in zip(known["classes"], totals, strict=False)]


def _cell(value: Any) -> str:
    """Return text for a cell of a Markdown table."""
    return visible(str(value)).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _exported(result: Result, run: RunData) -> Iterator[Sequence[str]]:
    """One row for each model of the export and way of measuring it at the end: its numbers, and those of clients."""
    found = {metric: {one.key: one for one in comparisons(run, metric)} for metric in run.metrics}
    own = _with_own_models(result)
    for cell in (cell for cell in result.runs if cell.rounds):
        for key in AT_THE_END:
            if key == "server_test" and result.rule != "final":
                continue  # the number is of another round, or of several
            numbers = [_with_range(run, one.get(key), cell.algorithm, cell.seed) for one in found.values()]
            if any(numbers):
                drawn = run.drawn(ABOUT_CLIENTS[key]) if key in ABOUT_CLIENTS else ""
                whose = " (of each client's own model)" if key != "server_test" and cell.algorithm in own else ""
                yield f"{cell.algorithm}, seed {cell.seed}", measured_on(run, key) + drawn + whose, *numbers


def _with_own_models(result: Result) -> set[str]:
    """The labels of algorithms in which clients use models of their own, as far as the run's code is here to tell."""
    alone = {cell.algorithm for cell in result.runs if cell.rounds and not result.has_global_model(cell)}
    try:
        return alone | {*result.personal()}
    except FedloomError:
        return alone


def _with_range(run: RunData, comparison: Comparison | None, label: str, seed: int) -> str:
    """The value of one model, and the lowest and highest of its clients."""
    value = None if comparison is None else comparison.values.get(label, {}).get(seed)
    if comparison is None or value is None:
        return ""
    kind = comparison.metric.number_format
    if comparison.key != "test":
        return show(value, kind)
    return f"{show(value, kind)} ({_range(run, comparison, label, seed)})"


def _measured(run: RunData, labels: Collection[str]) -> Iterator[Sequence[str]]:
    """One row for each metric, algorithm and way of measuring at the end, with an interval; otherwise for every way."""
    for metric in run.metrics:
        every = comparisons(run, metric)
        for one in [one for one in every if one.key in AT_THE_END] or every:
            for label, values in ((label, one.values[label]) for label in one.values if label in labels):
                found = spread(list(values.values()))
                kind = one.metric.number_format
                if found.count == 1:
                    interval = _range(run, one, label, *one.values[label])
                elif found.std == 0:
                    interval = "the same in all seeds"  # an interval without a width would look like certainty
                else:
                    interval = " to ".join(show(end, kind) for end in found.interval)
                yield one.metric.title, label, one.way, show(found.mean, kind), interval


def _range(run: RunData, comparison: Comparison, label: str, seed: int) -> str:
    """Return the lowest and highest value of a client in the last round, if the number is about clients then.

    They have names where the card's clients are those of this seed.
    """
    about_last_round = comparison.rule == "final" or comparison.key == "test"
    if comparison.key not in PHASES or comparison.key.startswith("pooled") or not about_last_round:
        return ""
    found = run.client_values(label, seed, PHASES[comparison.key], comparison.metric.name).last_round()
    ends = []
    for end in (found.values.min(), found.values.max()) if len(found) else ():
        names = first_three([run.client_name(client) for client in found.clients[found.values == end].tolist()])
        named = f" at {names}" if seed in run.seeds_of_clients else ""
        ends.append(show(end, comparison.metric.number_format) + named)
    return " to ".join(ends)


def _listed(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(_cell(name) for name in names[:most]) + (f" and {len(names) - most} more" * (len(names) > most))
