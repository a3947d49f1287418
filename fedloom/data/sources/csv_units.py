"""Numbers in another unit: columns that are multiplied when a table is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.csv_text import finite_number
from fedloom.data.sources.base import require
from fedloom.errors import InputError
from fedloom.files import toml_text

Factors = dict[str, float]  # by column


def checked(convert: Any) -> Any:
    """Return a key `convert` as it is given if all its factors are numbers that a unit may have."""
    if not isinstance(convert, Mapping):
        return convert
    tables = [one for one in convert.values() if isinstance(one, Mapping)]
    if tables and len(tables) < len(convert):
        raise InputError(
            "[data] convert has factors for all rows beside tables of clients. Write all factors into tables, such as "
            "convert = { essen = { creatinine = 0.0113 } }."
        )
    for name, factor in (pair for table in tables or [convert] for pair in table.items()):
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < abs(factor) < math.inf:
            raise InputError(
                f"[data] convert: the factor of '{name}' must be a finite number other than 0, such as 0.0113. Got "
                f"{factor!r} instead."
            )
    return convert


class Units:
    """What the key `convert` says: factors by column for all rows, or for those of single clients.

    >>> Units({"essen": {"age": 0.5}}).factors("age", ["essen", "bonn"]).tolist()
    [0.5, 1.0]
    """

    def __init__(self, convert: Factors | dict[str, Factors] | None) -> None:
        self.of_all: Factors = {name: one for name, one in (convert or {}).items() if not isinstance(one, dict)}
        self.by_client = {name: one for name, one in (convert or {}).items() if isinstance(one, dict)}

    def columns(self, owner: str = "") -> list[str]:
        """Return the columns that are multiplied in some rows, or in those of an `owner`."""
        tables = [self.by_client.get(owner, {})] if owner else self.by_client.values()
        return list(dict.fromkeys(name for table in (self.of_all, *tables) for name in table))

    @property
    def by_column(self) -> dict[str, Factors]:
        """The factors of each column by client; those of all rows are under an empty name."""
        tables = {**self.by_client, "": self.of_all}
        return {
            column: {name: table[column] for name, table in tables.items() if column in table}
            for column in self.columns()
        }

    def factors(self, column: str, owners: Sequence[str]) -> NDArray[np.float64]:
        """Return the factor of a column for rows of these clients."""
        usual = self.of_all.get(column, 1.0)
        return np.array([self.by_client.get(owner, {}).get(column, usual) for owner in owners])

    def check_clients(self, known: Sequence[str] | None, where: str) -> None:
        """Refuse a client that a folder or a column does not name; nobody is `known` if all rows are one client's."""
        for name, table in self.by_client.items():
            if known is None:
                raise InputError(
                    f"[data] convert has a table for '{name}', and {where} does not say which client has each row. "
                    f"Write the factors alone: convert = {toml_text(table)}."
                )
            require(name, known, f"[data] convert: {where}", "client")


def multiplied(cells: Sequence[str], factors: NDArray[np.float64]) -> list[str]:
    """Return the numbers in some cells times their factors, as texts; other cells stay as they are.

    >>> multiplied(["3", "high"], np.array([0.5, 0.5]))
    ['1.5', 'high']
    """
    found = zip(cells, map(finite_number, cells), factors.tolist(), strict=True)
    return [cell if number is None else repr(number * factor) for cell, number, factor in found]
