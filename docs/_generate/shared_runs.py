"""Finds stored results in which a row of a table was run too: with the same settings, for another table or a figure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.papers import published
from fedloom.papers.published import Measure, Reproduction, Row
from fedloom.papers.reproduce import Rerun
from fedloom.results.curve_numbers import reached

TOGETHER = ("mcmahan-table1-cnn", "mcmahan-table2", "mcmahan-figure2")  # a figure's runs are not stopped at the target


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read the stored results of one reproduction."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def elsewhere(folder: Path, name: str, row: Row, measures: Sequence[Measure]) -> Iterator[dict[str, Any]]:
    """Yield the results that other reproductions have for a row, with its own measures taken from their curves."""
    if name not in TOGETHER:
        return
    mine = _settings(published.load(name), row)
    for other in (one for one in TOGETHER if one != name):
        reproduction = published.load(other)
        same = {theirs.name for theirs in reproduction.row if _settings(reproduction, theirs) == mine}
        for record in records(folder, other):
            if record["row"] in same and any(record["curves"]):
                yield _with_measures(record, row, measures)


def _settings(reproduction: Reproduction, row: Row) -> str:
    """Return what decides a row's curve: everything but how long it is, how many seeds it has and when it stops."""
    return _settings_of(reproduction.model_dump_json(), row.name)


@cache
def _settings_of(reproduction: str, row: str) -> str:
    whole = Reproduction.model_validate_json(reproduction)
    made = Rerun(whole).experiment(next(one for one in whole.row if one.name == row))
    return f"{made.data} {made.task} {made.train} {made.cohort} {made.algorithm}"


def _with_measures(record: Mapping[str, Any], row: Row, measures: Sequence[Measure]) -> dict[str, Any]:
    ours: dict[str, list[float | None]] = {}
    for measure in measures:
        found = [reached(np.array(x), np.array(y), measure.target, True) for x, y in record["curves"]]
        if measure.kind == "rounds_to":
            ours[measure.name] = [one and float(one.round) for one in found]
        elif measure.kind == "crossing":
            ours[measure.name] = [one and one.crossing for one in found]
        else:
            raise SystemExit(f"The measure '{measure.name}' cannot be taken from a stored curve.")
    # how long a run may be does not matter where it reached the target
    ended = None not in ours[measures[0].name]
    changes = {key: value for key, value in record["changes"].items() if not (ended and key == "rounds")}
    return {**record, "row": row.name, "changes": changes, "ours": ours}
