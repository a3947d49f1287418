"""A table in a text file: one example a line, one column the label, perhaps one the client."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt

from fedloom.data.federation import Dataset
from fedloom.data.sources.archive import PACKED, UNREADABLE
from fedloom.data.sources.base import Source, Task, locate, targets
from fedloom.errors import InputError, nearest

ROWS = 8192  # lines turned into numbers in one go: their text takes ten times the memory
NOT_CSV = (*UNREADABLE, UnicodeDecodeError, csv.Error)


class Csv(Source):
    """A CSV file with a header (or with its `columns` named here); .gz, .xz and .bz2 are read as they are.

    Every other column is a feature, and a number. `missing` maps marks in the file to numbers, or to nan; `fill` is for
    empty cells. What is nan or "mean" is filled by normalisation: a mean over all rows would tell clients about others.
    """

    path: Path
    """The file."""
    label: str
    """The column with the labels."""
    client: str | None = None
    """The column with the client of each row, for `partition = "natural"`."""
    drop: tuple[str, ...] = ()
    """Columns to leave out."""
    missing: dict[str, float] = Field(default_factory=dict)
    """The numbers (or nan) that marks in the file stand for."""
    fill: Literal["error", "zero", "mean"] | float = "error"
    """What empty cells mean: an error, zero, the mean that `normalize` finds, or a number."""
    task: Task = "auto"
    """Whether labels are classes or numbers. `auto` looks at them."""
    columns: tuple[str, ...] = ()
    """The names of the columns, for a file without a header."""
    skip: NonNegativeInt = 0
    """The number of lines to skip after the header."""
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    """The character between columns."""

    def load(self, base: Path) -> Dataset:
        """Labels become classes in order, clients keep the names of their column."""
        path = locate(base, self.path)
        try:
            with PACKED.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline="") as file:
                return self.parse(file)
        except NOT_CSV as error:
            raise InputError(f"The file {path} cannot be read as CSV: {error}.") from None

    def parse(self, file: TextIO) -> Dataset:
        """The examples in an open file; `path` is then only its name in messages."""
        reader = csv.reader(file, delimiter=self.delimiter)
        header = [name.strip() for name in (list(self.columns) or next(reader, []))]
        label, client, features = self._places(header)
        numbers, labels, clients = [], [], []
        next(islice(reader, self.skip, self.skip), None)
        for lines, rows in self._blocks(reader, len(header)):
            cells = list(zip(*rows, strict=True))
            numbers.append(np.column_stack([self._numbers(cells[at], lines, header[at]) for at in features]))
            labels += self._filled(cells[label], lines, header[label])
            if client is not None:
                clients += self._filled(cells[client], lines, header[client])
        if not labels:
            raise InputError(f"The file {self.path} has no examples: a header and at least one line are needed.")
        y, classes = targets(labels, self.task)
        return Dataset(
            x=torch.from_numpy(np.concatenate(numbers)),
            y=y,
            client=None if client is None else np.array(clients),
            classes=classes,
            features=tuple(header[at] for at in features),
            missing=any(math.isnan(value) for value in self._known().values()),
        )

    def _known(self) -> dict[str, float]:
        """What stands for a number in the file, or for one that is missing."""
        if self.fill == "error":
            return dict(self.missing)
        named = {"zero": 0.0, "mean": math.nan}
        return {"": named[self.fill] if isinstance(self.fill, str) else self.fill, **self.missing}

    def _places(self, header: Sequence[str]) -> tuple[int, int | None, list[int]]:
        """Where the label, the client and the features stand in a line."""
        twice = [name for name, count in Counter(header).items() if count > 1]
        if twice:
            raise InputError(f"The file {self.path} has two columns '{twice[0]}': every column needs its own name.")
        special = [self.label, *self.drop, *([] if self.client is None else [self.client])]
        for name in special:
            if name not in header:
                shown = ", ".join(header[:12]) + (", …" if len(header) > 12 else "")
                raise InputError(
                    f"The file {self.path} has no column '{name}'. It has: {shown}.{nearest(name, header)}"
                )
        features = [at for at, name in enumerate(header) if name not in special]
        if not features:
            raise InputError(f"The file {self.path} has no feature columns besides {', '.join(special)}.")
        return header.index(self.label), None if self.client is None else header.index(self.client), features

    def _blocks(self, reader: Any, width: int) -> Iterator[tuple[list[int], list[list[str]]]]:
        """Lines with their numbers in the file, many at a time; blank lines are left out."""
        while block := [(reader.line_num, row) for row in islice(reader, ROWS)]:
            filled = [(line, row) for line, row in block if row]
            for line, row in filled:
                if len(row) != width:
                    raise InputError(
                        f"Line {line} of {self.path} has {len(row)} cells, but there are {width} columns: correct it."
                    )
            if filled:
                yield [line for line, _ in filled], [row for _, row in filled]

    def _numbers(self, cells: Sequence[str], lines: Sequence[int], column: str) -> NDArray[np.float32]:
        known = self._known()
        try:
            values = np.array([known[cell] if cell in known else float(cell) for cell in cells], dtype=np.float64)
        except ValueError:
            values = np.array([_number(cell, known) for cell in cells])
        with np.errstate(over="ignore"):  # too large for float32: refused below like any other infinite number
            numbers = values.astype(np.float32)
        for at in np.flatnonzero(~np.isfinite(numbers)).tolist():
            if cells[at].strip() not in known:
                self._refuse(cells[at], lines[at], column)
        return numbers

    def _refuse(self, cell: str, line: int, column: str) -> None:
        what = f"{cell!r} in column '{column}', which is not a finite number"
        if not cell.strip():
            what = f"an empty cell in column '{column}'"
        raise InputError(f"Line {line} of {self.path} has {what}. {self.advice(cell, column)}")

    def advice(self, cell: str, column: str) -> str:
        """What to do about a cell that is no number."""
        if not cell.strip():
            return f'Set fill = "mean", "zero" or a number, or drop the column: drop = ["{column}"].'
        return (
            f'If it means "missing", set missing = {{ "{cell}" = 0 }}; if the column is not a feature, set '
            f'drop = ["{column}"].'
        )

    def _filled(self, cells: Sequence[str], lines: Sequence[int], column: str) -> list[str]:
        values = [cell.strip() for cell in cells]
        if "" in values:
            raise InputError(
                f"Line {lines[values.index('')]} of {self.path} has an empty cell in column '{column}': "
                "every example needs its label and its client."
            )
        return values


def _number(cell: str, known: dict[str, float]) -> float:
    """The number in a cell, or nan: only the first cell that is wrong is reported, so the rest must not raise."""
    cell = cell.strip()
    try:
        return known[cell] if cell in known else float(cell)
    except ValueError:
        return math.nan
