"""Files of published results: the numbers, their sources, how to reproduce each row, and what is measured in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field, field_validator, model_validator

from fedloom.errors import InputError, nearest, unknown
from fedloom.files import read_toml
from fedloom.papers.curve_figure import Curves
from fedloom.record import Count, Record
from fedloom.results import curve_numbers, headline
from fedloom.results.run_data import RunData
from fedloom.results.run_values import ClientValues, Floats, Ints

FOLDER = Path(__file__).parent / "reproductions"
Published = float | str  # in words if no number was reached
Statistic = Literal["mean", "std", "lowest", "highest"]


class Measure(Record):
    """What a run is compared by. `of` says which curve, `clients` what is taken over clients, `kind` what over rounds.

    `final` needs no curve: it is one of the numbers at the end of the run (`key`), as `fedloom run --json` names them.
    """

    name: str = ""
    """The name of the column."""
    kind: Literal["final", "last", "rounds_to", "crossing", "peak", "peak_round", "trough"]
    """What is taken over rounds."""
    of: Literal["headline", "server", "pre_fit", "post_fit", "universal"] = "headline"
    """Which curve is measured."""
    split: Literal["train", "validation", "test", "notes"] = "test"
    """The split of the curve."""
    metric: str = "accuracy"
    """The metric of the curve."""
    clients: Statistic = "mean"
    """What is taken over clients."""
    rounds: Count = 1
    """For `last`: how many rounds are averaged."""
    target: float = 0.0
    """For `rounds_to` (the first round that reaches it) and `crossing` (interpolated)."""
    key: str = ""
    """For `final`: the number's name, such as `universal_accuracy`."""
    percent: bool = False
    """The published numbers are percentages, so show ours that way."""

    @model_validator(mode="after")
    def _whole(self) -> Measure:
        needed = {"rounds_to": "target", "crossing": "target", "final": "key"}.get(self.kind)
        if needed is not None and needed not in self.model_fields_set:
            raise InputError(f"A measure of the kind '{self.kind}' needs a '{needed}'.")
        return self

    @property
    def counts_rounds(self) -> bool:
        """Whether the number counts rounds."""
        return self.kind in ("rounds_to", "crossing", "peak_round")

    def value(self, view: RunData, label: str, seed: int) -> float | None:
        """Return the number of one cell; None if it was never measured or never reached the target."""
        found = self._value(view, label, seed)
        if found is None or not np.isfinite(found):
            return None
        return 100 * found if self.percent and not self.counts_rounds else found

    def curve(self, view: RunData, label: str, seed: int) -> list[list[float]]:
        """Return the rounds and values that the number is taken from, rounded to five decimals; empty for `final`."""
        if self.kind == "final":
            return [[], []]
        rounds, values = self._curve(view, label, seed)
        return [rounds.tolist(), np.round(values, 5).tolist()]

    def _value(self, view: RunData, label: str, seed: int) -> float | None:
        if self.kind == "final":
            return next(
                run.final.get(self.key) for run in view.result.runs if (run.algorithm, run.seed) == (label, seed)
            )
        rounds, values = self._curve(view, label, seed)
        if not len(rounds):
            return None
        higher = view.metric(self.metric).higher_is_better
        if self.kind in ("rounds_to", "crossing"):
            there = curve_numbers.reached(rounds, values, self.target, higher)
            return None if there is None else there.crossing if self.kind == "crossing" else float(there.round)
        if self.kind == "last":
            return curve_numbers.last_mean(values, self.rounds)
        best, at = curve_numbers.peak(rounds, values, higher != (self.kind == "trough"))
        return float(at) if self.kind == "peak_round" else best

    def _curve(self, view: RunData, label: str, seed: int) -> tuple[Ints, Floats]:
        if self.of == "headline":
            return headline.curve(view, label, seed, self.metric)
        if self.of == "server":
            return view.server_values(label, seed, self.metric, self.split)
        return over_clients(view.client_values(label, seed, self.of, self.metric, self.split), self.clients)


def over_clients(series: ClientValues, statistic: Statistic) -> tuple[Ints, Floats]:
    """Take one value per round over clients."""
    stats = series.by_round()
    return stats.index, {"mean": stats.mean, "std": stats.std, "lowest": stats.low, "highest": stats.high}[statistic]


def named(measures: tuple[Measure, ...]) -> tuple[Measure, ...]:
    """Check that every measure has its own name."""
    names = [one.name for one in measures]
    if len(names) > 1 and ("" in names or len(set(names)) < len(names)):
        raise InputError('Several measures each need their own name, such as name = "lowest client".')
    return measures


class Row(Record):
    """One published result and how to make it. Rows that name the same `run` share it, each with its own `label`."""

    name: str
    """The row's name."""
    published: dict[str, Published | dict[str, Published]] = Field(default_factory=dict)
    """By source: a number for the first measure, or a number for each measure."""
    set: dict[str, Any] = Field(default_factory=dict)
    """The keys of the experiment that this row changes."""
    run: str = ""
    """Rows with the same `run` share one run."""
    label: str | None = None
    """The label of the algorithm. By default, all of them."""

    @property
    def folder(self) -> str:
        """The name of its run's folder."""
        return "".join(sign if sign.isalnum() or sign in ".-" else "_" for sign in self.run or self.name)

    @property
    def alone(self) -> Row:
        """The row with a run of its own, in which its algorithm is the only one."""
        return self.model_copy(update={"run": ""})

    def numbers(self, measure: Measure) -> dict[str, Published]:
        """Return what each source says about one measure."""
        found = {
            name: told.get(measure.name) if isinstance(told, dict) else told for name, told in self.published.items()
        }
        return {name: told for name, told in found.items() if told is not None}


class Quick(Record):
    """The shortened version that `--quick` runs."""

    rows: tuple[str, ...] = ()
    """The rows to run."""
    rounds: Count
    """The most rounds."""
    set: dict[str, Any] = Field(default_factory=dict)
    """The keys of the experiment to change."""


class Reproduction(Record):
    """A file of published results."""

    title: str
    """The title of the table."""
    about: str = ""
    """What was published, and what differs here."""
    sources: dict[str, str]
    """A short name for each source, and where its numbers are from. Differences are to the first."""
    measure: Annotated[tuple[Measure, ...], AfterValidator(named)]
    """What is compared."""
    quick: Quick
    """What `--quick` runs."""
    curves: Curves | None = None
    """A picture of all rows."""
    report: bool = False
    """Write a report for every run, as `fedloom run` does."""
    experiment: dict[str, Any]
    """The experiment file's tables that all rows share."""
    row: tuple[Row, ...]
    """The published results."""

    @field_validator("measure", mode="before")
    @classmethod
    def _measures(cls, value: Any) -> Any:
        return [value] if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _sound(self) -> Reproduction:
        """Refuse rows that the table could not show."""
        for what in ("sources", "measure", "row"):
            if not getattr(self, what):
                raise InputError(f"A reproduction needs at least one '{what}'.")
        names, runs = set[str](), dict[str, str]()
        for row in self.row:
            run = row.run or row.name
            if row.name in names or runs.setdefault(row.folder, run) != run or not row.folder.strip("._"):
                raise InputError(
                    f"The row '{row.name}' needs another name: rows, and what they 'run', must differ in letters or "
                    "digits."
                )
            names.add(row.name)
            self._known(row)
        return self

    def _known(self, row: Row) -> None:
        """Check that a row names known sources and measures."""
        told = row.published
        measures = [name for numbers in told.values() if isinstance(numbers, dict) for name in numbers]
        for what, given, known in (
            ("source", list(told), list(self.sources)),
            ("measure", measures, [measure.name for measure in self.measure]),
        ):
            for name in given:
                if name not in known:
                    raise InputError(
                        f"The row '{row.name}' has published numbers for an unknown {what} '{name}'. Known: "
                        f"{', '.join(known)}.{nearest(name, known)}"
                    )


def names() -> list[str]:
    """List the reproductions that come with fedloom."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Reproduction:
    """Load one of them, or your own file."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise unknown("reproduction", name, names())
    return Reproduction(**read_toml(path))
