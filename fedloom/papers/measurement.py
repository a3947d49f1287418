"""Take one number from a finished run: what was measured, over which clients, in which rounds."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import model_validator

from fedloom.errors import InputError
from fedloom.record import Count, Record
from fedloom.results import curve_numbers, headline
from fedloom.results.run_data import ClientValues, Floats, Ints, RunData

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
