"""Names of classes that are probably a mistake: the same in two spellings, a typo of one client, dates."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fedloom.data.csv_text import DATE, NO, NO_WORDS, YES, YES_WORDS, finite_number
from fedloom.data.federation import Federation
from fedloom.errors import InputError

FEWEST_ROWS = 10  # with fewer, every row may well have a class of its own
FEW_ROWS = 5  # a class that one client has alone and in so few rows may be a slip of the pen
NEARLY = 0.75  # as alike as dead and daed
SIGN = r"\d+|[+-]|\b[^\W\d_]\b"  # what tells grade 1 from grade 2, type A from type B, and A+ from A-
OWN = 0.9  # a share of rows with a class of their own, as an identifier gives them


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
    if identify_rows(names, len(federation.y)):
        return (
            f" Nearly every row has a class of its own, such as {names[0]}, as if the label were an identifier: choose "
            "the column to predict as label."
        )
    found, alike = "", "; ".join(", ".join(group) for group in same_meaning(names))
    if alike:
        found += f" Some may mean the same ({alike}): are they spelt differently at some clients?"
    found += classes_of_one_client(federation)
    if all(finite_number(name) is not None for name in names) and len(names) > 2:
        found += ' If they are numbers to predict, set task = "regression" in [data].'
    return found


def check_clear(classes: Sequence[str]) -> None:
    """Refuse whole-number labels that a loss of the user's would get as the numbers of classes, if they are others."""
    numbers = [finite_number(name) for name in classes]
    if len(classes) > 2 and None not in numbers and numbers != [*range(len(classes))]:
        raise InputError(
            f"The labels are {len(classes)} whole numbers, {classes[0]} to {classes[-1]}, and a loss of your own does "
            'not say what they are. Set task = "regression" in [data] if they are numbers to predict, or '
            f'task = "classification" if they are classes: your loss then gets 0 to {len(classes) - 1} for them.'
        )


def labels_spelt_differently(label: Sequence[str], classes: Sequence[str]) -> Iterator[str]:
    """Yield a sentence if classes of a table's label probably mean the same. Elsewhere, A and a may be two letters."""
    if label and (groups := same_meaning(classes)):
        shown = "; ".join(", ".join(group) for group in groups[:5])
        yield (
            f"{', '.join(label)} has classes that may mean the same and are learnt as different ones: {shown}. If so, "
            "spell them alike in all files."
        )


def classes_of_one_client(federation: Federation) -> str:
    """Ask about classes that may be misspelt, with their rows: of those that one client has alone, the odd ones."""
    found = [shown for shown, odd in _alone(federation) if odd]
    return f" Only one client has {', '.join(found[:4])}: are they spelt differently there?" if found else ""


def known_to_one_client(federation: Federation) -> Iterator[str]:
    """Yield a sentence about classes that one client has alone and that seem right: clients differ in their labels."""
    found = [shown for shown, odd in _alone(federation) if not odd]
    if found and federation.names is not None:  # a partition that somebody chose is no surprise
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        yield (
            f"Only one client has {', '.join(found[:4])}{more}. Each is learnt from its client alone, and no other "
            "client's own test says how well. If the same class has another name elsewhere, spell it alike everywhere."
        )


def _alone(federation: Federation) -> Iterator[tuple[str, bool]]:
    """Yield each class of a table that one client has alone, unless all are like that, and whether it looks wrong."""
    names = federation.classes
    if not federation.preprocessing.label or not names or federation.y.dim() > 1 or federation.clients < 2:
        return
    y = federation.y.numpy()
    counts = np.array([np.bincount(y[begin:end], minlength=len(names)) for begin, end in pairwise(federation.offsets)])
    alone = (counts > 0).sum(axis=0) == 1
    if alone.all():
        return
    shared = [name for name, one in zip(names, alone, strict=True) if not one]
    for place in np.flatnonzero(alone).tolist():
        client, count = int(counts[:, place].argmax()), int(counts[:, place].max())
        held = counts[client] > 0
        codes_of_its_own = held.sum() > 1 and bool(alone[held].all())  # such as 0 and 1 for alive and dead
        odd = count <= FEW_ROWS or codes_of_its_own or _looks_misspelt(names[place], shared)
        rows = f"{count:,} {'row' if count == 1 else 'rows'}"
        yield f"{names[place]} ({rows} of {federation.name(client)})", odd


def _looks_misspelt(name: str, others: Sequence[str]) -> bool:
    """Whether a name is nearly one of the others, or a number among words. Grades and types may differ in one sign.

    >>> _looks_misspelt("daed", ["dead"]), _looks_misspelt("grade 3", ["grade 2"]), _looks_misspelt("1", ["dead"])
    (True, False, True)
    """
    if finite_number(name) is not None:
        return all(finite_number(other) is None for other in others)
    return any(nearly_the_same(name, other) for other in others)


def nearly_the_same(one: str, two: str) -> bool:
    """Whether two names differ by so little that one may be the other one misspelt."""
    plain, other = one.casefold(), two.casefold()
    return re.findall(SIGN, plain) == re.findall(SIGN, other) and SequenceMatcher(None, plain, other).ratio() >= NEARLY


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


def clients_spelt_differently(names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence if names of clients differ only in capitals, spaces or punctuation: one may be misspelt.

    >>> [text] = clients_spelt_differently(["School-A", "school A", "school-B", "1", "01", "site 1-23", "site 12-3"])
    >>> text
    'Clients whose names may mean the same count as different clients: School-A, school A. If so, spell them alike.'
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        is_number = finite_number(name) is not None  # -1 and 1 are two
        words = " ".join(re.sub(r"[^\w+]|_", " ", name.casefold()).split())
        groups[name if is_number else re.sub(r"(?<!\d) | (?!\d)", "", words)].append(name)
    if alike := [group for group in groups.values() if len(group) > 1]:
        shown = "; ".join(", ".join(group) for group in alike[:5])
        yield f"Clients whose names may mean the same count as different clients: {shown}. If so, spell them alike."


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


def identify_rows(names: Sequence[str], rows: int) -> bool:
    """Whether nearly every row has a name of its own, and most names are no numbers that could be predicted.

    >>> identify_rows([f"P{row}" for row in range(20)], 20)
    True
    >>> identify_rows([*(f"{row}.5" for row in range(19)), "NA"], 20)
    False
    """
    if rows < FEWEST_ROWS or len(names) <= OWN * rows:
        return False
    return 2 * sum(finite_number(name) is None for name in names) > len(names)


def compact_dates(one: NDArray[np.float64]) -> bool:
    """Whether numbers are dates without separators, year, month and day: 20240331."""
    whole = np.unique(np.round(one[np.isfinite(one)]))
    year, month, day = whole // 10_000, whole // 100 % 100, whole % 100
    # single precision rounds such numbers to even ones, so that day 31 may be stored as 32
    dates = (year >= 1900) & (year < 2100) & (month >= 1) & (month <= 12) & (day <= 32)
    return len(whole) > 2 and bool((~dates).sum() <= 1)  # the other one may be the mean, in place of what is missing
