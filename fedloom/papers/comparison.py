"""Compare our results with published ones in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedloom.experiment.experiment_file import Experiment
from fedloom.papers.published import Measure, Reproduction, Row
from fedloom.results.table import Table, Value


@dataclass
class Planned:
    """A row that is ready to run."""

    row: Row
    experiment: Experiment
    seconds: float  # a rough guess
    ours: dict[str, list[float | None]] = field(default_factory=dict)  # measure → a number per seed; None: not reached
    sha256: str | None = None  # of all final weights of its run
    curves: list[list[list[float]]] = field(default_factory=list)  # of the first measure, for each seed: rounds, values
    date: str = ""


def table(
    reproduction: Reproduction,
    planned: Sequence[Planned],
    *,
    quick: bool = False,
    changed: Mapping[str, str] | None = None,
) -> Table:
    """Put ours beside a published number, or above it if a row has several numbers."""
    title = reproduction.title + (" (quick)" if quick else "")
    plain = any(not isinstance(told, dict) for one in planned for told in one.row.published.values())
    layout = _long if plain or len(reproduction.measure) == 1 else _wide
    columns, rows, kinds = layout(reproduction, planned)
    return Table("reproduction", title, columns, tuple(rows), kinds, _note(reproduction, planned, quick, changed or {}))


Parts = tuple[tuple[str, ...], list[tuple[Value, ...]], tuple[str, ...]]  # columns, rows, kinds


def _long(reproduction: Reproduction, planned: Sequence[Planned]) -> Parts:
    """Make one line per row: the first measure with its difference to the first source, then our other measures."""
    (measure, *more), (first, *others) = reproduction.measure, reproduction.sources
    rows: list[tuple[Value, ...]] = []
    for one in planned:
        known, found = one.row.numbers(measure), one.ours.get(measure.name, [])
        ours, paper = _mean(found), known.get(first)
        gap = ratio = None
        if ours is not None and paper is not None and not isinstance(paper, str):
            gap, ratio = ours - paper, ours / paper if paper else None
        told = (paper, gap, ratio, *(known.get(name) for name in others))
        also = [_shown(one.ours.get(further.name, []), further, one.experiment) for further in more]
        rows.append((one.row.name, _shown(found, measure, one.experiment), _range(found), *told, *also))
    number = "whole" if measure.kind in ("rounds_to", "peak_round") else "number"
    columns = ("row", "ours", "over seeds", first, "difference", f"ours / {first}", *others)
    kinds = ("text", number, "text", number, "difference", "short", *[number] * len(others))
    return (*columns, *(f"our {further.name}" for further in more)), rows, (*kinds, *["number"] * len(more))


def _wide(reproduction: Reproduction, planned: Sequence[Planned]) -> Parts:
    """Make one column per measure; below ours are the range over seeds and the numbers of each source."""
    rows: list[tuple[Value, ...]] = []
    for one in planned:
        found = [one.ours.get(measure.name, []) for measure in reproduction.measure]
        told = [one.row.numbers(measure) for measure in reproduction.measure]
        shown = [_shown(each, m, one.experiment) for each, m in zip(found, reproduction.measure, strict=True)]
        rows.append((one.row.name, "ours", *shown))
        if any(_range(each) for each in found):
            rows.append(("", "over seeds", *map(_range, found)))
        rows += [("", name, *(each.get(name) for each in told)) for name in one.row.published]
    names = [measure.name for measure in reproduction.measure]
    return ("row", "whose", *names), rows, ("text", "text", *["number"] * len(names))


def _mean(found: Sequence[float | None]) -> float | None:
    """Average over seeds; None unless all of them have a number."""
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known and len(known) == len(found) else None


def _shown(found: Sequence[float | None], measure: Measure, experiment: Experiment) -> Value:
    """Return our number, or say why there is none."""
    if not found:
        return "not run yet"
    ours = _mean(found)
    return f"> {experiment.rounds}" if ours is None and measure.kind in ("rounds_to", "crossing") else ours


def _range(found: Sequence[float | None]) -> str | None:
    """Return the lowest and the highest seed."""
    known = sorted(value for value in found if value is not None)
    if len(found) < 2 or not known:
        return None
    missed = f", {len(found) - len(known)} not reached" if len(known) < len(found) else ""
    return f"{known[0]:.4g} – {known[-1]:.4g}{missed}"


def _note(reproduction: Reproduction, planned: Sequence[Planned], quick: bool, changed: Mapping[str, str]) -> str:
    sources = "; ".join(f"{name}: {where}" for name, where in reproduction.sources.items())
    counts = sorted({len(one.experiment.seeds) for one in planned})
    most = "one seed" if counts[-1] == 1 else f"mean of {' or '.join(map(str, counts))} seeds"
    note = " ".join([*reproduction.about.split(), f"Sources: {sources}. Ours: {most}."])
    # the text may be wrong about rounds or epochs that were changed; the data's folder does not matter
    others = ", ".join(f"{key} = {value}" for key, value in changed.items() if key != "data.path")
    if others:
        note = f"CHANGED: {others}. {note}"
    if quick:
        rounds = max(one.experiment.rounds for one in planned)
        shortened = "".join(f", {key} = {value}" for key, value in reproduction.quick.set.items())
        note = f"QUICK: {len(planned)} of {len(reproduction.row)} rows, at most {rounds} rounds{shortened}. {note}"
    return note
