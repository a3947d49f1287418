"""Categories of a table that are probably a mistake, and those that no training row has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.class_names import nearly_the_same, same_meaning
from fedloom.data.csv_text import DATE, finite_number
from fedloom.data.federation import Federation
from fedloom.data.preprocessing import Column

Counts = NDArray[np.int64]
MANY_CATEGORIES = 20  # with fewer, a category with one row may be an honest rare one
FEW_ROWS = 2  # of a category that may be misspelt
SHORTEST = 3  # signs of a name that may be another one: A+ and AB+ are not the same
NO_LABEL = ("na", "n/a", "#n/a", "nan", "null", "missing", "?")


def with_doubts(federation: Federation) -> Federation:
    """Note which categories no training row has, and caution about those that may be misspelt at a client."""
    fitted, train = federation.preprocessing, torch.zeros(len(federation.x), dtype=torch.bool)
    if not any(column.categories for column in fitted.columns):
        return federation
    for client in range(federation.clients):
        train[federation.indices(client, "train")] = True
    owner = np.repeat(np.arange(federation.clients), np.diff(federation.offsets))
    untrained, cautions, begin = dict[str, tuple[str, ...]](), list[str](), 0
    for column in fitted.columns:
        features = federation.x[:, begin : begin + len(column.features)]
        begin += len(column.features)
        if column.categories:
            held = _counts(features, column, owner, federation.clients)
            learnt = _counts(features[train], column, owner[train.numpy()], federation.clients).sum(axis=0)
            never = tuple(name for name, rows in zip(column.categories, learnt, strict=True) if not rows)
            untrained |= {column.name: never} if never else {}
            if federation.names is not None:  # parts that a partition has drawn do not spell anything
                cautions += misspelt(column, dict(zip(federation.names, held, strict=True)))
    fitted = fitted.replace(untrained=untrained)
    return replace(federation, preprocessing=fitted, cautions=(*federation.cautions, *cautions))


def _counts(features: torch.Tensor, column: Column, owner: Counts, clients: int) -> Counts:
    """Return how many rows of each client have each category: clients × categories."""
    number = len(column.categories)
    one = features[:, 0] if column.embedded else torch.where(features.sum(1) == 1, features.argmax(1), torch.nan)
    codes = one.double().numpy()
    known = np.isfinite(codes)
    return np.bincount(owner[known] * number + codes[known].astype(np.int64), minlength=clients * number).reshape(
        clients, number
    )


def misspelt(column: Column, held: Mapping[str, Sequence[int] | Counts]) -> Iterator[str]:
    """Yield a sentence about categories that one client has alone, and that others may spell in another way.

    `held` has the rows of every category by client. Few rows may be a slip of the pen, and a client that has another
    name in all of its rows lacks the usual one.
    """
    counts, names = np.array(list(held.values())), list(held)
    found = []
    for place in np.flatnonzero((counts > 0).sum(axis=0) == 1).tolist():
        client = int(counts[:, place].argmax())
        rows, category = int(counts[client, place]), column.categories[place]
        elsewhere = np.delete(counts, client, axis=0).sum(axis=0) > 0
        usual = [
            name
            for other, name in enumerate(column.categories)
            if elsewhere[other] and (rows <= FEW_ROWS or not counts[client, other]) and _similar(category, name)
        ]
        if usual:
            found.append(f"{category} ({rows:,} {'row' if rows == 1 else 'rows'} of {names[client]}; {usual[0]}?)")
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        yield (
            f"{column.name} has categories that one client alone has, and that may be misspelt: "
            f"{', '.join(found[:5])}{more}. If so, spell them alike in all files."
        )


def _similar(one: str, two: str) -> bool:
    """Whether one name may be the other one misspelt, or its short form; numbers are what they are.

    >>> _similar("Postt", "Post"), _similar("premenopausal", "Pre"), _similar("III", "IIII"), _similar("A+", "AB+")
    (True, True, True, False)
    """
    if finite_number(one) is not None or finite_number(two) is not None:
        return False
    short, long = sorted((one.casefold(), two.casefold()), key=len)
    return len(short) >= SHORTEST and (long.startswith(short) or nearly_the_same(short, long))


def spelt_differently(columns: Iterable[Column]) -> Iterator[str]:
    """Yield a sentence for each column with categories that probably mean the same."""
    for column in columns:
        if groups := same_meaning(column.categories):
            shown = "; ".join(", ".join(group) for group in groups[:5])
            apart = "have separate embeddings" if column.embedded else "are separate features"
            yield (
                f"{column.name} has categories that may mean the same and {apart}: {shown}. If so, spell "
                "them alike in all files."
            )


def gaps_as_categories(columns: Iterable[Column]) -> Iterator[str]:
    """Yield a sentence for each column with a category that probably means a missing value."""
    for column in columns:
        if absent := [name for name in column.categories if name.strip().casefold() in NO_LABEL]:
            marks = ", ".join(f'"{name}" = nan' for name in absent)
            yield (
                f"{column.name} has the category {', '.join(absent)}, which models learn from. If it means that the "
                f"value is missing, set missing = {{ {marks} }} in [data]."
            )


def rare_categories(name: str, cells: Sequence[str]) -> Iterator[str]:
    """Yield a sentence about a column with hundreds of categories from which nothing can be learnt, such as dates."""
    counts = Counter(cell for cell in cells if cell)
    numbers = [number for cell in counts if (number := finite_number(cell)) is not None]
    if len(numbers) == len(counts) >= MANY_CATEGORIES and not all(number.is_integer() for number in numbers):
        yield f"{name} has {len(counts):,} categories, all numbers: take it out of categorical to use it as a number."
        return  # whole numbers may be codes
    single = sum(count == 1 for count in counts.values())
    dates = sum(DATE.fullmatch(cell) is not None for cell in counts)
    if len(counts) < MANY_CATEGORIES or 2 * max(single, dates) <= len(counts):
        return
    what = "which look like dates" if 2 * dates > len(counts) else f"and {single:,} of them have one row"
    advice = (
        "use what the dates mean, such as an age or a season" if 2 * dates > len(counts) else "use fewer categories"
    )
    yield f'{name} has {len(counts):,} categories, {what}: leave it out with drop = ["{name}"], or {advice}.'
