"""How a learning rate changes: from round to round, or from step to step within a round."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import model_validator

from fedloom.errors import InputError
from fedloom.record import Count, Positive, Record, Share


class RateSchedule(Record):
    """A factor for the learning rate that depends on the time: on the rounds, or on the local steps, so far.

    >>> [RateSchedule(name="step", every=2, factor=0.5, warmup=2).at(time) for time in range(6)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.5]
    """

    name: Literal["constant", "step", "exponential", "cosine"] = "constant"
    """`step` multiplies the rate by `factor` after every `every` rounds or steps, `exponential` after each of them, and
    `cosine` lowers it along half a cosine.
    """
    every: Count | None = None
    """For `step`: after how many rounds or steps the rate is multiplied by `factor` again."""
    factor: Positive | None = None
    """For `step` and `exponential`: what the rate is multiplied by."""
    over: Count | None = None
    """For `cosine`: after how many rounds or steps it ends. Over local steps, by default all of the client's round."""
    end: Share | None = None
    """For `cosine`: the fraction of the rate that it ends with and keeps. By default 0."""
    warmup: Count | None = None
    """Raise the rate evenly over this many rounds or steps first. What follows is counted from there."""

    @model_validator(mode="after")
    def _fits_name(self) -> RateSchedule:
        keys = {"step": ("every", "factor"), "exponential": ("factor",), "cosine": ("over", "end")}.get(self.name, ())
        for key in ("every", "factor", "over", "end"):
            given = getattr(self, key)
            if given is not None and key not in keys:
                raise InputError(f"A schedule with name = \"{self.name}\" has no '{key}'. Got {given!r} for it.")
            if given is None and key in keys and self.name != "cosine":
                raise InputError(f"A schedule with name = \"{self.name}\" needs '{key}'.")
        if self.name == "constant" and self.warmup is None:
            raise InputError("A schedule needs a name, such as \"cosine\", or a 'warmup'.")
        return self

    def at(self, time: int, total: int | None = None) -> float:
        """Return the factor after `time` rounds or steps, of `total` if that is known."""
        warmup = self.warmup or 0
        if time < warmup:
            return (time + 1) / warmup
        time -= warmup
        if self.name == "step":
            return float(self.factor ** (time // self.every))  # type: ignore[operator]
        if self.name == "exponential":
            return float(self.factor**time)  # type: ignore[operator]
        if self.name == "cosine":
            end, over = self.end or 0.0, self.over or max((total or 1) - warmup, 1)
            return end + (1 - end) * (1 + math.cos(math.pi * min(time / over, 1.0))) / 2
        return 1.0
