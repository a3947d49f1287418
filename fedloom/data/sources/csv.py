"""A table in a text file: one example per line, one column for the label, optionally one for the client."""

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
from fedloom.data.sources.archive import NOT_TEXT, open_text
from fedloom.data.sources.base import Source, Task, locate, require, targets
from fedloom.errors import InputError

ROWS = 8192  # lines converted to numbers at a time: their text takes ten times the memory


class Csv(Source):
    """A CSV file with a header, or without one if you name its `columns`; .gz, .xz and .bz2 are decompressed.

    Every column other than the label and the client is a feature and must hold numbers. `missing` maps marks in the
    file to numbers or to nan; `fill` is the value of empty cells. Normalisation fills what is nan or "mean": a mean
    over all rows would tell clients about each other.
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
        """Read the file. Labels become classes in order, clients keep the names in their column."""
        path = locate(base, self.path)
        return self.parse(path, path.name)

    def parse(self, file: Any, name: str, advice: str = "") -> Dataset:
        """Read the examples of a path or an open binary file called `name`; `path` is used in messages only.

        `advice` says what to do about a wrong line, if settings do not help.
        """
        try:
            with open_text(file, name) as text:
                return self._parse(text, advice)
        except (*NOT_TEXT, csv.Error) as error:
            raise InputError(f"The file {self.path} cannot be read as CSV: {error}.") from None

    def _advice(self, cell: str, column: str) -> str:
        if not cell.strip():
            return f'Set fill = "mean", "zero" or a number, or drop the column: drop = ["{column}"].'
        return (
            f'If it means "missing", set missing = {{ "{cell}" = 0 }}; if the column is not a feature, set '
            f'drop = ["{column}"].'
        )

    def _parse(self, file: TextIO, advice: str) -> Dataset:
        reader = csv.reader(file, delimiter=self.delimiter)
        header = [name.strip() for name in (list(self.columns) or next(reader, []))]
        features = self._features(header)
        numbers, labels, clients = [], list[str](), list[str]()
        next(islice(reader, self.skip, self.skip), None)
        for lines, rows in self._blocks(reader, len(header), advice or "Correct it."):
            cells = dict(zip(header, zip(*rows, strict=True), strict=True))
            numbers.append(np.column_stack([self._numbers(cells[name], lines, name, advice) for name in features]))
            labels += self._texts(cells[self.label], lines, self.label)
            if self.client is not None:
                clients += self._texts(cells[self.client], lines, self.client)
        if not labels:
            raise InputError(f"The file {self.path} has no examples: add at least one line after the header.")
        y, classes = targets(labels, self.task)
        return Dataset(
            x=torch.from_numpy(np.concatenate(numbers)),
            y=y,
            client=None if self.client is None else np.array(clients),
            classes=classes,
            features=tuple(features),
            missing=any(math.isnan(value) for value in self._known().values()),
        )

    def _known(self) -> dict[str, float]:
        """Return the texts that stand for a number, or for a missing one (nan)."""
        if self.fill == "error":
            return dict(self.missing)
        named = {"zero": 0.0, "mean": math.nan}
        return {"": named[self.fill] if isinstance(self.fill, str) else self.fill, **self.missing}

    def _features(self, header: Sequence[str]) -> list[str]:
        """Return the names of the feature columns."""
        twice = [name for name, count in Counter(header).items() if count > 1]
        if twice:
            raise InputError(f"The file {self.path} has two columns '{twice[0]}': every column needs its own name.")
        special = [self.label, *self.drop, *([] if self.client is None else [self.client])]
        for name in special:
            require(name, header, f"The file {self.path}", "column")
        features = [name for name in header if name not in special]
        if not features:
            raise InputError(f"The file {self.path} has no feature columns besides {', '.join(special)}.")
        return features

    def _blocks(self, reader: Any, width: int, advice: str) -> Iterator[tuple[list[int], list[list[str]]]]:
        """Yield line numbers and lines, many at a time, without blank lines."""
        while block := [(reader.line_num, row) for row in islice(reader, ROWS)]:
            block = [(line, row) for line, row in block if row]
            for line, row in block:
                if len(row) != width:
                    raise InputError(
                        f"Line {line} of {self.path} has {len(row)} cells, but there are {width} columns. {advice}"
                    )
            if block:
                yield [line for line, _ in block], [row for _, row in block]

    def _numbers(self, cells: Sequence[str], lines: Sequence[int], column: str, advice: str) -> NDArray[np.float32]:
        known = self._known()
        try:
            values = np.array([known[cell] if cell in known else float(cell) for cell in cells], dtype=np.float64)
        except ValueError:
            values = np.array([_number(cell.strip(), known) for cell in cells])
        with np.errstate(over="ignore"):  # too large for float32: refused below like any other infinite number
            numbers = values.astype(np.float32)
        for at in np.flatnonzero(~np.isfinite(numbers)).tolist():
            cell = cells[at]
            if cell.strip() not in known:
                shown = f"{cell!r} in column '{column}', which is not a finite number"
                what = shown if cell.strip() else f"an empty cell in column '{column}'"
                advice = advice or self._advice(cell, column)
                raise InputError(f"Line {lines[at]} of {self.path} has {what}. {advice}")
        return numbers

    def _texts(self, cells: Sequence[str], lines: Sequence[int], column: str) -> list[str]:
        values = [cell.strip() for cell in cells]
        if "" in values:
            raise InputError(
                f"Line {lines[values.index('')]} of {self.path} has an empty cell in column '{column}': "
                "every example needs its label and its client."
            )
        return values


def _number(cell: str, known: dict[str, float]) -> float:
    """Return the number in a cell, or nan: the caller reports the first wrong cell, so the others must not raise."""
    try:
        return known[cell] if cell in known else float(cell)
    except ValueError:
        return math.nan
