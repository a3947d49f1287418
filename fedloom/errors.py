"""Errors that fedloom raises on purpose. Each has a clear message and an exit code."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

UNKNOWN = "is unknown"
# in messages that both the command line and Python programs show
FRESH = "--fresh (in Python: fresh=True)"
OUT = "--out (in Python: out=…)"
BACKSLASH = " In double quotes a backslash means more than itself: write paths with /, or in single quotes."
WIDTH = 78  # the most characters of a line of a file in a message


class FedloomError(Exception):
    """Base of all errors that fedloom raises on purpose; the command line prints the message, not a traceback."""

    exit_code = 1


class InputError(FedloomError, ValueError):
    """The experiment, the data or a parameter is not valid."""

    exit_code = 2


class ParameterError(InputError):
    """A parameter of a record is not valid. The parts are kept, so that the reader of a file can name the table."""

    def __init__(self, owner: str, parameter: str, problem: str, advice: str = "") -> None:
        super().__init__(owner, parameter, problem, advice)
        self.owner, self.parameter, self.problem, self.advice = owner, parameter, problem, advice

    def __str__(self) -> str:
        if self.problem == UNKNOWN:
            return f"{self.owner} has no parameter '{self.parameter}'.{self.advice}"
        return f"The '{self.parameter}' parameter of {self.owner} {self.problem}.{self.advice}"

    def at(self, table: str) -> str:
        """Return the message for a table of an experiment file."""
        if self.problem == UNKNOWN:
            return f"[{table}] has no key '{self.parameter}'.{self.advice}"
        return f"[{table}] {self.parameter} {self.problem}.{self.advice}"


class TrainingError(FedloomError):
    """Training itself failed: a loss that is not finite, a client function that raised."""


class Diverged(TrainingError):
    """The result of a round is not finite; `largest` is the client whose update pulled hardest, if that is known."""

    def __init__(self, message: str, largest: int | None = None) -> None:
        super().__init__(message)
        self.largest = largest


class QuorumError(FedloomError):
    """Too few clients took part for a round to count."""

    exit_code = 3


class RoundAbandoned(QuorumError):
    """Too few clients answered in this round: the model stays as it is, and the run continues."""


class Unwanted(FedloomError):
    """The work was stopped, because nobody waits for its result any more."""


class PrivacySpent(FedloomError):
    """Another release would cost more ε than was given: nothing is released."""


class StoreError(FedloomError):
    """A run folder cannot be used as requested."""


class WorkerTraceback(Exception):
    """The traceback of an error in another process, as text: the cause of the same error here."""


def unknown(what: str, name: str, known: Iterable[str], others: str = "") -> InputError:
    """Return the error for an unknown name. It lists the known ones, and says what `others` you may give.

    >>> str(unknown("rule", "medain", ["median", "krum"]))
    "There is no rule 'medain'. Known: median, krum. Did you mean 'median'?"
    """
    names = list(known)
    if name.endswith(".py"):
        return InputError(f"'{name}' is a file: say which {what} in it you mean, as in '{name}:Name'.")
    listed = ", ".join([*names, others] if others else names)
    return InputError(f"There is no {what} '{name}'. Known: {listed}.{nearest(name, names)}")


def lines_around(lines: Sequence[str], line: int) -> str:
    """Return a line of a file, which has a mark, and those around it, for the end of a message; lines count from 1."""
    shown = ""
    for number, text in enumerate(lines, 1):
        if line - 2 <= number <= line + 1 and text.strip():
            # a tab would be shown as an escape, which nobody finds in the file
            row = f"  {'>' if number == line else ' '} {number:4} | {text.expandtabs(4).rstrip()}"
            shown += f"\n{row if len(row) <= WIDTH else row[: WIDTH - 1] + '…'}"
    return shown


def about_path(path: object) -> str:
    """Return a hint for a path with a control character, which a backslash in TOML makes, or an empty string.

    >>> about_path("data/table.csv"), about_path("data\\table.csv") == BACKSLASH
    ('', True)
    """
    return BACKSLASH if re.search(r"[\x00-\x1f]", str(path)) else ""


def respelt(name: str, known: Iterable[str]) -> str | None:
    """Return a known name that differs only in capitals, spaces, - or _, or None.

    >>> respelt("heart rate", ["age", "Heart_Rate"]), respelt("age", ["age", "ages"])
    ('Heart_Rate', None)
    """
    bare = re.sub(r"[\s_-]", "", name).casefold()
    return next((one for one in known if one != name and re.sub(r"[\s_-]", "", one).casefold() == bare), None)


SYNONYMS = {
    **dict.fromkeys(("learning_rate", "learningrate", "eta"), "lr"),
    **{"label": "y", "labels": "y", "y": "label", "clients": "count"},
}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt name, or an empty string.

    >>> nearest("momentun", ["lr", "momentum"]), nearest("adamW", ["adam", "adamw"])
    (" Did you mean 'momentum'?", " Did you mean 'adamw'?")
    >>> nearest("learningrate", ["lr", "momentum"])
    " Did you mean 'lr'?"
    """
    written = {one.lower(): one for one in known}
    lower = str(name).lower()
    same = SYNONYMS.get(lower)
    close = [same] if same in written else difflib.get_close_matches(lower, written, n=1)
    return f" Did you mean '{written[close[0]]}'?" if close else ""
