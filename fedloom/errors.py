"""What can go wrong, as the user sees it: each error is one clear message and one exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedloomError(Exception):
    """Base of all errors that fedloom raises on purpose; the command line prints the message, not a traceback."""

    exit_code = 1


class InputError(FedloomError, ValueError):
    """The experiment, the data or a parameter is not what it must be."""

    exit_code = 2


class TrainingError(FedloomError):
    """Training itself failed: a loss that is not finite, a client function that raised."""


class QuorumError(FedloomError):
    """Too few clients took part for a round to count."""

    exit_code = 3


class StoreError(FedloomError):
    """A run folder that cannot be used as asked."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name, or an empty string.

    >>> nearest("momentun", ["lr", "momentum"])
    " Did you mean 'momentum'?"
    """
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
