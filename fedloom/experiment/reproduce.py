"""Published results, run again: ours, theirs and the difference side by side."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, field_validator, model_validator

from fedloom.errors import InputError, nearest
from fedloom.experiment import spec
from fedloom.experiment.check import estimate
from fedloom.experiment.checkpoint import write_atomically
from fedloom.experiment.curves import Curves, save
from fedloom.experiment.measuring import Measure, named
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress, Silent
from fedloom.experiment.report import write as write_report
from fedloom.experiment.run import run
from fedloom.experiment.spec import Experiment, tomllib
from fedloom.experiment.table import Table, Value
from fedloom.experiment.table import write as write_tables
from fedloom.experiment.view import View
from fedloom.record import Count, Record

FOLDER = Path(__file__).parent / "reproductions"


Published = float | str  # in words where no number was reached


class Row(Record):
    """One published result and how to make it. Rows that name the same `run` share it, each with its own `label`."""

    name: str
    # by source: a number for the first measure, or for each measure
    published: dict[str, Published | dict[str, Published]] = Field(default_factory=dict)
    set: dict[str, Any] = Field(default_factory=dict)
    run: str = ""
    label: str | None = None  # of the algorithm; without it, all of them

    @property
    def folder(self) -> str:
        """Where its run is, beside those of other rows."""
        return "".join(sign if sign.isalnum() or sign in ".-" else "_" for sign in self.run or self.name)

    def numbers(self, measure: Measure) -> dict[str, Published]:
        """What each source says about one measure."""
        found = {
            name: told.get(measure.name) if isinstance(told, dict) else told for name, told in self.published.items()
        }
        return {name: told for name, told in found.items() if told is not None}


class Quick(Record):
    """What the shortened version runs."""

    rows: tuple[str, ...] = ()
    rounds: Count
    set: dict[str, Any] = Field(default_factory=dict)


class Reproduction(Record):
    """A file of published results."""

    title: str
    about: str = ""
    sources: dict[str, str]  # short name → where the numbers are from; the first is what differences are about
    measure: tuple[Measure, ...]
    quick: Quick
    curves: Curves | None = None  # a picture of all rows
    report: bool = False  # of every run, as after `fedloom run`
    experiment: dict[str, Any]
    row: tuple[Row, ...]

    @field_validator("measure", mode="before")
    @classmethod
    def _measures(cls, value: Any) -> Any:
        return [value] if isinstance(value, Mapping) else value

    @field_validator("measure")
    @classmethod
    def _named(cls, value: tuple[Measure, ...]) -> tuple[Measure, ...]:
        return named(value)

    @model_validator(mode="after")
    def _sound(self) -> Reproduction:
        """What would otherwise be left out of the table without a word."""
        for what in ("sources", "measure", "row"):
            if not getattr(self, what):
                raise InputError(f"A reproduction needs at least one '{what}'.")
        names, runs = set[str](), dict[str, str]()
        for row in self.row:
            run = row.run or row.name
            if row.name in names or runs.setdefault(row.folder, run) != run or not row.folder.strip("._"):
                raise InputError(
                    f"The row '{row.name}' cannot be told from another by its name: rows, and what they 'run', must "
                    "differ in letters or digits."
                )
            names.add(row.name)
            self._known(row)
        return self

    def _known(self, row: Row) -> None:
        """The row is about sources and measures that there are."""
        told = row.published
        measures = [name for numbers in told.values() if isinstance(numbers, dict) for name in numbers]
        for what, given, known in (
            ("source", list(told), list(self.sources)),
            ("measure", measures, [measure.name for measure in self.measure]),
        ):
            for name in given:
                if name not in known:
                    raise InputError(
                        f"The row '{row.name}' has published numbers for a {what} '{name}' that there is not. Known: "
                        f"{', '.join(known)}.{nearest(name, known)}"
                    )


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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a valid TOML file: {error}") from error


@dataclass
class Planned:
    """A row, ready to run."""

    row: Row
    experiment: Experiment
    seconds: float  # a rough guess
    ours: dict[str, list[float | None]] = field(default_factory=dict)  # measure → one a seed; none: not reached
    sha256: str | None = None  # of all weights that its run ended with


def plan(
    reproduction: Reproduction,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> list[Planned]:
    """The rows that are to be run, with a guess of the time each will take; relative paths start at `base`."""
    wanted = reproduction.quick.rows if quick and not only else only
    rows = [row for row in reproduction.row if not wanted or any(fnmatch(row.name, one) for one in wanted)]
    nowhere = [one for one in wanted if not any(fnmatch(row.name, one) for row in rows)]
    if nowhere:
        known = "; ".join(row.name for row in reproduction.row)
        raise InputError(f"No row is called {', '.join(nowhere)}. Known: {known}.")
    found, speeds, shared = [], dict[str, float](), set[str]()
    for row in rows:
        experiment = experiment_of(reproduction, row, quick=quick, changes=changes, base=base)
        # rows differ in batches and cohorts: what a step costs is timed once for each
        kind = f"{experiment.train} {experiment.cohort}"
        if kind not in speeds:
            speeds[kind] = estimate(Plan(experiment)).seconds_a_round
        rounds = min(_expected(reproduction, row, experiment.rounds), experiment.rounds)
        cells = len(experiment.algorithm) * len(experiment.seeds)
        seconds = 0.0 if row.run in shared else speeds[kind] * rounds * cells + 3
        shared |= {row.run} - {""}
        found.append(Planned(row, experiment, seconds))
    return found


def experiment_of(
    reproduction: Reproduction,
    row: Row,
    *,
    quick: bool = False,
    changes: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> Experiment:
    """What a row runs."""
    settings = {**row.set, **(reproduction.quick.set if quick else {}), **(changes or {})}
    values = copy.deepcopy(reproduction.experiment)
    for key, value in settings.items():
        spec.change(values, key, copy.deepcopy(value))
    experiment = spec.parse(values, base or Path.cwd(), default_name="reproduction")
    if quick and experiment.rounds > reproduction.quick.rounds:
        values["rounds"] = reproduction.quick.rounds
        experiment = spec.parse(values, experiment.base, default_name="reproduction")
    return experiment


def _expected(reproduction: Reproduction, row: Row, most: int) -> float:
    """How many rounds it took others."""
    told = [
        told
        for measure in reproduction.measure
        if measure.kind == "rounds_to"
        for told in row.numbers(measure).values()
    ]
    return max((one for one in told if not isinstance(one, str)), default=most)


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
    ran: dict[Path, View] = {}
    for one in planned:
        out = folder / "rows" / one.row.folder
        arguments = Plan(one.experiment).arguments()
        again = fresh and out not in ran
        result = run(**arguments, out=out, fresh=again, progress=told, should_stop=should_stop)
        if result.status != "done":
            return None
        if out not in ran:
            ran[out] = View.read(out)
            if reproduction.report:
                write_report(out)
        one.sha256 = result.weights_sha256
        one.ours = {measure.name: measured(measure, ran[out], one.row.label) for measure in reproduction.measure}
        made = table(reproduction, planned, quick=quick)
        write_tables([made], folder)  # after every row: a long reproduction can be looked at while it runs
        write_atomically(folder / "reproduction.json", json.dumps(_record(planned), indent=1).encode())
        if reproduction.curves is not None:
            views = {done.row.name: ran[folder / "rows" / done.row.folder] for done in planned if done.ours}
            target = next(iter(one.experiment.evaluate.target.values()), None)
            save(reproduction.curves, views, reproduction.title, folder, target)
    return made


def _record(planned: Sequence[Planned]) -> list[dict[str, Any]]:
    """What came out, in full."""
    return [
        {"row": one.row.name, "seeds": one.experiment.seeds, "ours": one.ours, "weights_sha256": one.sha256}
        for one in planned
        if one.ours
    ]


def measured(measure: Measure, view: View, label: str | None = None) -> list[float | None]:
    """What came out, for each seed."""
    if label is not None and label not in view.labels:
        raise InputError(f"There is no algorithm '{label}' in {view.folder}. Known: {', '.join(view.labels)}.")
    return [measure.value(view, *cell) for cell in view.cells if label in (None, cell[0])]


def table(reproduction: Reproduction, planned: Sequence[Planned], *, quick: bool = False) -> Table:
    """Ours and what was published: side by side if a row states one number, one above the other if several."""
    title = reproduction.title + (" (quick)" if quick else "")
    plain = any(not isinstance(told, dict) for one in planned for told in one.row.published.values())
    layout = _long if plain or len(reproduction.measure) == 1 else _wide
    columns, rows, kinds = layout(reproduction, planned)
    return Table("reproduction", title, columns, tuple(rows), kinds, _note(reproduction, planned, quick))


Parts = tuple[tuple[str, ...], list[tuple[Value, ...]], tuple[str, ...]]  # columns, rows, kinds


def _long(reproduction: Reproduction, planned: Sequence[Planned]) -> Parts:
    """A line for every row: the first measure with its difference to the first source, then our further measures."""
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
    """A column for every measure; under ours the range over seeds, and what each source states."""
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
    """Over seeds; none unless all of them got there."""
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known and len(known) == len(found) else None


def _shown(found: Sequence[float | None], measure: Measure, experiment: Experiment) -> Value:
    """Ours, or in words why there is no number."""
    if not found:
        return "not run yet"
    ours = _mean(found)
    return f"> {experiment.rounds}" if ours is None and measure.kind in ("rounds_to", "crossing") else ours


def _range(found: Sequence[float | None]) -> str | None:
    """The lowest and the highest seed."""
    known = sorted(value for value in found if value is not None)
    if len(found) < 2 or not known:
        return None
    missed = f", {len(found) - len(known)} not reached" if len(known) < len(found) else ""
    return f"{known[0]:.4g} – {known[-1]:.4g}{missed}"


def _note(reproduction: Reproduction, planned: Sequence[Planned], quick: bool) -> str:
    sources = "; ".join(f"{name}: {where}" for name, where in reproduction.sources.items())
    counts = sorted({len(one.experiment.seeds) for one in planned})
    most = "one seed" if counts[-1] == 1 else f"mean of {' or '.join(map(str, counts))} seeds"
    note = f"{' '.join(reproduction.about.split())} Sources: {sources}. Ours: {most}."
    if quick:
        rounds = max(one.experiment.rounds for one in planned)
        note = f"QUICK: {len(planned)} of {len(reproduction.row)} rows, at most {rounds} rounds. {note}"
    return note


def duration(seconds: float) -> str:
    """A rough time in words.

    >>> duration(50), duration(4000), duration(200000)
    ('1 minute', '1.1 hours', '2.3 days')
    """
    minutes = math.ceil(seconds / 60)
    if minutes < 60:
        return f"{minutes} minute{'s' if minutes != 1 else ''}"
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
