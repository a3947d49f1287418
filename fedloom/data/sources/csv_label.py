"""A label that is probably the wrong column: a date or an identifier, and which column may be meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedloom.data.class_names import are_dates, identify_rows
from fedloom.data.csv_text import as_number

MOST_VALUES = 5  # different values in a column that is probably the label
MOST_NAMED = 3


def wrong_label(label: str, columns: Mapping[str, Sequence[str]], comma_is_decimal: bool = False) -> str:
    """Say why the values of a label are no classes, and which other column may be the label; or nothing.

    >>> wrong_label("seen", {"seen": ["2024-01-31", "2024-03-01"] * 5, "dead": ["no", "yes"] * 5})[-21:]
    'label dead (no, yes)?'
    """
    values = [as_number(value.strip(), comma_is_decimal) for value in columns[label]]
    names = sorted({value for value in values if value})
    if are_dates(names):
        why = "is a date"
    elif identify_rows(names, len(values)):
        why = "has another value in nearly every row, as an identifier does"
    else:
        return ""
    likely = []
    for name, cells in columns.items():
        found = sorted({cell.strip() for cell in cells if cell.strip()})
        if name != label and 2 <= len(found) <= MOST_VALUES:
            likely.append(f"{name} ({', '.join(found)})")
    meant = f" Is the label {' or '.join(likely[-MOST_NAMED:])}?" if likely else ""
    return f"[data] label = '{label}' {why}, such as {names[0]}: each would be a class of its own.{meant}"
