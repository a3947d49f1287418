"""Agree on preprocessing among sites that do not show each other their rows.

Each site summarises its table: columns, categories, classes, and for every feature how often it is known, its mean and
its variance over the training rows. The operator puts the summaries together. What comes out is what one site would
have fitted on all rows, and every site uses the same file from then on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from fedloom.data.categories import misspelt, spelt_differently
from fedloom.data.class_names import labels_spelt_differently
from fedloom.data.federation import Dataset, Federation
from fedloom.data.normalize import moments
from fedloom.data.plausibility import Moment, units_of_sites
from fedloom.data.preprocessing import Column, JsonFile, Numbers, Preprocessing, numbers_first, shown_marks
from fedloom.errors import InputError, nearest, respelt
from fedloom.files import toml_text

MARKS = "rule for missing values"


class Summary(JsonFile):
    """What a site tells about its table."""

    what = "a summary of `fedloom data summarize`"
    if_any = ("optional",)

    site: str = ""
    """The site's name, if its file has one."""
    columns: tuple[Column, ...]
    """The columns that are features, with the categories that occur here."""
    optional: tuple[str, ...] = ()
    """Columns that a table may lack. Those that this one lacks are not in `columns`."""
    marks: dict[str, float]
    """Cells that stand for a number, or for a missing value (nan)."""
    label: tuple[str, ...]
    """The columns with the label."""
    classes: tuple[str, ...]
    """The classes that occur here; none if labels are numbers."""
    features: dict[str, Moment]
    """How often each feature is known in the training rows, its mean and its variance. An optional column that the
    table lacks stands for its features.
    """
    target: Moment | None = None
    """The same for a label that is a number."""

    def column(self, name: str) -> Column | None:
        """Return the column with this name, or None if the table lacks it."""
        return next((column for column in self.columns if column.name == name), None)

    @staticmethod
    def of(federation: Federation, missing: bool, site: str = "") -> Summary:
        """Summarise the training rows of a federation whose features are as the source has them."""
        fitted = federation.preprocessing
        if not fitted.columns:
            raise InputError('Only tables can be summarised: the data needs named columns, as source = "csv" has them.')
        rows = torch.cat([federation.indices(client, "train") for client in range(federation.clients)])
        found = moments(federation.x, rows, missing=missing)
        each = zip(found.count.tolist(), found.mean.tolist(), found.variance.tolist(), strict=True)
        target = None
        if not fitted.classes and federation.y.dim() == 1:
            one = moments(federation.y[:, None], rows)
            target = (one.count.item(), one.mean.item(), one.variance.item())
        empty, lacking = fitted.marks.get("", math.nan), {*fitted.optional} - {one.name for one in fitted.columns}
        in_all_rows = (0.0, 0.0, 0.0) if math.isnan(empty) else (float(len(rows)), empty, 0.0)
        return Summary(
            site=site,
            columns=fitted.columns,
            optional=fitted.optional,
            marks=fitted.marks,
            label=fitted.label,
            classes=fitted.classes,
            features=dict(zip(fitted.features, each, strict=True)) | dict.fromkeys(sorted(lacking), in_all_rows),
            target=target,
        )


def agree(summaries: Mapping[str, Summary]) -> Preprocessing:
    """Put the summaries of sites together, by the sites' names."""
    first = next(iter(summaries.values()))
    for (name, one), (other, two) in combinations(summaries.items(), 2):
        for what, ours, theirs in (
            ("columns", sorted(_kinds(one, two)), sorted(_kinds(two, one))),
            ("label", one.label, two.label),
            ("kind of label", bool(one.classes), bool(two.classes)),
            (MARKS, shown_marks(one.marks), shown_marks(two.marks)),
        ):
            if ours != theirs:
                advice = _advice(one, two) if what == "columns" else ""
                advice = _advice_on_marks(summaries.values()) if what == MARKS else advice
                apart = _difference(ours, theirs, name, other)
                raise InputError(f"{name} and {other} differ in the {what}: {apart}.{advice}")
    names = list(dict.fromkeys(column.name for summary in summaries.values() for column in summary.columns))
    for site, summary in summaries.items():
        for name in (name for name in summary.optional if name not in names):
            raise InputError(f"No site has the column '{name}', which is optional at {site}.{nearest(name, names)}")
    columns = tuple(_union([found for one in summaries.values() if (found := one.column(name))]) for name in names)
    together = [
        _together([_known(summary, column, feature) for summary in summaries.values()])
        for column in columns
        for feature in column.features
    ]
    target = None if first.target is None else _together([one.target for one in summaries.values() if one.target])
    classes = {label for summary in summaries.values() for label in summary.classes}
    agreed = Preprocessing(
        columns=columns,
        optional=tuple(name for name in names if any(name in one.optional for one in summaries.values())),
        marks=first.marks,
        missing=any(math.isnan(value) for value in first.marks.values()),
        untrained=_untrained(columns, summaries.values()),
        shape=(len(together),),
        mean=tuple(mean for _, mean, _ in together),
        std=_deviations(together),
        label=first.label,
        classes=tuple(sorted(classes, key=numbers_first)),
        target=None if target is None else (target[1], _deviations([target])[0]),
    )
    doubted: Preprocessing = agreed.replace(doubts=tuple(doubts(summaries, agreed, for_everybody=True)))
    return doubted


def read_agreed(path: Path) -> Preprocessing:
    """Read what `fedloom data agree` wrote."""
    found = Preprocessing.read(path)
    if not found.columns or not len(found.mean) == len(found.std) == len(found.features):
        raise InputError(
            f"{path} is not a file of `fedloom data agree`: it needs columns, and a mean and a standard deviation for "
            "each of their features. Ask for the file again, and copy it as it is."
        )
    return found


def doubts(summaries: Mapping[str, Summary], agreed: Preprocessing, for_everybody: bool = False) -> Iterator[str]:
    """Yield a sentence about each thing in the summaries that is probably a mistake.

    What is `for_everybody` stands in a file that all sites get: it names no site, and no number of a single one.
    """
    yield from spelt_differently(agreed.columns)
    yield from labels_spelt_differently(agreed.label, agreed.classes)
    if not for_everybody:
        for column in agreed.columns:
            if column.categories and not column.embedded:
                yield from misspelt(column, {site: _rows(one, column) for site, one in summaries.items()})
    yield from other_units(summaries, agreed, for_everybody)
    for column in agreed.columns:
        empty = [site for site, one in summaries.items() if not _known(one, column, column.features[0])[0]]
        if empty and len(empty) < len(summaries):
            where = "some sites" if for_everybody else ", ".join(empty)
            yield f"{column.name} is empty in all training rows of {where}: the model gets the mean there."


def other_units(summaries: Mapping[str, Summary], agreed: Preprocessing, for_everybody: bool = False) -> Iterator[str]:
    """Yield a sentence about each column that sites probably have in different units."""
    for column in agreed.columns:
        if not column.categories:
            of_sites = {site: one.features[column.name] for site, one in summaries.items()}
            units = list(units_of_sites(column.name, of_sites))
            if units and for_everybody:
                units = [f"{column.name} may be in another unit at some sites, or hold numbers that mean missing."]
            yield from units


def as_agreed(dataset: Dataset, agreed: Preprocessing) -> Dataset:
    """Return a dataset with its columns in the order, and its labels numbered, as several sites agreed."""
    dataset = _with_empty_columns(dataset, agreed)
    here = dataset.preprocessing
    if here.columns != agreed.columns and {*here.columns} == {*agreed.columns}:
        order = [here.features.index(name) for name in agreed.features]
        fitted = here.replace(columns=agreed.columns)
        dataset = replace(dataset, x=dataset.x[:, order], features=fitted.features, preprocessing=fitted)
    if dataset.preprocessing.columns != agreed.columns:
        both = _named(dataset.preprocessing.columns), _named(agreed.columns)
        difference = _difference(*both, "this data", "what was agreed")
        advice = _advice_at_site(here, agreed)
        raise InputError(f"The columns of this data are not those that the sites agreed on: {difference}.{advice}")
    unknown = [name for name in dataset.classes if name not in agreed.classes]
    if unknown:
        raise InputError(
            f"The label '{unknown[0]}' is not among the classes that the sites agreed on: {', '.join(agreed.classes)}."
            f"{nearest(unknown[0], agreed.classes)}"
        )
    if not agreed.classes:
        return dataset
    places = torch.tensor([agreed.classes.index(name) for name in dataset.classes])
    return replace(dataset, y=places[dataset.y], classes=agreed.classes)


def _with_empty_columns(dataset: Dataset, agreed: Preprocessing) -> Dataset:
    """Return a dataset with the agreed columns that its table may lack, and does: every row is empty there."""
    here = dataset.preprocessing
    known = {column.name for column in here.columns}
    lacking = tuple(one for one in agreed.columns if one.name in here.optional and one.name not in known)
    made = here.replace(columns=(*here.columns, *lacking), optional=agreed.optional)
    if not lacking:
        return replace(dataset, preprocessing=made)
    cells = Preprocessing(columns=lacking, marks=agreed.marks)
    empty = cells.encode({column.name: [""] for column in lacking}, lambda _: "Every row of this table")
    x = torch.cat([dataset.x, empty.expand(len(dataset.x), -1)], dim=1)
    return replace(dataset, x=x, features=made.features, preprocessing=made)


def _kinds(summary: Summary, other: Summary) -> list[str]:
    """Return the columns with their kinds, without those that the other site may lack, and does."""
    kinds = ("numbers", "categories", "embedded categories")
    return [
        f"{column.name} ({kinds[bool(column.categories) + column.embedded]})"
        for column in summary.columns
        if other.column(column.name) or column.name not in other.optional
    ]


def _apart(one: Summary | Preprocessing, two: Summary | Preprocessing) -> tuple[list[str], list[str], str]:
    """Return the columns that only one of two tables has, and a hint if their names are spelt differently."""
    here, there = ([column.name for column in each.columns] for each in (one, two))
    ours, theirs = [name for name in here if name not in there], [name for name in there if name not in here]
    spelt = [f"{name} and {other}" for name in ours if (other := respelt(name, theirs))]
    return ours, theirs, f" Spell names alike at all sites: {', '.join(spelt)}." if spelt else ""


def _advice_at_site(here: Preprocessing, agreed: Preprocessing) -> str:
    ours, theirs, hint = _apart(here, agreed)
    lacking = f" If this table lacks it, set optional = {_quoted(theirs)}: it counts as empty." if theirs else ""
    return hint or lacking + (f" Leave out what nobody else has: drop = {_quoted(ours)}." if ours else "")


def _advice(one: Summary, two: Summary) -> str:
    """Say what to do about columns that only one of two sites has."""
    ours, theirs, hint = _apart(one, two)
    apart = [*ours, *theirs]
    if hint or not apart:
        return hint
    names = _quoted(apart)
    return (
        f" Where a table lacks a column, set optional = {names} and fill, and it counts as empty there; or leave it "
        f"out at all sites: drop = {names}. Then agree again: `fedloom data summarize`, `fedloom data agree`."
    )


def _advice_on_marks(summaries: Iterable[Summary]) -> str:
    """Say what each site should write about missing values: what any of them does."""
    every = {mark: value for one in reversed([*summaries]) for mark, value in one.marks.items()}
    empty = every.pop("", None)
    keys = [] if empty is None else ['fill = "mean"' if math.isnan(empty) else f"fill = {empty:g}"]
    keys += [f"missing = {toml_text(every)}"] if every else []
    return (
        f" Write the same in [data] at every site, also where no cell has such a mark: {' and '.join(keys)}. Then "
        "agree again: `fedloom data summarize`, `fedloom data agree`."
    )


def _quoted(names: Sequence[str]) -> str:
    return json.dumps(names, ensure_ascii=False)


def _named(columns: Sequence[Column]) -> list[str]:
    return [feature for column in columns for feature in column.features]


def _difference(ours: object, theirs: object, here: str, there: str) -> str:
    if isinstance(ours, list) and isinstance(theirs, list):
        apart = [f"only {here} has {one}" for one in ours if one not in theirs]
        apart += [f"only {there} has {one}" for one in theirs if one not in ours]
        return ", ".join(apart[:3])
    return f"{here} has {ours}, {there} has {theirs}"


def _union(columns: Sequence[Column]) -> Column:
    found = {category for column in columns for category in column.categories}
    first = columns[0]
    return Column(name=first.name, categories=tuple(sorted(found, key=numbers_first)), embedded=first.embedded)


def _known(summary: Summary, column: Column, feature: str) -> Moment:
    """Return the moment of a feature at a site; a category that does not occur there is known to be absent."""
    if feature in summary.features:
        return summary.features[feature]
    here = summary.column(column.name)
    return summary.features[column.name] if here is None else (summary.features[here.features[0]][0], 0.0, 0.0)


def _rows(summary: Summary, column: Column) -> list[int]:
    """Return how many training rows of a site have each category of a column with a feature for each."""
    moments = [_known(summary, column, feature) for feature in column.features]
    return [round(count * mean) for count, mean, _ in moments]


def _untrained(columns: Sequence[Column], summaries: Iterable[Summary]) -> dict[str, tuple[str, ...]]:
    """Return the categories that no training row of any site has, by column; the mean of a code does not tell."""
    found = {}
    for column in (one for one in columns if one.categories and not one.embedded):
        rows = np.sum([_rows(one, column) for one in summaries], axis=0)
        if never := tuple(name for name, count in zip(column.categories, rows, strict=True) if not count):
            found[column.name] = never
    return found


def _together(parts: Sequence[Moment]) -> Moment:
    count, mean, variance = (np.array(values) for values in zip(*parts, strict=True))
    total = count.sum()
    if not total:
        return 0.0, 0.0, 0.0
    centre = float((count * mean).sum() / total)
    return float(total), centre, float((count * (variance + (mean - centre) ** 2)).sum() / total)


def _deviations(found: Sequence[Moment]) -> Numbers:
    """Return standard deviations as `Moments.statistics` does."""
    return tuple(math.inf if not count else math.sqrt(variance) or 1.0 for count, _, variance in found)
