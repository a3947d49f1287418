"""Files of published results: what was reported by whom, and the experiments that make the same numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from fedloom.errors import InputError, nearest
from fedloom.experiment import spec
from fedloom.experiment.curves import Curves
from fedloom.experiment.measuring import Measure, named
from fedloom.experiment.spec import Experiment, tomllib
from fedloom.record import Record

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

    def numbers(self, measure: Measure) -> dict[str, Published]:
        """What each source says about one measure."""
        found = {
            name: told.get(measure.name) if isinstance(told, dict) else told for name, told in self.published.items()
        }
        return {name: told for name, told in found.items() if told is not None}


class Quick(Record):
    """What the shortened version runs."""

    rows: tuple[str, ...] = ()
    rounds: int
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


def experiment_of(
    reproduction: Reproduction, row: Row, *, quick: bool = False, changes: Mapping[str, Any] | None = None
) -> Experiment:
    """What a row runs."""
    settings = {**row.set, **(reproduction.quick.set if quick else {}), **(changes or {})}
    if quick:
        settings["rounds"] = min(int(settings.get("rounds", 10**9)), reproduction.quick.rounds)
    values = json.loads(json.dumps(reproduction.experiment))
    for key, value in settings.items():
        spec.change(values, key, value)
    return spec.parse(values, Path.cwd(), default_name="reproduction")
