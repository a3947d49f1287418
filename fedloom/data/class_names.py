"""Names of classes that are probably a mistake: the same in two spellings, a typo of one client, dates."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fedloom.data.csv_text import DATE, NO, NO_WORDS, YES, YES_WORDS, finite_number
from fedloom.data.federation import Federation


def doubts(federation: Federation) -> str:
    """Say why the classes of a table may not be what they seem, or nothing: then a model may have an output for each.

    Each sentence begins with a space. With an output for each, misspelt classes would stay classes.
    """
    names = federation.classes
    if not names:
        return ""  # numbers to predict
    if are_dates(names):
        return (
            f" The classes look like dates, such as {names[0]}, and each is a class of its own: choose another label, "
            "or predict a number, such as days since admission."
        )
    found, alike = "", "; ".join(", ".join(group) for group in same_meaning(names))
    if alike:
        found += f" Some may mean the same ({alike}): are they spelt differently at some clients?"
    found += classes_of_one_client(federation)
    if all(finite_number(name) is not None for name in names) and len(names) > 2:
        found += ' If they are numbers to predict, set task = "regression" in [data].'
    return found


def labels_spelt_differently(label: Sequence[str], classes: Sequence[str]) -> Iterator[str]:
    """Yield a sentence if classes of a table's label probably mean the same. Elsewhere, A and a may be two letters."""
    if label and (groups := same_meaning(classes)):
        shown = "; ".join(", ".join(group) for group in groups[:5])
        yield (
            f"{', '.join(label)} has classes that may mean the same and are learnt as different ones: {shown}. If so, "
            "spell them alike in all files."
        )


def classes_of_one_client(federation: Federation) -> str:
    """Name classes that may be misspelt: those that one client has alone, unless all are like that, and their rows."""
    if not federation.preprocessing.label or federation.y.dim() > 1 or federation.clients < 2:
        return ""
    y, number = federation.y.numpy(), len(federation.classes)
    counts = np.array([np.bincount(y[begin:end], minlength=number) for begin, end in pairwise(federation.offsets)])
    alone = np.flatnonzero((counts > 0).sum(axis=0) == 1).tolist()
    if not 0 < len(alone) < number:
        return ""
    found = []
    for place in alone[:4]:
        client = int(counts[:, place].argmax())
        rows = f"{counts[client, place]:,} {'row' if counts[client, place] == 1 else 'rows'}"
        found.append(f"{federation.classes[place]} ({rows} of {federation.name(client)})")
    return f" Only one client has {', '.join(found)}: are they spelt differently there?"


def same_meaning(names: Iterable[str]) -> list[list[str]]:
    """Return groups of names that differ only in capitals or spaces, or are all words for yes or for no.

    >>> same_meaning(["ICU", "icu", "day care", "day-care", "A+", "A-"]), same_meaning(["no", "False", "yes"])
    ([['ICU', 'icu'], ['day care', 'day-care']], [['no', 'False']])
    """
    groups: dict[str | tuple[str, ...], list[str]] = defaultdict(list)
    plain = {name: re.sub(r"(?<=[^\W\d_])[\s_-]+(?=[^\W\d_])", "", name.casefold().strip()) for name in names}
    answers = {*plain.values()} & {*YES_WORDS, *NO_WORDS}  # without such a word, 1 and t may be anything
    for name, key in plain.items():
        groups[YES if answers and key in YES else NO if answers and key in NO else key].append(name)
    return [group for group in groups.values() if len(group) > 1]


def are_dates(names: Sequence[str]) -> bool:
    """Whether names of classes are dates, such as 2024-03-31 or 20240331.

    >>> are_dates(["2024-03-31", "2024-04-01"]), are_dates(["20240331", "20240401", "20240402"])
    (True, True)
    >>> are_dates(["2024", "2025", "2026"])
    False
    """
    if len(names) < 2:
        return False
    return all(DATE.fullmatch(name) for name in names) or compact_dates(
        np.array([number if (number := finite_number(name)) is not None else 0.0 for name in names])
    )


def compact_dates(one: NDArray[np.float64]) -> bool:
    """Whether numbers are dates without separators, year, month and day: 20240331."""
    whole = np.unique(np.round(one[np.isfinite(one)]))
    year, month, day = whole // 10_000, whole // 100 % 100, whole % 100
    # single precision rounds such numbers to even ones, so that day 31 may be stored as 32
    dates = (year >= 1900) & (year < 2100) & (month >= 1) & (month <= 12) & (day <= 32)
    return len(whole) > 2 and bool((~dates).sum() <= 1)  # the other one may be the mean, in place of what is missing
