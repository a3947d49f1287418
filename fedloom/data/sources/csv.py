"""Tables in text files: one example per line, one column for the label, and one for the client or a file for each."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, field_validator, model_validator
from torch import Tensor

from fedloom.data.categories import rare_categories
from fedloom.data.csv_text import (
    CsvText,
    as_number,
    check_points,
    column_advice,
    composed,
    finite_number,
    not_csv,
    numbers,
)
from fedloom.data.federation import Dataset
from fedloom.data.plausibility import identifies, marks_gaps
from fedloom.data.preprocessing import Column, Preprocessing, categories, category, shown_marks
from fedloom.data.sources.archive import NOT_TEXT, known_encoding, open_text, visible
from fedloom.data.sources.base import Source, Task, locate, require, targets
from fedloom.data.sources.csv_folder import TABLE, clients_of, copies, instead, not_read
from fedloom.data.sources.csv_label import wrong_label
from fedloom.data.sources.csv_rows import Rows, joined
from fedloom.data.sources.csv_units import Units, checked, multiplied
from fedloom.data.split import SPLITS
from fedloom.errors import InputError, nearest, respelt

SPLIT_NAMES = {  # what the cells of a split column may say
    **dict.fromkeys(("train", "training"), 0),
    **dict.fromkeys(("validation", "val", "valid", "dev"), 1),
    **dict.fromkeys(("test", "testing"), 2),
}
PERSON = re.compile(  # also in German; visits and cases are counts
    r"patient|person|subject|participant|proband|(^|[_ -])((p?id|mrn)$|(fall|case|visit)(?!s))|(nr\.?|nummer)$",
    re.IGNORECASE,
)
IDENTIFIER = re.compile(  # narrower, for features: patient_age is none
    r"(patient|person|subject|participant|proband|fall|case|visit)[_ -]?(id|mrn|no|code|number)?$"
    r"|(^|[_ -])(p?id|mrn)$|(nr\.?|nummer)$",
    re.IGNORECASE,
)
COLUMN_KEYS = ("label", "client", "drop", "optional", "columns", "categorical", "embed", "split_column", "group")
AGREED_KEYS = ("categorical", "embed", "fill", "missing", "task")  # a file that sites agreed on decides them
Names = Annotated[tuple[str, ...], Field(min_length=1)]


class Csv(Source):
    """A CSV file with a header, or without one if you name its `columns`; .gz, .xz and .bz2 are decompressed.

    Every column other than the label and the client is a feature: a number, or a category if `categorical` names the
    column. `missing` maps marks in the file to numbers or to nan; `fill` is the value of empty cells. Normalisation
    fills what is nan or "mean": a mean over all rows would tell clients about each other. In a file whose columns are
    separated by semicolons, 3,5 is a number.
    """

    path: Path
    """The file, or a folder with one file for each client: the file's name is the client's."""
    label: str | Names
    """The column with the labels, or several columns of numbers."""
    client: str | None = None
    """The column with the client of each row, for `partition = "natural"`."""
    drop: tuple[str, ...] = ()
    """Columns to leave out."""
    optional: Names | None = None
    """Columns that some files, or some sites, lack. They count as empty there, so `fill` says what they become."""
    missing: dict[str, float] = Field(default_factory=dict)
    """The numbers (or nan) that marks in the file stand for."""
    fill: Literal["error", "zero", "mean"] | float = "error"
    """What empty cells mean: an error, zero, the mean that `normalize` finds, or a number."""
    convert: dict[str, dict[str, float]] | dict[str, float] | None = None
    """Factors by which numbers in columns are multiplied on reading, because their unit differs:
    `{ creatinine = 0.0113 }` in all rows. In a folder, or with `client`, also in those of one client:
    `{ essen = { creatinine = 0.0113 } }`. `fedloom predict` multiplies nothing.
    """
    task: Task = "auto"
    """Whether labels are classes or numbers. `auto` looks at them, and at the loss."""
    columns: tuple[str, ...] = ()
    """The names of the columns, for a file without a header."""
    skip: NonNegativeInt = 0
    """The number of lines to skip after the header."""
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    """The character between columns. With a comma, a header with semicolons, tabs or | is recognised too."""
    categorical: Names | dict[str, Names] | None = None
    """Columns with categories. A table also lists the categories of each column; others are then refused."""
    embed: Names | None = None
    """The categorical columns that become one feature, the category's number, for a model that embeds it. The others
    become one feature of 0 or 1 for each category.
    """
    split_column: str | None = None
    """The column that says which split each row belongs to: train, validation or test."""
    group: str | None = None
    """The column that says which rows belong together, such as those of one patient: they stay in one split."""
    encoding: str | None = None
    """The encoding of the text, such as `latin-1` or `utf-16`; without it, UTF-8. Beside a file in `latin-1`, others
    may be in UTF-8: they are recognised. So is UTF-16 if the file begins with its mark, as Excel writes it.
    """

    @model_validator(mode="after")
    def _one_rule(self) -> Csv:
        if self.group is not None and self.split_column is not None:
            raise InputError("[data] has both group and split_column: the column says the splits, so leave out group.")
        for name in self.optional or ():
            others = {"drop": self.drop, "embed": self.embed or (), "label": self._labels, "client": self._about_rows}
            if both := [key for key, names in others.items() if name in names]:
                why = {"drop": "it is left out", "embed": "the number of a category cannot be missing"}
                raise InputError(
                    f"[data] optional has '{name}', which is also in {both[0]}: "
                    f"{why.get(both[0], 'every row needs it')}. Take it out of one of them."
                )
        return self

    @field_validator("optional", mode="before")
    @classmethod
    def _optional(cls, value: Any) -> Any:
        return None if value in ([], ()) else value  # --set data.optional=[] takes back what a file says

    @field_validator("convert", mode="before")
    @classmethod
    def _convert(cls, value: Any) -> Any:
        return checked(value)

    @field_validator(*COLUMN_KEYS, "missing", "convert")
    @classmethod
    def _as_read(cls, value: Any) -> Any:
        """Compose names and marks as those in files are."""
        if isinstance(value, dict):
            return {composed(name): cls._as_read(one) for name, one in value.items()}
        if isinstance(value, tuple):
            return tuple(map(composed, value))
        return composed(value) if isinstance(value, str) else value

    @field_validator("encoding")
    @classmethod
    def _encoding(cls, value: str | None) -> str | None:
        return known_encoding(value, f"[data] encoding = '{value}'")

    def load(self, base: Path, at_site: bool = False) -> Dataset:
        """Read the file or files. Labels become classes in order, clients keep the names in their column or files.

        `at_site`, no file here needs to have the columns in `optional` and `drop`, which other sites have.
        """
        path = locate(base, self.path)
        if not path.is_dir():
            return self.parse(path, path.name, at_site=at_site)
        found = [file for file in sorted(path.iterdir()) if visible(file.name)]
        files = [file for file in found if TABLE.fullmatch(file.name)]
        if not files:
            raise InputError(f"The folder {path} has no CSV files: it needs one for each client. {instead(found)}")
        if self.client is not None:
            raise InputError(
                f"{path} is a folder with one file for each client, so leave out client = '{self.client}'."
            )
        names = clients_of(files)
        self._units.check_clients(names, f"The folder {path}")
        parts = [
            self._read(file, file.name, f"{self.path / file.name}", alone=False, owner=name)
            for file, name in zip(files, names, strict=True)
        ]
        known = sorted({column for part in parts for column in part.header})
        for name in () if at_site else (*self.drop, *(self.optional or ())):  # some files may lack these
            require(name, known, f"The folder {path}", "column")
        empty = [name for name in self.optional or () if name in known]
        owner = np.repeat(names, [len(part) for part in parts])
        made = self._dataset(joined([part.with_empty(empty, self._marks()) for part in parts]), owner)
        return replace(made, cautions=(*made.cautions, *copies(files), *not_read(path, found)))

    def as_agreed(self, agreed: Preprocessing) -> Csv:
        """Return a source with the categories, missing values and kind of label that several sites agreed on."""
        listed = {column.name: column.categories for column in agreed.columns if column.categories}
        embedded = tuple(column.name for column in agreed.columns if column.embedded)
        task = "classification" if agreed.classes else "regression"
        for keys, here, there in (
            ({"label"}, self._labels, agreed.label or self._labels),
            ({"categorical"}, sorted(self._categorical), sorted(listed)),
            ({"embed"}, sorted(self.embed or ()), sorted(embedded)),
            ({"fill", "missing"}, shown_marks(self._marks()), shown_marks(agreed.marks)),
            ({"task"}, [self.task.replace("auto", task)], [task]),
        ):
            given = " and ".join(sorted(keys & self.model_fields_set))
            if given and here != there:
                means, agreed_on = (", ".join(each) or "nothing" for each in (here, there))
                mean = "mean" if " and " in given else "means"
                differs = f"[data] {given} {mean} {means} here, and the agreed file says {agreed_on}."
                meant = _misspelt(here, there) if given in ("label", "categorical", "embed") else ""
                if given == "label" and meant:  # the sites do agree
                    raise InputError(f"{differs}{meant}")
                remedy = "" if given == "label" else f"Leave out {given}, which the file decides, or a"
                raise InputError(
                    f"{differs}{meant} {remedy or 'A'}gree again: `fedloom data summarize` at each site, then "
                    "`fedloom data agree`."
                )
        marks = {"fill": "error", "missing": agreed.marks}
        decided = {"categorical": listed or None, "embed": embedded or None, **marks, "task": task}
        assert {*decided} == {*AGREED_KEYS}
        return self.model_copy(update=decided)

    def parse(self, file: Any, name: str, advice: str = "", at_site: bool = False) -> Dataset:
        """Read the examples of a path or an open binary file called `name`; `path` is used in messages only.

        `advice` says what to do about a wrong line, if settings do not help.
        """
        rows = self._read(file, name, str(self.path), advice, alone=not at_site)
        client = None if self.client is None else rows.texts[self.client]
        self._units.check_clients(None if client is None else sorted({*client}), f"The file {self.path}")
        return self._dataset(rows, None if client is None else np.array(client))

    def _read(self, file: Any, name: str, shown: str, advice: str = "", *, alone: bool, owner: str = "") -> Rows:
        """Read a file, perhaps of one client, its `owner`.

        If it is not `alone`, other files or sites may have columns that it lacks.
        """
        given = None if self.delimiter == "," else self.delimiter
        settings = {"columns": self.columns, "skip": self.skip, "delimiter": given}
        try:
            with open_text(file, name, self.encoding) as text:
                table = CsvText.open(text, shown, **settings, advice=advice or "Correct it.")  # type: ignore[arg-type]
                return self._rows(table, advice, alone, owner)
        except (*NOT_TEXT, csv.Error) as error:
            raise not_csv(shown, error, ', or set encoding, such as encoding = "latin-1"') from None

    def _rows(self, table: CsvText, advice: str, alone: bool, owner: str) -> Rows:
        features, marks = self._features(table, alone), self._marks()
        converted = self._converted(table, alone, owner)
        needed = [*self._labels, *self._about_rows]
        texts_of = {name: list[str]() for name in (*needed, *self._categorical, *self._identifiers)}
        found = Rows(table.shown, features, texts_of, header=table.header)
        numeric = [name for name in features if name not in self._categorical]
        # a mark that is a number, such as 0 for an unknown weight, may well be a label
        unknown = {mark for mark, value in marks.items() if math.isnan(value) and finite_number(mark) is None}
        for lines, cells in table.blocks():

            def where(at: int, lines: list[int] = lines) -> str:
                return f"Line {lines[at]} of {table.shown}"

            if table.comma_is_decimal:
                check_points(cells, numeric, where)
            commas = table.comma_is_decimal
            owners = cells[self.client] if converted and self.client is not None else [owner] * len(lines)
            owners = [as_number(one.strip(), commas) for one in owners]
            factors = {name: self._units.factors(name, owners) for name in converted}
            each, wrong = [], {}
            for name in numeric:
                try:
                    # the files of a folder are one client's each
                    no_client = self.client is None and table.shown == str(self.path)
                    each.append(
                        numbers(cells[name], name, where, marks, commas, advice, no_client, factors.get(name))[:, None]
                    )
                except InputError as error:
                    wrong[name] = error
            may_be_classes = isinstance(self.label, str) and self.task != "regression"
            if wrong and may_be_classes and (said := wrong_label(str(self.label), cells, commas)):
                raise InputError(said)
            if wrong:  # all at once, so that a new table does not take a try for each column
                first, *others = wrong
                also = self._advice({name: cells[name] for name in others}, table.comma_is_decimal, advice)
                raise InputError(f"{wrong[first]}{also}")
            found.numbers.append(np.concatenate([np.empty((len(lines), 0), np.float32), *each], axis=1))
            found.lines += lines
            for name, texts in found.texts.items():
                column = cells.get(name, [""] * len(lines))  # some columns may be in other files only
                values = [as_number(cell.strip(), table.comma_is_decimal) for cell in column]
                gaps = [at for at, value in enumerate(values) if not value or value in unknown]
                if gaps and name in needed:
                    cell = values[gaps[0]]
                    what = f"'{cell}', which means a missing value," if cell else "an empty cell"
                    raise InputError(
                        f"{where(gaps[0])} has {what} in column '{name}': every example needs its label, its client "
                        "and its group."
                    )
                texts += multiplied(values, factors[name]) if name in factors else values
        if not found.lines:
            raise InputError(f"The file {table.shown} has no examples: add at least one line after the header.")
        return found

    def _advice(self, columns: dict[str, Sequence[str]], comma_is_decimal: bool, instead: str) -> str:
        """Say what to do about further columns that are not numbers, if there is no advice to give `instead`."""
        said = []
        for name, cells in [*columns.items()][:12]:
            texts = [as_number(cell.strip(), comma_is_decimal) for cell in cells]
            why = column_advice(name, texts, self._marks(), IDENTIFIER.search(name) is not None)
            said.append(name if instead else f"{name} ({why})")
        more = f"; and {len(columns) - 12} more" if len(columns) > 12 else ""
        return f" Other columns with cells that are not numbers: {'; '.join(said)}{more}." if said else ""

    def _dataset(self, rows: Rows, client: NDArray[Any] | None) -> Dataset:
        marks = self._marks()
        columns = tuple(self._column(name, rows, marks) for name in rows.features)
        plain = iter(np.concatenate(rows.numbers).T)
        parts = [
            column.codes(rows.texts[column.name], rows.where, marks) if column.categories else next(plain)[:, None]
            for column in columns
        ]
        y, classes = self._targets(rows)
        how = {"optional": self.optional or (), "marks": marks, "convert": self._units.by_column}
        preprocessing = Preprocessing(columns=columns, label=self._labels, **how)
        return Dataset(
            x=torch.from_numpy(np.concatenate(parts, axis=1)),
            y=y,
            client=client,
            classes=classes,
            features=preprocessing.features,
            missing=any(math.isnan(value) for value in marks.values()),
            split=None if self.split_column is None else self._splits(rows),
            group=None if self.group is None else np.array(rows.texts[self.group]),
            preprocessing=preprocessing,
            cautions=(
                *self._not_here(rows),
                *self._repeated(rows, client),
                *self._no_features(rows),
                *self._converted_marks(rows, client),
            ),
        )

    def _column(self, name: str, rows: Rows, marks: dict[str, float]) -> Column:
        if name not in self._categorical:
            return Column(name=name)
        if isinstance(self.categorical, dict):
            listed = tuple(dict.fromkeys(category(one) for one in self.categorical[name]))  # "01" and "1" are one
        else:
            listed = categories(rows.texts[name], marks)
        if not listed:
            raise InputError(f"The column '{name}' has no categories: all its cells are missing.")
        return Column(name=name, categories=listed, embedded=name in (self.embed or ()))

    def _targets(self, rows: Rows) -> tuple[Tensor, tuple[str, ...]]:
        if isinstance(self.label, str):
            return targets(rows.texts[self.label], self.task)
        return targets(np.array([rows.texts[name] for name in self.label]).T, "regression")

    def _splits(self, rows: Rows) -> NDArray[np.int64]:
        assert self.split_column is not None
        cells = rows.texts[self.split_column]
        for at, cell in enumerate(cells):
            if cell.lower() not in SPLIT_NAMES:
                raise InputError(
                    f"{rows.where(at)} has '{cell}' in column '{self.split_column}', which must say "
                    f"{', '.join(SPLITS)}.{nearest(cell, SPLIT_NAMES)}"
                )
        return np.array([SPLIT_NAMES[cell.lower()] for cell in cells])

    @property
    def _labels(self) -> tuple[str, ...]:
        return (self.label,) if isinstance(self.label, str) else self.label

    @property
    def _about_rows(self) -> list[str]:
        """The columns that say something about a row, and are no features."""
        return [name for name in (self.client, self.split_column, self.group) if name is not None]

    @property
    def _identifiers(self) -> list[str]:
        """The columns that are left out and may say whose a row is, where nothing says which rows belong together."""
        said = self.split_column is not None or self.group is not None
        return [] if said else [name for name in self.drop if PERSON.search(name)]

    def _repeated(self, rows: Rows, client: NDArray[Any] | None) -> Iterator[str]:
        owners = [""] * len(rows) if client is None else client.tolist()
        for name in self._identifiers:
            known = [(owner, cell) for owner, cell in zip(owners, rows.texts[name], strict=True) if cell]
            if len(set(known)) < 0.95 * len(known):
                yield (
                    f"Column '{name}' has the same value in several rows. If these belong together, such as the visits "
                    f'of one patient, some are for training and others for the test: set group = "{name}".'
                )

    def _not_here(self, rows: Rows) -> Iterator[str]:
        """Name columns that are left out, and that only other sites may have: a name may also be misspelt."""
        for name in (name for name in self.drop if name not in rows.header):
            yield (
                f"[data] drop names the column '{name}', which this table lacks. That is right if other sites have it."
                f"{nearest(name, rows.features)}"
            )

    def _no_features(self, rows: Rows) -> Iterator[str]:
        """Name columns that are features and were probably not meant to be."""
        may_group = self.split_column is None and self.group is None
        for name, values in zip(rows.numeric, np.concatenate(rows.numbers).T.astype(np.float64), strict=True):
            yield from identifies(name, values, IDENTIFIER.search(name) is not None, may_group)
        for name in (name for name in rows.features if name in self._categorical):
            yield from rare_categories(name, rows.texts[name])

    def _converted_marks(self, rows: Rows, client: NDArray[Any] | None) -> Iterator[str]:
        """Name numbers such as -999, as they are written: multiplied, nobody recognises them."""
        owners = [""] * len(rows) if client is None else client.tolist()
        for name, values in zip(rows.numeric, np.concatenate(rows.numbers).T, strict=True):
            if name in self._units.columns():
                factors = self._units.factors(name, owners)
                yield from marks_gaps(name, (values / factors)[(factors != 1) & np.isfinite(values)])

    @property
    def _categorical(self) -> Sequence[str]:
        return tuple(self.categorical or ())

    @property
    def _units(self) -> Units:
        return Units(self.convert)

    def _converted(self, table: CsvText, alone: bool, owner: str) -> list[str]:
        """Return the columns of numbers that a file has in another unit."""
        labels = () if self.task == "regression" else self._labels
        regression = 'classes have no unit. If it is a number to predict, set task = "regression"'
        others = {
            "drop": (self.drop, "it is left out"),
            "categorical": (self._categorical, "categories have no unit"),
            "label": (labels, regression),
            "client, split_column or group": (self._about_rows, "it says something about rows and is no feature"),
        }
        elsewhere = () if alone else self.optional or ()
        names = self._units.columns(owner)
        for name in names:
            for key, (columns, why) in others.items():
                if name in columns:
                    raise InputError(f"[data] convert has '{name}', which is in {key}: {why}.")
            if name not in elsewhere:
                require(name, table.header, f"[data] convert: The file {table.shown}", "column")
        return [name for name in names if name in table.header]

    def _marks(self) -> dict[str, float]:
        """Return the texts that stand for a number, or for a missing one (nan)."""
        if self.fill == "error":
            return dict(self.missing)
        named = {"zero": 0.0, "mean": math.nan}
        return {"": named[self.fill] if isinstance(self.fill, str) else self.fill, **self.missing}

    def _features(self, table: CsvText, alone: bool) -> list[str]:
        """Return the names of the feature columns that a file has."""
        special, optional = [*self._labels, *self.drop, *self._about_rows], self.optional or ()
        elsewhere = () if alone else (*self.drop, *optional)
        for name in (*special, *self._categorical, *optional):
            if name not in elsewhere:
                others = "" if alone or name in special else f' If other files have it, set optional = ["{name}"].'
                key = "[data] label: " if name in self._labels else ""
                require(name, table.header, f"{key}The file {table.shown}", "column", others)
        if optional and "" not in self._marks():
            raise InputError(
                f"[data] optional = {list(optional)}: these columns count as empty where they are lacking. Say what "
                'empty cells become: fill = "mean" with normalize, or a number.'
            )
        for name in (name for name in self.drop if name in self._labels):
            raise InputError(f"The column '{name}' is in 'drop', and it is the label: leave it out of one of them.")
        for name in self._categorical:
            if name in special:
                raise InputError(f"The column '{name}' is in 'categorical', and it is not a feature: leave it out.")
        for name in self.embed or ():
            require(name, self._categorical, "'categorical'", "column")
        features = [name for name in table.header if name not in special]
        for name in (name for name in elsewhere if name not in table.header):
            if spelt := respelt(name, features):
                key = "optional" if name in optional else "drop"
                raise InputError(
                    f"The file {table.shown} has no column '{name}', which [data] {key} names, but '{spelt}'. Spell it "
                    "alike in all files."
                )
        if not features:
            raise InputError(f"The file {table.shown} has no feature columns besides {', '.join(special)}.")
        return features


def _misspelt(here: Sequence[str], there: Sequence[str]) -> str:
    """Return a hint for the first name that only differs in its spelling from an agreed one, or an empty string."""
    others = [name for name in there if name not in here]
    return next((hint for name in here if name not in there and (hint := nearest(name, others))), "")
