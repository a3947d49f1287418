"""Published results, run again: ours, theirs and the difference side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedloom.errors import InputError, nearest
from fedloom.experiment import milestones, spec
from fedloom.experiment.check import estimate
from fedloom.experiment.checkpoint import write_atomically
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress, Silent
from fedloom.experiment.run import run
from fedloom.experiment.spec import Experiment, tomllib
from fedloom.experiment.table import Table, Value
from fedloom.experiment.table import write as write_tables
from fedloom.experiment.view import View
from fedloom.record import Record

FOLDER = Path(__file__).parent / "reproductions"


class Measure(Record):
    """What is compared: rounds until a target, or a number at the end of the run."""

    kind: Literal["rounds_to", "final"]
    metric: str = "accuracy"
    target: float = 0.0
    key: str = ""  # of the final numbers, such as universal_accuracy


class Row(Record):
    """One published result and how to make it."""

    name: str
    published: dict[str, float]
    set: dict[str, Any]


class Quick(Record):
    """What the shortened version runs."""

    rows: tuple[str, ...]
    rounds: int


class Reproduction(Record):
    """A file of published results."""

    title: str
    about: str = ""
    sources: dict[str, str]  # short name → where the numbers are from; the first is what differences are about
    measure: Measure
    quick: Quick
    experiment: dict[str, Any]
    row: tuple[Row, ...]


def names() -> list[str]:
    """The reproductions that come with fedloom."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Reproduction:
    """One of them, or a file of one's own."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise InputError(f"There is no reproduction '{name}'. Known: {', '.join(names())}.{nearest(name, names())}")
    try:
        return Reproduction(**tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not a valid TOML file: {error}") from error


@dataclass
class Planned:
    """A row, ready to run."""

    row: Row
    experiment: Experiment
    seconds: float  # a rough guess
    ours: list[float | None] = field(default_factory=list)  # one a seed; none where the target was not reached


def plan(
    reproduction: Reproduction,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> list[Planned]:
    """The rows that are to be run, with a guess of the time each will take."""
    wanted = reproduction.quick.rows if quick and not only else only
    rows = [row for row in reproduction.row if not wanted or any(fnmatch(row.name, one) for one in wanted)]
    if not rows:
        known = "; ".join(row.name for row in reproduction.row)
        raise InputError(f"No row is called {', '.join(wanted)}. Known: {known}.")
    found, speeds = [], dict[str, float]()
    for row in rows:
        settings = {**row.set, **(changes or {})}
        if quick:
            settings["rounds"] = min(int(settings.get("rounds", 10**9)), reproduction.quick.rounds)
        values = json.loads(json.dumps(reproduction.experiment))
        for key, value in settings.items():
            spec.change(values, key, value)
        experiment = spec.parse(values, Path.cwd(), default_name="reproduction")
        # rows differ in batches and cohorts: what a step costs is timed once for each
        kind = json.dumps([settings.get("train.batch_size"), settings.get("cohort.fraction")])
        if kind not in speeds:
            speeds[kind] = estimate(Plan(experiment)).seconds_a_round
        expected = max(row.published.values(), default=experiment.rounds)
        rounds = min(expected if reproduction.measure.kind == "rounds_to" else experiment.rounds, experiment.rounds)
        found.append(Planned(row, experiment, speeds[kind] * rounds * len(experiment.seeds) + 3))
    return found


def reproduce(
    reproduction: Reproduction,
    planned: Sequence[Planned],
    folder: Path,
    *,
    quick: bool = False,
    fresh: bool = False,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Table | None:
    """Run the rows that are not done, then the table; None when asked to stop before the end."""
    told = progress or Silent()
    for one in planned:
        out = folder / "rows" / "".join(sign if sign.isalnum() or sign in ".-" else "_" for sign in one.row.name)
        result = run(**Plan(one.experiment).arguments(), out=out, fresh=fresh, progress=told, should_stop=should_stop)
        if result.status != "done":
            return None
        one.ours = measured(reproduction.measure, View.read(out))
        made = table(reproduction, planned, quick=quick)
        write_tables([made], folder)  # after every row: a long reproduction can be looked at while it runs
    write_atomically(folder / "reproduction.json", json.dumps(made.rows, indent=1).encode())
    return made


def measured(measure: Measure, view: View) -> list[float | None]:
    """What came out, for each seed."""
    if measure.kind == "final":
        return [run.final.get(measure.key) for run in view.result.runs]
    higher = view.kind(measure.metric).higher
    found = [
        milestones.reached(*view.headline_curve(label, seed, measure.metric), measure.target, higher)
        for label, seed in view.cells
    ]
    return [None if one is None else float(one.round) for one in found]


def table(reproduction: Reproduction, planned: Sequence[Planned], *, quick: bool = False) -> Table:
    """Ours, what was published, and the difference to the first source."""
    first, *others = reproduction.sources
    rows: list[tuple[Value, ...]] = []
    for one in planned:
        known = [value for value in one.ours if value is not None]
        whole = bool(one.ours) and len(known) == len(one.ours)
        ours: Value = float(np.mean(known)) if whole else None
        text = ours if whole else f"> {one.experiment.rounds}" if one.ours else "not run yet"
        paper = one.row.published.get(first)
        gap = ours - paper if isinstance(ours, float) and paper is not None else None
        ratio = ours / paper if isinstance(ours, float) and paper else None
        rows.append((one.row.name, text, paper, gap, ratio, *(one.row.published.get(name) for name in others)))
    final = reproduction.measure.kind == "final"
    number = "number" if final else "whole"
    columns = ("row", "ours", first, "difference", f"ours / {first}", *others)
    kinds = ("text", number, number, "difference", "short", *[number] * len(others))
    sources = "; ".join(f"{name}: {where}" for name, where in reproduction.sources.items())
    seeds = planned[0].experiment.seeds
    note = (
        " ".join(reproduction.about.split())
        + f" Sources: {sources}. Ours: "
        + ("one seed." if len(seeds) == 1 else f"mean of {len(seeds)} seeds.")
    )
    if quick:
        most = max(one.experiment.rounds for one in planned)
        note = f"QUICK: {len(planned)} of {len(reproduction.row)} rows, at most {most} rounds. {note}"
    title = reproduction.title + (" (quick)" if quick else "")
    return Table("reproduction", title, columns, tuple(rows), kinds, note)


def duration(seconds: float) -> str:
    """A rough time in words.

    >>> duration(50), duration(4000), duration(200000)
    ('1 minute', '1.1 hours', '2.3 days')
    """
    minutes = math.ceil(seconds / 60)
    if minutes < 60:
        return f"{minutes} minute{'s' if minutes > 1 else ''}"
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
