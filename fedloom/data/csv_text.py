"""Read the text of a CSV file: find the character between columns, check the lines, and turn cells into numbers."""

from __future__ import annotations

import csv
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError

ROWS = 8192  # lines converted to numbers at a time: their text takes ten times the memory
DELIMITERS = (",", ";", "\t", "|")
MONTH = r"(jan|feb|m[aä]r|apr|ma[iy]|ju[nl]|aug|sep|o[ck]t|nov|de[cz])[a-zä]*\.?"
DATE = re.compile(
    r"(\d{4}[-./]\d{1,2}[-./]\d{1,2}|\d{1,2}[-./]\d{1,2}[-./]\d{2,4}"
    rf"|\d{{1,2}}[-./ ]*{MONTH}[-./, ]*\d{{2,4}}|{MONTH}[- ]*\d{{1,2}}[-, ]+\d{{2,4}}"
    rf"|\d{{4}}[-./ ]{MONTH}[-./ ]\d{{1,2}})([ T]\d{{1,2}}:\d{{2}}.*)?",
    re.IGNORECASE,
)
THOUSANDS = re.compile(r"[+-]?\d{1,3},\d{3}")
POINT_OF_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+")
YES_WORDS, NO_WORDS = ("true", "yes", "ja", "oui", "wahr", "vrai"), ("false", "no", "nein", "non", "falsch", "faux")
YES, NO = (*YES_WORDS, "y", "t", "j", "1"), (*NO_WORDS, "n", "f", "0")
YES_OR_NO = ("true", "false", "yes", "no", "y", "n", "ja", "nein", "oui", "non")  # f may be female
Where = Callable[[int], str]  # the place of a cell, for messages


def composed(text: str) -> str:
    """Return a text with ä as one character: some systems write it as a and a mark.

    >>> composed("a\\u0308") == "\\u00e4"
    True
    """
    return unicodedata.normalize("NFC", text)


def not_csv(shown: str, error: Exception, otherwise: str = "") -> InputError:
    """Return the error about a file that cannot be read as CSV; `otherwise` one need not save it as UTF-8."""
    advice = f" Save it as UTF-8 (in Excel: CSV UTF-8){otherwise}." if isinstance(error, UnicodeError) else ""
    return InputError(f"The file {shown} cannot be read as CSV: {error}.{advice}")


@dataclass(frozen=True)
class CsvText:
    """The header of a CSV file, and its rows, which can be read once."""

    shown: str  # the file's name in messages
    header: list[str]
    delimiter: str
    rows: Any  # a csv.reader
    advice: str = "Correct it."

    @staticmethod
    def open(
        text: TextIO,
        shown: str,
        *,
        columns: Sequence[str] = (),
        skip: int = 0,
        delimiter: str | None = None,
        advice: str = "Correct it.",
    ) -> CsvText:
        """Read the header, or take these `columns`. Without a delimiter, the one that gives most columns counts."""
        first = text.readline()
        if not first:
            raise InputError(f"The file {shown} is empty.")
        delimiter = delimiter or max(DELIMITERS, key=lambda one: len(next(csv.reader([first], delimiter=one), [])))
        rows = csv.reader(chain([first], text), delimiter=delimiter)
        header = [composed(name).strip() for name in (list(columns) or next(rows, []))]
        twice = [name for name, count in Counter(header).items() if count > 1]
        if twice:
            raise InputError(f"The file {shown} has two columns '{twice[0]}': every column needs its own name.")
        next(islice(rows, skip, skip), None)
        return CsvText(shown, header, delimiter, rows, advice)

    @property
    def comma_is_decimal(self) -> bool:
        """Whether 3,5 may be a number."""
        return self.delimiter != ","

    def blocks(
        self, misshapen: dict[int, InputError] | None = None
    ) -> Iterator[tuple[list[int], dict[str, tuple[str, ...]]]]:
        """Yield line numbers and cells by column, many lines at a time, without blank lines.

        A line with another number of cells raises an error. With `misshapen`, the error is put there by the line's
        number, and the line is filled up with empty cells, or cut.
        """
        width = len(self.header)
        while block := [(self.rows.line_num, row) for row in islice(self.rows, ROWS)]:
            block = [(line, row) for line, row in block if row]
            for line, row in block:
                if len(row) != width:
                    cells = f"{len(row)} cells, but there are {width} columns"
                    error = InputError(f"Line {line} of {self.shown} has {cells}. {self.advice}")
                    if misshapen is None:
                        raise error
                    misshapen[line] = error
                    row[:] = [*row, *[""] * (width - len(row))][:width]
            if block:
                columns = map(_composed, zip(*(row for _, row in block), strict=True))
                yield [line for line, _ in block], dict(zip(self.header, columns, strict=True))


def _composed(cells: tuple[str, ...]) -> tuple[str, ...]:
    return cells if "".join(cells).isascii() else tuple(map(composed, cells))  # most columns are numbers


def as_float(text: str) -> float:
    """Return the number in a text, or raise `ValueError`. Python takes 1_000 for a number; in a file it is a text."""
    if "_" in text:
        raise ValueError(text)
    return float(text)


def finite_number(text: str) -> float | None:
    """Return the number in a text, or None: infinity and nan do not count, because nan cannot be sorted."""
    try:
        number = as_float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _single(number: float) -> float:
    with np.errstate(over="ignore"):  # too large: an infinite number is no mark
        return float(np.float32(number))


class Marks:
    """Cells that stand for a number, or for a missing one (nan): by their text, or else by the number they are.

    >>> Marks({"-999": 0.0, "?": 1.0}).get("-999.0"), Marks({"-99,9": 0.0}).get("-99.9"), Marks({"?": 1.0}).get("1")
    (0.0, 0.0, None)
    """

    def __init__(self, marks: Mapping[str, float], comma_is_decimal: bool = False) -> None:
        self.by_text, self.comma_is_decimal = marks, comma_is_decimal
        # a data frame has numbers where the training file had decimal commas; but 1,000 may be a thousand
        decimal = {mark: comma_is_decimal or not THOUSANDS.fullmatch(mark) for mark in marks}
        numbers = {mark: finite_number(as_number(mark, decimal[mark])) for mark in marks}
        # in single precision, in which features are kept: a data frame may have it too
        self.by_number = {_single(number): marks[mark] for mark, number in numbers.items() if number is not None}

    def get(self, cell: str) -> float | None:
        """Return what a cell without spaces around it stands for, or None if it is no mark."""
        if cell in self.by_text or not self.by_number:
            return self.by_text.get(cell)
        number = finite_number(as_number(cell, self.comma_is_decimal))
        return None if number is None else self.by_number.get(_single(number))

    def of_number(self, number: float) -> float:
        """Return what a number stands for: itself, if it is no mark."""
        return self.by_number.get(_single(number), number) if self.by_number else number


def numbers(
    cells: Sequence[str],
    column: str,
    where: Where,
    marks: Mapping[str, float],
    comma_is_decimal: bool = False,
    advice: str = "",
    may_be_clients: bool = False,
    factors: NDArray[np.float64] | None = None,
) -> NDArray[np.float32]:
    """Return the numbers in a column's cells. `marks` are texts that stand for a number, or for a missing one (nan).

    `factors` multiply what is written in each row, but not what a mark stands for.
    """
    commas, known = False, Marks(marks, comma_is_decimal)
    try:
        values = np.array(
            [marks[cell] if cell in marks else known.of_number(as_float(cell)) for cell in cells], np.float64
        )
    except ValueError:
        # a column has one kind of decimals: where some cells have a comma, a point is a mistake
        commas = comma_is_decimal and any("," in cell for cell in cells)
        values = np.array([_number(cell.strip(), known, commas) for cell in cells])
    with np.errstate(over="ignore"):  # too large for float32: refused below like any other infinite number
        if factors is not None:
            written = [known.get(cell.strip()) is None for cell in cells]
            values = np.where(written, values * factors, values)
        found = values.astype(np.float32)
    for at in np.flatnonzero(~np.isfinite(found)).tolist():
        cell = cells[at].strip()
        if known.get(cell) is None:
            why = "where other cells have decimal commas" if commas and "." in cell else "which is not a finite number"
            shown = f"{cells[at]!r} in column '{column}', {why}"
            what = shown if cell else f"an empty cell in column '{column}'"
            remedy = _point_advice(cell) if commas and "." in cell else advice
            raise InputError(
                f"{where(at)} has {what}. {remedy or cell_advice(cell, column, may_be_clients and _repeats(cells))}"
            )
    return found


def check_points(cells: Mapping[str, Sequence[str]], numeric: Iterable[str], where: Where) -> None:
    """Refuse 1.576 where other columns have decimal commas: it may be more than a thousand, or less than two."""
    texts = {name: [cell.strip() for cell in cells[name]] for name in numeric}
    with_commas = {name for name, column in texts.items() if any(map(has_decimal_comma, column))}
    for name, column in texts.items() if with_commas else ():
        if name in with_commas:  # a point is a mistake there, which `numbers` names
            continue
        pointed = [at for at, cell in enumerate(column) if "." in cell]
        if pointed and all(POINT_OF_THOUSANDS.fullmatch(column[at]) for at in pointed):
            cell = column[pointed[0]]
            raise InputError(
                f"{where(pointed[0])} has {cell!r} in column '{name}', and other columns have decimal commas. "
                f"{_point_advice(cell)}"
            )


def as_number(cell: str, comma_is_decimal: bool = False) -> str:
    """Return a cell with a decimal point if it is a number with a decimal comma, and otherwise as it is.

    >>> as_number("3,5", True), as_number("3,5"), as_number("B-, R+", True)
    ('3.5', '3,5', 'B-, R+')
    """
    return cell.replace(",", ".") if comma_is_decimal and has_decimal_comma(cell) else cell


def has_decimal_comma(cell: str) -> bool:
    """Whether a cell is a number with a decimal comma, if the comma is not between thousands."""
    return re.fullmatch(r"[+-]?\d*,\d+", cell) is not None


def _point_advice(cell: str) -> str:
    """Say how to write a number with a point in a column with decimal commas; nothing if it is no number."""
    if re.fullmatch(r"[+-]?\d{1,3}(\.\d{3})+", cell):
        whole = cell.replace(".", "")
        decimals = f"{cell.replace('.', ',')} if the point is for decimals, or " if cell.count(".") == 1 else ""
        return f"Write {decimals}{whole} if it is between thousands."
    if re.fullmatch(r"[+-]?\d{1,3}(\.\d{3})+,\d+", cell):
        return f"Write {cell.replace('.', '')} there."
    return f"Write {cell.replace('.', ',')} there." if finite_number(cell) is not None else ""


def _repeats(cells: Sequence[str]) -> bool:
    """Whether a column has few distinct texts, as one with the clients of rows has."""
    return 1 < len(set(cells)) <= len(cells) / 2


def cell_advice(cell: str, column: str, names_clients: bool = False) -> str:
    """Say what to do about a cell that is not a number, in a column that may name the clients of rows."""
    drop = f'drop = ["{column}"]'
    if not cell:
        fill = 'Set fill = "zero" or a number, or fill = "mean" beside normalize = "federated" or "client"'
        return f"{fill}; or drop the column: {drop}."
    if DATE.fullmatch(cell):
        return (
            "It looks like a date, and models take numbers. Replace the column by what the date means, such as an age "
            f"in years or days since admission, or leave it out: {drop}."
        )
    if re.fullmatch(r"[+-]?[\d.,]+ ?%", cell):
        return f"Write it without the % sign, as a number, or leave the column out: {drop}."
    if re.fullmatch(r"[+-]?\d{1,3}([, _'\u00a0\u202f]\d{3})+(\.\d+)?", cell):
        return f"It has separators between thousands: write it without them, or leave the column out: {drop}."
    if has_decimal_comma(cell):
        return f"Write {cell.replace(',', '.')}, with a decimal point, or leave the column out: {drop}."
    categorical = f'categorical = ["{column}"]'
    if cell.lower() in YES_OR_NO:
        return f"It looks like yes or no: set {categorical}, or leave the column out: {drop}."
    owner = f'If it names the client of each row, set client = "{column}". ' if names_clients else ""
    return (
        f'{owner}If it means "missing", set missing = {{ "{cell}" = nan }} beside normalize, or a number in place of '
        f"nan; if the column holds categories, set {categorical}; if it says which rows belong together, such as those "
        f'of one patient, set group = "{column}"; if the column is not a feature, set {drop}.'
    )


def column_advice(column: str, cells: Sequence[str], marks: Mapping[str, float], identifies: bool) -> str:
    """Say in a few words what to do about a column with cells that are not numbers, by what they look like.

    >>> column_advice("sex", ["f", "m", "f", "f"], {}, identifies=False)
    'categories: categorical = ["sex"]'
    """
    known, filled = Marks(marks), [cell.strip() for cell in cells if cell.strip()]
    texts = [cell for cell in filled if known.get(cell) is None and finite_number(cell) is None]
    drop, has_gaps = f'drop = ["{column}"]', len(filled) < len(cells) and "" not in marks
    if not texts:
        return 'empty cells: fill = "mean", "zero" or a number' if has_gaps else "numbers with points and commas"
    if DATE.fullmatch(texts[0]):
        return f"dates: an age or a number of days in their place, or {drop}"
    if identifies:
        return f'an identifier: {drop}, or group = "{column}" if rows of one patient repeat it'
    also = ", and fill for its empty cells" if has_gaps else ""
    if re.fullmatch(r"[+-]?\d[\d., _'%\u00a0\u202f]*", texts[0]):
        return f"numbers with commas, separators or %: write them as 1234.5{also}"
    if 2 * len(texts) < len(filled):
        return f'a mark for missing values: missing = {{ "{texts[0]}" = nan }}, or a mistake{also}'
    if _repeats(texts) or texts[0].lower() in YES_OR_NO:
        return f'categories: categorical = ["{column}"]{also}'
    return f'texts: {drop}, or categorical = ["{column}"] if they repeat'


def _number(cell: str, marks: Marks, comma_is_decimal: bool) -> float:
    """Return the number in a cell, or nan: the caller reports the first wrong cell, so the others must not raise."""
    meant = marks.get(cell)
    if meant is not None:
        return meant
    if comma_is_decimal and "." in cell:
        return math.nan
    try:
        return as_float(as_number(cell, comma_is_decimal))
    except ValueError:
        return math.nan
