"""Agree on preprocessing among sites that do not show each other their rows.

Each site summarises its table: columns, categories, classes, and for every feature how often it is known, its mean and
its variance over the training rows. The operator puts the summaries together. What comes out is what one site would
have fitted on all rows, and every site uses the same file from then on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedloom.data.class_names import labels_spelt_differently
from fedloom.data.federation import Dataset, Federation
from fedloom.data.normalize import moments
from fedloom.data.plausibility import Moment, spelt_differently, units_of_sites
from fedloom.data.preprocessing import Column, JsonFile, Numbers, Preprocessing, numbers_first
from fedloom.errors import InputError, nearest


class Summary(JsonFile):
    """What a site tells about its table."""

    what = "a summary of `fedloom data summarize`"

    site: str = ""
    """The site's name, if its file has one."""
    columns: tuple[Column, ...]
    """The columns that are features, with the categories that occur here."""
    marks: dict[str, float]
    """Cells that stand for a number, or for a missing value (nan)."""
    label: tuple[str, ...]
    """The columns with the label."""
    classes: tuple[str, ...]
    """The classes that occur here; none if labels are numbers."""
    features: dict[str, Moment]
    """How often each feature is known in the training rows, its mean and its variance."""
    target: Moment | None = None
    """The same for a label that is a number."""

    def column(self, name: str) -> Column:
        """Return the column with this name."""
        return next(column for column in self.columns if column.name == name)

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
        return Summary(
            site=site,
            columns=fitted.columns,
            marks=fitted.marks,
            label=fitted.label,
            classes=fitted.classes,
            features=dict(zip(fitted.features, each, strict=True)),
            target=target,
        )


def agree(summaries: Mapping[str, Summary]) -> Preprocessing:
    """Put the summaries of sites together, by the sites' names."""
    (name, first), *others = summaries.items()
    for other, summary in others:
        for what, ours, theirs in (
            ("columns", sorted(_kinds(first)), sorted(_kinds(summary))),
            ("label", first.label, summary.label),
            ("kind of label", bool(first.classes), bool(summary.classes)),
            ("rule for missing values", repr(sorted(first.marks.items())), repr(sorted(summary.marks.items()))),
        ):
            if ours != theirs:
                raise InputError(f"{name} and {other} differ in the {what}: {_difference(ours, theirs, name, other)}.")
    columns = tuple(_union([summary.column(column.name) for summary in summaries.values()]) for column in first.columns)
    together = [
        _together([_known(summary, column, feature) for summary in summaries.values()])
        for column in columns
        for feature in column.features
    ]
    target = None if first.target is None else _together([one.target for one in summaries.values() if one.target])
    classes = {label for summary in summaries.values() for label in summary.classes}
    agreed = Preprocessing(
        columns=columns,
        marks=first.marks,
        missing=any(math.isnan(value) for value in first.marks.values()),
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
    for column in agreed.columns:
        empty = [site for site, one in summaries.items() if not one.features[one.column(column.name).features[0]][0]]
        if empty and len(empty) < len(summaries):
            where = "some sites" if for_everybody else ", ".join(empty)
            yield f"{column.name} is empty in all training rows of {where}: the model gets the mean there."
        if not column.categories:
            of_sites = {site: one.features[column.name] for site, one in summaries.items()}
            units = list(units_of_sites(column.name, of_sites))
            if units and for_everybody:
                units = [f"{column.name} may be in another unit at some sites, or hold numbers that mean missing."]
            yield from units


def as_agreed(dataset: Dataset, agreed: Preprocessing) -> Dataset:
    """Return a dataset with its columns in the order, and its labels numbered, as several sites agreed."""
    here = dataset.preprocessing
    if here.columns != agreed.columns and {*here.columns} == {*agreed.columns}:
        order = [here.features.index(name) for name in agreed.features]
        fitted = here.replace(columns=agreed.columns)
        dataset = replace(dataset, x=dataset.x[:, order], features=fitted.features, preprocessing=fitted)
    if dataset.preprocessing.columns != agreed.columns:
        both = _named(dataset.preprocessing.columns), _named(agreed.columns)
        difference = _difference(*both, "this data", "what was agreed")
        raise InputError(f"The columns of this data are not those that the sites agreed on: {difference}.")
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


def _kinds(summary: Summary) -> list[str]:
    kinds = ("numbers", "categories", "embedded categories")
    return [f"{column.name} ({kinds[bool(column.categories) + column.embedded]})" for column in summary.columns]


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
    return (summary.features[summary.column(column.name).features[0]][0], 0.0, 0.0)


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
