"""The table [system] of an experiment file: clients as machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import AllowInfNan, Strict, ValidationInfo, field_validator, model_validator

from fedloom.errors import InputError, ParameterError
from fedloom.record import Duration, NonNegative, Positive, Record, Whole

Fraction = Annotated[float, Strict(), AllowInfNan(False), Gt(0), Le(1)]
Chance = Annotated[float, Strict(), AllowInfNan(False), Ge(0), Le(0.99)]  # somebody answers in the end


class Spread(Record):
    """How a number of `[system]` differs between clients: a distribution, or a column of a CSV file."""

    name: Literal["lognormal", "uniform", "file"]
    """`lognormal` draws median · exp(sigma · z) with a standard normal z, `uniform` draws a number from `low` to
    `high`, and `file` reads a column of a file that has a row for each client, with its name in the column `client`.
    """
    median: Positive | None = None
    """The median of `lognormal`. By default 1."""
    sigma: Positive | None = None
    """The spread of `lognormal`: with 0.5, two of three clients are within a factor of 1.65 of the median. By default
    0.5.
    """
    low: Positive | None = None
    """The smallest number of `uniform`."""
    high: Positive | None = None
    """The largest number of `uniform`."""
    file: Path | None = None
    """The CSV file."""
    column: str | None = None
    """The column of the file. By default, the name of the key."""

    @model_validator(mode="after")
    def _fits(self) -> Spread:
        _check_keys(self, {"lognormal": ("median", "sigma"), "uniform": ("low", "high"), "file": ("file", "column")})
        if self.name == "uniform" and not (self.low and self.high and self.low <= self.high):
            raise InputError(
                "[system] a uniform number needs 'low' and 'high', and 'low' must not be larger. "
                f"Got {self.low} and {self.high}."
            )
        if self.name == "file" and self.file is None:
            raise InputError("[system] a number from a file needs its path: 'file'.")
        return self


class Availability(Record):
    """When clients can be asked: in a cycle, or as a file says."""

    name: Literal["cycle", "file"]
    """`cycle` makes each client available for the same share of every period, from a moment of its own; `file` reads
    a CSV file with the columns `client`, `from` and `to`, in seconds, and a row for each time a client is available.
    """
    period: Duration | None = None
    """The length of a cycle. By default 24h."""
    share: Fraction | None = None
    """The share of a cycle in which a client is available."""
    file: Path | None = None
    """The CSV file."""
    repeat: Duration | None = None
    """Start again at the file's beginning after this time. By default the file is used once."""

    @model_validator(mode="after")
    def _fits(self) -> Availability:
        _check_keys(self, {"cycle": ("period", "share"), "file": ("file", "repeat")})
        needed = {"cycle": "share", "file": "file"}[self.name]
        if getattr(self, needed) is None:
            raise InputError(f"[system] availability with name = \"{self.name}\" needs '{needed}'.")
        return self


class System(Record):
    """[system]: clients as machines. With this table, a simulation has a virtual clock.

    A client's time is latency + received / download + steps · step / speed + sent / upload.
    """

    step: Positive | Literal["measure"] = "measure"
    """The seconds that a training step takes at speed 1. `measure` times a step of your model on this machine when the
    run begins, and the run keeps that number.
    """
    speed: Positive | Spread = 1.0
    """How fast clients compute: at 2, a step takes half as long."""
    download: Positive | Spread | None = None
    """What clients can receive, in megabits per second. By default, receiving takes no time."""
    upload: Positive | Spread | None = None
    """What clients can send, in megabits per second. By default, sending takes no time."""
    latency: NonNegative | Spread = 0.0
    """The seconds that an exchange of messages takes besides."""
    availability: Literal["always"] | Availability = "always"
    """When clients can be asked. A client whose time ends while it works does not answer."""
    vanish: Chance = 0.0
    """The probability that a client that was asked never answers."""
    seed: Whole | Literal["run"] = 0
    """The seed that clients are drawn with. `run` draws another fleet for every seed of the experiment."""

    @field_validator("speed", "download", "upload", "latency", "availability", mode="before")
    @classmethod
    def _tables(cls, value: Any, info: ValidationInfo) -> Any:
        kind = Availability if info.field_name == "availability" else Spread
        try:
            return kind(**value) if isinstance(value, Mapping) else value
        except ParameterError as error:
            raise InputError(error.at(f"system.{info.field_name}")) from None

    def files(self) -> Iterator[Path]:
        """Yield the files that the table names."""
        for value in (self.speed, self.download, self.upload, self.latency, self.availability):
            if isinstance(value, (Spread, Availability)) and value.file is not None:
                yield value.file


def _check_keys(table: Spread | Availability, meant: Mapping[str, tuple[str, ...]]) -> None:
    """Raise if a table has a key that is for another name."""
    for name, keys in meant.items():
        for key in keys if name != table.name else ():
            if getattr(table, key) is not None:
                raise InputError(f'[system] \'{key}\' is for name = "{name}". Got name = "{table.name}".')
