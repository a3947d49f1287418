"""What can go wrong, as the user sees it: each error is one clear message and one exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

UNKNOWN = "is unknown"


class FedloomError(Exception):
    """Base of all errors that fedloom raises on purpose; the command line prints the message, not a traceback."""

    exit_code = 1


class InputError(FedloomError, ValueError):
    """The experiment, the data or a parameter is not what it must be."""

    exit_code = 2


class ParameterError(InputError):
    """One parameter of one record is wrong. It knows where, so that a file's reader can name the table instead."""

    def __init__(self, owner: str, parameter: str, problem: str, advice: str = "") -> None:
        super().__init__(owner, parameter, problem, advice)
        self.owner, self.parameter, self.problem, self.advice = owner, parameter, problem, advice

    def __str__(self) -> str:
        if self.problem == UNKNOWN:
            return f"{self.owner} has no parameter '{self.parameter}'.{self.advice}"
        return f"The '{self.parameter}' parameter of {self.owner} {self.problem}.{self.advice}"

    def at(self, table: str) -> str:
        """The same about a table of an experiment file."""
        if self.problem == UNKNOWN:
            return f"[{table}] has no key '{self.parameter}'.{self.advice}"
        return f"[{table}] {self.parameter} {self.problem}.{self.advice}"


class TrainingError(FedloomError):
    """Training itself failed: a loss that is not finite, a client function that raised."""


class QuorumError(FedloomError):
    """Too few clients took part for a round to count."""

    exit_code = 3


class RoundAbandoned(QuorumError):
    """Too few clients answered in this round: the model stays as it is, and the run goes on."""


class StoreError(FedloomError):
    """A run folder that cannot be used as asked."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name, or an empty string.

    >>> nearest("momentun", ["lr", "momentum"])
    " Did you mean 'momentum'?"
    """
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
