"""Preprocessing: how a row becomes a model's input. It is fitted with the data, kept with the run, and exported."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedloom.data.csv_text import NO, YES, Marks, Where, as_number, cell_advice, numbers
from fedloom.data.csv_text import finite_number as finite_number
from fedloom.data.words import Vocabulary, clean, words
from fedloom.errors import InputError, nearest, respelt
from fedloom.record import Record

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_STATISTICS = 1_000_000  # numbers that a file holds, where every client has its own statistics
Numbers = tuple[float, ...]


class Column(Record):
    """A column of a table that is a feature: numbers, or categories in their order."""

    name: str
    """The column's name."""
    categories: tuple[str, ...] = ()
    """The categories; none if the column holds numbers."""
    embedded: bool = False
    """One feature with the category's number, for a model that embeds it, instead of one feature for each category."""

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features that the column becomes."""
        if not self.categories or self.embedded:
            return (self.name,)
        return tuple(f"{self.name}={category}" for category in self.categories)

    def codes(self, cells: Sequence[str], where: Where, marks: Mapping[str, float]) -> NDArray[np.float32]:
        """Return the features of cells with categories: examples × features."""
        places = {category: place for place, category in enumerate(self.categories)}
        table = np.eye(len(places), dtype=np.float32)
        if self.embedded:
            table = np.arange(len(places), dtype=np.float32)[:, None]
        rows, known = [], Marks(marks)
        for at, cell in enumerate(cells):
            place, meant = places.get(category(cell)), known.get(cell.strip())
            if place is None and not cell.strip() and "" not in marks:
                raise InputError(f"{where(at)} has an empty cell in column '{self.name}'. {cell_advice('', self.name)}")
            if place is None and meant is None:
                shown = ", ".join(self.categories[:12]) + (", …" if len(places) > 12 else "")
                raise InputError(
                    f"{where(at)} has {cell!r} in column '{self.name}', whose categories are {shown}."
                    f"{_same_answer(cell, self.categories) or nearest(cell, self.categories)}{self.if_missing(marks)}"
                )
            if place is None and self.embedded:
                raise InputError(
                    f"{where(at)} has a missing value in column '{self.name}', which is embedded: the number of a "
                    "category has no mean, and 0 is another category. Write a category of its own there, such as "
                    "'unknown', or leave the column out of 'embed'."
                )
            rows.append(table[place] if place is not None else np.full_like(table[0], meant))
        return np.stack(rows)

    def if_missing(self, marks: Mapping[str, float]) -> str:
        """Say how to write a missing category: a text such as NA may stand for one."""
        how = "leave the cell empty" if "" in marks else _as_missing(marks)
        return f" If the value is missing, {how}." if how and not self.embedded else ""


def _as_missing(marks: Mapping[str, float]) -> str:
    """Say what a cell with a missing value (nan) has, or nothing if there are no such cells."""
    gaps = [mark for mark, value in marks.items() if math.isnan(value)]
    return ("leave the cell empty" if "" in gaps else f"write {gaps[0]}") if gaps else ""


def _spelt_as(missing: Sequence[str], names: Collection[str]) -> str:
    """Return a hint for columns that are missing and have another name in the table, or an empty string."""
    other = {name: found for name in missing if (found := respelt(name, names))}
    if len(other) < 2:
        return next((hint for name in (*other, *missing) if (hint := nearest(name, names))), "")
    shown = ", ".join(f"'{name}' instead of '{found}'" for name, found in [*other.items()][:12])
    more = f" and {len(other) - 12} more" if len(other) > 12 else ""
    return f" Spell names as in the training data, also their capitals and spaces: {shown}{more}."


def _same_answer(cell: str, known: Sequence[str]) -> str:
    """Return a hint for another word for yes or no, such as 1 where the categories are True and False."""
    for words_for in (YES, NO):
        meant = [one for one in known if one.casefold() in words_for]
        if cell.strip().casefold() in words_for and meant:
            return f" Did you mean '{meant[0]}'?"
    return ""


class JsonFile(Record):
    """A record that is kept in a JSON file."""

    what: ClassVar[str]  # in messages
    if_any: ClassVar[tuple[str, ...]] = ()  # keys that earlier versions do not know: written only if they say something

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{path} cannot be read as {cls.what}: {error}") from None

    def write(self, path: Path) -> None:
        """Write a JSON file. Numbers that JSON lacks are texts in it: "nan" and "inf"."""
        values = _plain(self.model_dump())
        for name in self.if_any:
            if not values[name]:
                del values[name]
        path.write_text(json.dumps(values, indent=1, ensure_ascii=False), encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Preprocessing(JsonFile):
    """What turns a new example into a model's input, and the model's output into an answer."""

    what = "preprocessing"
    if_any = ("optional", "untrained", "doubts", "convert", "bounds")

    columns: tuple[Column, ...] = ()
    """The columns of a table that are features, in order; none if examples are not rows of a table."""
    optional: tuple[str, ...] = ()
    """Columns that a table may lack: they count as empty there."""
    marks: dict[str, float] = Field(default_factory=dict)
    """Cells that stand for a number, or for a missing value (nan)."""
    missing: bool = False
    """Whether examples may have missing values (nan), which become the mean."""
    untrained: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Categories that no training row had, by column: a model has learnt nothing about them."""
    shape: tuple[int, ...] = ()
    """The shape of an example."""
    scale: float = 1.0
    """What whole-number features are multiplied by."""
    mean: Numbers = ()
    """The mean of every feature, which is subtracted; none without normalisation."""
    std: Numbers = ()
    """The standard deviation of every feature, which divides it."""
    bounds: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """The bounds of features, if the middle and half of the width of these are the mean and the deviation above."""
    clients: dict[str, tuple[Numbers, Numbers]] = Field(default_factory=dict)
    """The mean and standard deviation of every feature at each client, if clients normalise by their own."""
    reach: tuple[Numbers, Numbers] | None = None
    """How far the training values of a table are from the mean, in whole standard deviations below and above it. None
    where sites agreed: the largest value is about one patient, so it stays at its site.
    """
    label: tuple[str, ...] = ()
    """The columns with the label."""
    classes: tuple[str, ...] = ()
    """The names of the classes; none if labels are numbers."""
    target: tuple[float, float] | None = None
    """The mean and standard deviation by which numeric labels are scaled."""
    doubts: tuple[str, ...] = ()
    """What was probably a mistake in the summaries that sites agreed with: the card of a model says it."""
    convert: dict[str, dict[str, float]] = Field(default_factory=dict)
    """The factors that columns were multiplied by when they were read, by client; those of all rows have no name."""
    words: int | None = None
    """The number of words in an example, if examples are texts; the classes are then the vocabulary."""
    symbols: bool = True
    """Whether punctuation counts as words."""

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, if examples are rows of a table."""
        return tuple(feature for column in self.columns for feature in column.features)

    @property
    def sha256(self) -> str:
        """A hash of how rows of a table become features; empty if examples are not rows of a table."""
        if not self.columns:
            return ""
        made = self.model_dump(include={"columns", "mean", "std", "target"})
        made["by client"] = bool(self.clients)
        return hashlib.sha256(json.dumps(made).encode()).hexdigest()

    def as_used(self, sha256: str) -> Preprocessing | None:
        """Return the part of this that sites with such a hash use: with or without statistics and scaled labels."""
        parts = (
            self,
            self.replace(target=None),
            self.replace(mean=(), std=()),
            self.replace(mean=(), std=(), target=None),
        )
        return next((part for part in parts if part.sha256 == sha256), None)

    @property
    def units(self) -> list[str]:
        """What somebody who predicts must know about units: a sentence for each column that was multiplied."""
        said = []
        for column, factors in self.convert.items():
            parts = (f"by {factor:g} {f'at {name}' if name else 'in all rows'}" for name, factor in factors.items())
            follows = "the model takes the unit that this gave, and nothing multiplies new values"
            if column in self.label:
                follows = "predictions are in the unit that this gave"
            said.append(f"{column} was multiplied when the training data was read ({', '.join(parts)}): {follows}.")
        return said

    @property
    def has_training_means(self) -> bool:
        """Whether `mean` and `std` are those of training examples, and not made of bounds."""
        return bool(self.mean) and not self.bounds

    def stands_for_missing(self, feature: str) -> str:
        """Say what the model gets where a feature is missing."""
        if not self.bounds:
            return "the mean of its training data"
        return "the middle of its bounds" if feature in self.bounds else "0"

    @property
    def untouched(self) -> list[int]:
        """The places of features that normalisation leaves alone: they are numbers of categories."""
        embedded = [column.embedded for column in self.columns for _ in column.features]
        return [place for place, each in enumerate(embedded) if each]

    def statistics(self, client: str | None = None) -> tuple[Tensor, Tensor] | None:
        """Return mean and standard deviation of every feature; None if features stay as they are."""
        if self.clients and client not in self.clients:
            known = ", ".join(list(self.clients)[:10])
            raise InputError(
                'This run has normalize = "client": every client scales features by its own statistics. Say whose to '
                f"use. Known: {known}.{nearest(str(client), self.clients)}"
            )
        mean, std = self.clients[str(client)] if self.clients else (self.mean, self.std)
        if not mean:
            return None
        found = (torch.tensor(values, dtype=torch.float64).reshape(self.shape) for values in (mean, std))
        return next(found), next(found)

    def encode(self, table: Mapping[str, Sequence[str]], where: Where, comma_is_decimal: bool = False) -> Tensor:
        """Return the features of a table's rows, before normalisation. Missing values are nan."""
        if self.words is not None:
            self.check_columns(table)
            return self._tokens(table["text"])
        table = self.completed(table)
        parts = []
        advice = "This model takes numbers there." if self.marks else "This model takes no missing values."
        if how := _as_missing(self.marks):
            advice = f"This model takes numbers there: {how} if the value is missing."
        for column in self.columns:
            cells = table[column.name]
            if column.categories:
                texts = [as_number(cell.strip(), comma_is_decimal) for cell in cells]
                self._check_trained(column, texts, where)
                parts.append(column.codes(texts, where, self.marks))
            else:
                parts.append(numbers(cells, column.name, where, self.marks, comma_is_decimal, advice)[:, None])
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def _check_trained(self, column: Column, cells: Sequence[str], where: Where) -> None:
        """Refuse a category that only rows of validation and test splits had."""
        never = self.untrained.get(column.name, ())
        for at, cell in enumerate(cells) if never else ():
            if category(cell) in never:
                known = [one for one in column.categories if one not in never]
                raise InputError(
                    f"{where(at)} has {cell!r} in column '{column.name}', which no training row had, so the model has "
                    f"learnt nothing about it. It knows {', '.join(known[:12])}{', …' if len(known) > 12 else ''}."
                    f"{nearest(cell, known)}{column.if_missing(self.marks)}"
                )

    def marked(self, x: Tensor) -> Tensor:
        """Return features that were never text with what their numbers stand for, such as nan for -999."""
        meant = Marks(self.marks).by_number
        if not self.columns or not meant:
            return x
        numeric = torch.tensor([not column.categories for column in self.columns for _ in column.features])
        found = x.float()
        for number, value in meant.items():
            found = torch.where(numeric & (x == number), value, found)
        return found

    def completed(self, table: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
        """Return a table with empty cells in the optional columns that it lacks."""
        lacking = self.check_columns(table)
        rows = len(next(iter(table.values()), ()))
        return {**table, **{name: [""] * rows for name in lacking}} if lacking else table

    def check_columns(self, names: Collection[str]) -> list[str]:
        """Refuse a table without the columns that the model takes; return the optional ones that it lacks."""
        if self.words is not None:
            if "text" not in names:
                raise InputError("This model continues texts: the table needs a column 'text'.")
            return []
        if not self.columns:
            raise InputError(
                f"This model takes examples of shape {list(self.shape)}, not rows of a table with named columns: "
                "use predict(array) in Python."
            )
        lacking = [column.name for column in self.columns if column.name not in names]
        missing = [name for name in lacking if name not in self.optional or respelt(name, names)]
        if missing:
            what = f"columns {', '.join(missing)}" if len(missing) > 1 else f"column {missing[0]}"
            features = {column.name for column in self.columns}
            others = [name for name in names if name not in features]  # a feature that is there is not meant
            raise InputError(f"The table lacks the {what}.{_spelt_as(missing, others)}")
        return lacking

    def lacked(self, names: Iterable[str]) -> Iterator[str]:
        """Yield a sentence for each column that a table lacks; a missing value (nan) gets a caution of its own."""
        if not math.isnan(value := self.marks.get("", math.nan)):
            yield from (f"The table lacks the column {name}: it counts as {value:g} in all rows." for name in names)

    def _tokens(self, texts: Sequence[str]) -> Tensor:
        """Return the numbers of the last words of each text, with padding in front."""
        assert self.words is not None
        vocabulary, rows = Vocabulary(self.classes), []
        for text in texts:
            known = vocabulary.numbers(words(clean(text), self.symbols))[1 - self.words :]
            rows.append([*[vocabulary.padding] * (self.words - len(known)), *known])
        return torch.tensor(rows, dtype=torch.int32)


def category(cell: str) -> str:
    """Return the category in a cell: its text, or its number, so that "1" and "1.0" are one category.

    >>> category(" 1.0"), category("I10"), category("INF")
    ('1', 'I10', 'INF')
    """
    number = finite_number(cell)
    return cell.strip() if number is None else f"{number:.17g}"


def categories(cells: Iterable[str], marks: Mapping[str, float]) -> tuple[str, ...]:
    """Return the distinct categories in some cells: first numbers, in numeric order, then texts.

    >>> categories(["b", "10", "9", "", "b"], {"": 0.0})
    ('9', '10', 'b')
    """
    known = Marks(marks)
    found = {category(cell) for cell in cells if cell.strip() and known.get(cell.strip()) is None}
    return tuple(sorted(found, key=numbers_first))


def numbers_first(name: str) -> tuple[bool, float, str]:
    """Return a key that sorts names: first numbers, in numeric order, then texts."""
    number = finite_number(name)
    return (True, 0.0, name) if number is None else (False, number, name)


def columns_named(names: Iterable[Any]) -> tuple[Column, ...]:
    """Return columns of numbers with these names."""
    return tuple(Column(name=str(name)) for name in names)


def shown_marks(marks: Mapping[str, float]) -> list[str]:
    """Return what cells mean, as text: nan equals nothing, not even itself."""
    return sorted(f"'{mark}' = {value:g}" if mark else f"{value:g} for empty cells" for mark, value in marks.items())
