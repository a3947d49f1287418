"""The model card of an export: what a model does, what it was trained on, how well it does, and which files it is."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fedloom import __version__
from fedloom.data.preprocessing import Preprocessing
from fedloom.files import write_atomically
from fedloom.results.comparisons import PHASES, Comparison, comparisons
from fedloom.results.disclosure import what_left
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from fedloom.results.safe_text import visible
from fedloom.results.statistics import spread
from fedloom.results.table import show

MOST_CLIENTS = 50  # in the card's table
NAME = "MODEL_CARD.md"


def write_card(result: Result, folder: Path, files: Iterable[Path]) -> Path:
    """Write the card beside the exported files, and return its path."""
    run = RunData.read(result.folder)
    preprocessing, task = result.preprocessing(run.seeds[0]), run.description.get("task") or {}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        autoescape=False,  # Markdown; `cell` escapes what others may have written
    )
    environment.filters["cell"] = _cell
    machine = run.facts.get("machine") or {}
    shown = [{**client, "name": run.client_name(int(client["client"]))} for client in run.clients[:MOST_CLIENTS]]
    text = environment.get_template("model_card.md.j2").render(
        run=run,
        purpose=_purpose(preprocessing),
        model=task.get("model", "a torch module"),
        loss=task.get("loss", "of its own"),
        inputs=_inputs(preprocessing),
        preparation=list(_preparation(preprocessing)),
        clients=shown,
        examples=f"{sum(client['train'] for client in run.clients):,}",
        how=_how(run),
        interval="95 % interval over seeds" if len(run.seeds) > 1 else "lowest and highest client",
        measured=list(_measured(run)),
        privacy=what_left(run),
        versions={"fedloom": __version__}
        | {name: str(machine[name]) for name in ("torch", "python") if name in machine},
        files={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    )
    write_atomically(folder / NAME, text.encode())
    return folder / NAME


def _cell(value: Any) -> str:
    """Return text for a cell of a Markdown table."""
    return visible(str(value)).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _purpose(preprocessing: Preprocessing) -> str:
    label = ", ".join(preprocessing.label) or "the label"
    if preprocessing.words is not None:
        return f"It predicts the next word of a text, from a vocabulary of {len(preprocessing.classes):,} words."
    if not preprocessing.classes:
        return f"It predicts {label}: a number, in the units of the data."
    return f"It predicts {label}, as probabilities of {_listed(preprocessing.classes)}."


def _inputs(preprocessing: Preprocessing) -> str:
    if preprocessing.words is not None:
        return f"the last {preprocessing.words - 1} words of a text, by the numbers in vocabulary.txt"
    if preprocessing.columns:
        names = _listed([column.name for column in preprocessing.columns])
        return f"{len(preprocessing.columns)} columns ({names}), as {len(preprocessing.features)} features"
    return f"examples of shape {list(preprocessing.shape)}"


def _preparation(preprocessing: Preprocessing) -> Iterator[str]:
    """Say how raw values become the model's input."""
    if any(column.categories for column in preprocessing.columns):
        yield f"Features, in the order of exported programs: {_listed(preprocessing.features, 200)}."
    for column in preprocessing.columns:
        if column.categories:
            how = "as its number" if column.embedded else "as one feature for each"
            yield f"{column.name} is a category, {how}: {_listed(column.categories)}."
    if preprocessing.mean:
        yield "Features are scaled by mean and standard deviation over the training examples of all clients."
    if preprocessing.clients:
        yield "Features are scaled by mean and standard deviation over each client's own training examples."
    if preprocessing.missing:
        yield "A missing value becomes the mean that scaling uses."
    for mark, value in preprocessing.marks.items():
        if not math.isnan(value):
            yield f"{f'A cell with {mark!r}' if mark else 'An empty cell'} counts as {value:g}."
    if preprocessing.target is not None:
        yield "Labels were scaled for training. Predictions are in the labels' own units."


def _how(run: RunData) -> str:
    seeds = len(run.seeds)
    return f"Means over {seeds} seeds." if seeds > 1 else "One seed: its numbers show no spread over repetitions."


def _measured(run: RunData) -> Iterator[Sequence[str]]:
    """One row for each metric, algorithm and way of measuring, with an interval."""
    for metric in run.metrics:
        for one in comparisons(run, metric):
            for label, values in one.values.items():
                found = spread(list(values.values()))
                low, high = found.interval(share=one.metric.share) if found.count > 1 else _range(run, one, label)
                kind = one.metric.number_format
                interval = "" if math.isnan(low) else f"{show(low, kind)} to {show(high, kind)}"
                yield metric, label, one.way, show(found.mean, kind), interval


def _range(run: RunData, comparison: Comparison, label: str) -> tuple[float, float]:
    """Return the lowest and highest value of a client in the last round, if the number is about clients then."""
    about_last_round = comparison.rule == "final" or comparison.key == "test"
    if comparison.key not in PHASES or comparison.key.startswith("pooled") or not about_last_round:
        return math.nan, math.nan
    found = list(run.last_means(label, PHASES[comparison.key], comparison.metric.name).values())
    return (min(found), max(found)) if found else (math.nan, math.nan)


def _listed(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(_cell(name) for name in names[:most]) + (f" and {len(names) - most} more" * (len(names) > most))
