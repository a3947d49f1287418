"""The rows of one table, or of several with the same columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError, nearest


@dataclass
class Rows:
    """The rows of one file, or of several: numbers of the numeric columns, and the texts of the others by column."""

    shown: str
    features: list[str]
    texts: dict[str, list[str]]
    header: Sequence[str]  # all columns of the file, or of any of the files
    numbers: list[NDArray[np.float32]] = field(default_factory=list)  # in blocks
    lines: list[int] = field(default_factory=list)
    files: list[tuple[int, str]] = field(default_factory=list)  # where the rows of each file begin, if several

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def numeric(self) -> list[str]:
        """The columns of `numbers`."""
        return [name for name in self.features if name not in self.texts]

    def with_empty(self, names: Sequence[str], marks: Mapping[str, float]) -> Rows:
        """Return the same rows with these columns: those that the file lacks are empty."""
        lacking = [name for name in names if name not in self.header]
        if not lacking:
            return self
        numeric = [name for name in lacking if name not in self.texts]
        blocks = [np.pad(block, ((0, 0), (0, len(numeric))), constant_values=marks[""]) for block in self.numbers]
        return replace(self, features=[*self.features, *lacking], numbers=blocks)

    def where(self, at: int) -> str:
        shown = next((name for begin, name in reversed(self.files) if begin <= at), self.shown)
        return f"Line {self.lines[at]} of {shown}"


def _other_columns(differ: list[str], part: Rows, first: Rows) -> InputError:
    """Say which columns only one of two files has."""
    has, lacks = (part, first) if differ[0] in part.features else (first, part)
    spelt = nearest(differ[0], [name for name in lacks.features if name in differ])
    names = json.dumps(differ, ensure_ascii=False)
    remedy = (
        f'If it counts as empty there, set optional = {names} and fill = "mean" or a number. Or leave it out: '
        f"drop = {names}."
    )
    return InputError(
        f"{lacks.shown} has no column '{differ[0]}', and {has.shown} has one. All files need the same columns."
        + (f"{spelt} Then give both the same name." if spelt else f" {remedy}")
    )


def joined(parts: list[Rows]) -> Rows:
    """Put the rows of several files together. Every file has the same feature columns; the order is the first one's."""
    first, header = parts[0], list(dict.fromkeys(name for part in parts for name in part.header))
    found = Rows(first.shown, first.features, {name: [] for name in first.texts}, header)
    for part in parts:
        if differ := sorted({*part.features} ^ {*first.features}):
            raise _other_columns(differ, part, first)
        found.files.append((len(found), part.shown))
        order = [part.numeric.index(name) for name in first.numeric]
        found.numbers += [block[:, order] for block in part.numbers]
        found.lines += part.lines
        for name, texts in found.texts.items():
            texts += part.texts[name]
    return found
