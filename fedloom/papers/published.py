"""Files of published results: the numbers, their sources, and how to reproduce each row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from fedloom.errors import InputError, nearest, unknown
from fedloom.files import read_toml
from fedloom.papers.curve_figure import Curves
from fedloom.papers.measurement import Measure, named
from fedloom.record import Count, Record

FOLDER = Path(__file__).parent / "reproductions"
Published = float | str  # in words if no number was reached


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
