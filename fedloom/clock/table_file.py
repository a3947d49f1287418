"""Read numbers of clients from a CSV file with their names in the column `client`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedloom.data.csv_text import CsvText, composed
from fedloom.errors import InputError, nearest


def read_columns(file: Path, columns: Sequence[str], names: Mapping[str, int]) -> list[tuple[int, list[float]]]:
    """Return the client and the numbers of each row. A row of an unknown client is an error."""
    found = []
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            table = CsvText.open(text, str(file))
            for name in ("client", *columns):
                if name not in table.header:
                    known = ", ".join(table.header)
                    raise InputError(f"{file} has no column '{name}'. It has: {known}.{nearest(name, table.header)}")
            places = [table.header.index(name) for name in columns]
            first = table.header.index("client")
            for line, row in enumerate(table.rows, start=2):
                if not row:
                    continue
                if len(row) != len(table.header):
                    raise InputError(f"{file}, line {line} has {len(row)} cells of {len(table.header)}. Correct it.")
                name, where = row[first], f"{file}, line {line}"
                name = name if name in names else composed(name)
                if name not in names:
                    raise InputError(f"{where}: there is no client '{name}'.{nearest(name, [*names][:10_000])}")
                found.append((names[name], [_number(row[place], where, table.header[place]) for place in places]))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not a text file in UTF-8: {error.reason}.") from error
    return found


def _number(text: str, where: str, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{where}, column '{column}': a number is needed. Got '{text}' instead.")
    return value
