"""Look for probable mistakes in a table: one class, a feature that gives the label away, other units, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.categories import NO_LABEL, gaps_as_categories, spelt_differently
from fedloom.data.class_names import (
    are_dates,
    clients_spelt_differently,
    compact_dates,
    known_to_one_client,
    labels_spelt_differently,
)
from fedloom.data.federation import Federation
from fedloom.data.preprocessing import Preprocessing
from fedloom.data.stale_agreement import stale
from fedloom.files import toml_text

Numbers = NDArray[np.float64]
Moment = tuple[float, float, float]  # how many values are known, their mean, and their variance
MOST = 10_000  # rows that are looked at
MOST_NUMBERS = 20_000_000  # of a table that is compared with what sites agreed on: all of it, if possible
MOST_COMPARED = 50_000  # neighbouring rows that are compared with each other: every second row may be a copy
WIDEST = 300  # features; a wider table is not looked at
FEWEST = 30  # with fewer rows, anything may be chance
GIVEN_AWAY = 0.98  # an AUROC, a share of the variance or a correlation that hardly any honest feature has
OTHER_UNIT = 4.5  # by this factor size and spread of a feature differ at one client from all others, which are alike
CERTAINLY_OTHER_UNIT = 10.0  # by this factor, even if the others are not alike
ALIKE = 2.0  # by this factor honest clients differ: a client with another one this near has the same unit
OTHER_ZERO = 10.0  # spreads between the values of one client and those of any other
FEWEST_KNOWN = 10  # values of a client, to compare it with others
FAR = 10.0  # standard deviations: whatever the distribution, at most 1 % of it is farther from the mean
SLACK = 1e-3  # standard deviations, for rounding
COPIES = 0.05  # a share of repeated rows
FEW_COPIES = 3  # rows, where hardly any would repeat by chance
HARDLY_ANY = 0.1  # of such rows
CHANCE = 5.0  # times as many rows repeat as would by chance
NAMED_DISTINCT = 0.3  # a share of different numbers in a column that is called patient or id: ages repeat more often
RELATED = 0.9  # a correlation of features that say nearly the same
MARKS = tuple(sign * number for number in (99.0, 999.0, 9999.0, 99999.0) for sign in (-1, 1))  # of missing values
OTHER_UNIT_THERE = "is it in another unit there"  # in a sentence about each such feature


def suspicions(federation: Federation, where: str = "", at_site: bool = False) -> Iterator[str]:
    """Yield a sentence about each thing that is probably a mistake. On a network there is no data here to look at.

    Sentences about single clients add `where`, such as " in seed 1". `at_site`, these are the clients of one site
    among others, all of which agreed on preprocessing.
    """
    if len(federation.classes) == 1 and len(federation.y):
        yield f"The label has one class only ({federation.classes[0]}): from this data alone there is nothing to learn."
    if absent := [name for name in federation.classes if name.strip().casefold() in NO_LABEL]:
        marks = ", ".join(f'"{name}" = nan' for name in absent)
        yield (
            f"The label has the class {', '.join(absent)}, which models learn to predict. If it means that the label "
            f"is missing, remove those rows; missing = {{ {marks} }} in [data] refuses and names them."
        )
    yield from _label_of_dates(federation)
    yield from federation.cautions
    yield from clients_spelt_differently(map(str, federation.names or ()))
    columns = federation.preprocessing.columns
    yield from spelt_differently(columns)
    yield from gaps_as_categories(columns)
    yield from labels_spelt_differently(federation.preprocessing.label, federation.classes)
    yield from known_to_one_client(federation)
    numeric = [not column.categories for column in columns for _ in column.features]
    if not any(numeric) or federation.x.dim() != 2 or len(federation.x) < FEWEST or len(numeric) > WIDEST:
        return
    rows = np.arange(0, len(federation.x), len(federation.x) // MOST + 1)
    owner = np.searchsorted(federation.offsets, rows, side="right") - 1
    (values, known), y = _as_measured(federation, rows, owner), federation.y[rows].double().numpy()
    yield from _never_measured(federation, where)
    explained = set()  # features that are in another unit, or seem to be
    for place in np.flatnonzero(numeric).tolist():
        name, one = federation.features[place], values[:, place]
        yield from _never_varies(name, one, name in federation.preprocessing.optional)
        yield from _dates(name, one)
        yield from _numbers_rows(name, one, len(federation.x))
        yield from marks_gaps(name, one)
        units = [*_unit_of_clients(federation, name, one, owner, known[:, place], where)]
        if not units and (at_site or federation.clients == 1):
            units = [*_unit_of_site(federation.preprocessing, name, place, one[known[:, place]])]
        explained |= {name} if units else set()
        yield from units
    if federation.agreed is not None and not at_site:
        rows = np.arange(0, len(federation.x), federation.x.numel() // MOST_NUMBERS + 1)
        owner = np.searchsorted(federation.offsets, rows, side="right") - 1
        yield from stale(federation, rows, *_as_measured(federation, rows, owner), explained)
    for place, name in enumerate(federation.features):
        yield from _gives_away(name, values[:, place], y, len(federation.classes))
    some = slice(MOST_COMPARED)
    yield from _copies(np.column_stack([federation.x[some].nan_to_num(np.inf), federation.y[some]]))


def _as_measured(
    federation: Federation, rows: NDArray[np.int64], owner: NDArray[np.int64]
) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return features in their own units, where missing values are means, and which values are known."""
    values: Numbers = federation.x[rows].double().numpy()
    fitted = federation.preprocessing
    known = ~np.isnan(values)
    if fitted.missing and (fitted.mean or fitted.clients):
        known &= values != 0  # scaled values are 0 where they are missing
    for client in np.unique(owner) if fitted.clients else [-1]:
        statistics = fitted.statistics(federation.name(int(client)) if fitted.clients else None)
        if statistics is not None:
            here = owner == client if fitted.clients else slice(None)
            mean, std = (each.numpy() for each in statistics)
            values[here] = values[here] * np.where(np.isfinite(std), std, 0.0) + mean  # infinite: never known
    finite = ~np.isnan(values)
    means = np.where(finite, values, 0.0).sum(axis=0) / np.maximum(finite.sum(axis=0), 1)
    return np.where(finite, values, means), known


def _never_measured(federation: Federation, where: str) -> Iterator[str]:
    """A column that some clients never filled in, and others did."""
    fitted, bounds = federation.preprocessing, np.asarray(federation.offsets)
    if not fitted.missing or not 2 <= federation.clients <= MOST:
        return
    names = [federation.name(client) for client in range(federation.clients)]
    sizes = np.diff(bounds)
    parts = torch.split(federation.x, [len(column.features) for column in fitted.columns], dim=1)
    for column, part in zip(fitted.columns, parts, strict=True):
        # scaled values are 0 where they are missing; a number of a category is not scaled, and never missing
        scaled = bool(fitted.mean or fitted.clients) and not column.embedded
        values = part.numpy()
        known = (values != 0).any(axis=1) if scaled else ~np.isnan(values).all(axis=1)
        counts = np.diff(np.append(0, np.cumsum(known))[bounds])
        filled, absent = counts > sizes / 2, counts == 0
        rows, instead = "all rows", "the mean over the other clients"
        if fitted.bounds and federation.gaps is not None:  # where 0 may also be a value
            counts = sizes - federation.gaps[:, fitted.columns.index(column)]
            filled, absent = counts > sizes / 2, counts == 0
            instead = fitted.stands_for_missing(column.features[0])
        if fitted.clients:  # a client's only value is 0, too
            first = fitted.features.index(column.features[0])
            absent = ~np.isfinite([fitted.clients[name][1][first] for name in names])
            rows, instead = "all training rows", "0, which stands for a mean,"
        # a value may be the mean itself: only what is usually there, and varies, can be missing everywhere
        varies = any(np.ptp(values[bounds[one] : bounds[one + 1]]) > 0 for one in np.flatnonzero(filled)[:100])
        lacking = [names[one] for one in np.flatnonzero(absent & (sizes >= FEWEST_KNOWN))]
        if lacking and varies:
            shown = ", ".join(lacking[:5]) + (", …" if len(lacking) > 5 else "")
            yield f"{column.name} is empty in {rows} of {shown}{where}: the model gets {instead} there."


def _never_varies(name: str, one: Numbers, optional: bool) -> Iterator[str]:
    """A column that is empty, or has one value: nothing can be learnt from it."""
    if not np.ptp(one):
        advice = "It is optional, so other sites may have it." if optional else "Leave it out with drop."
        yield f"{name} is empty or the same in all rows: nothing can be learnt from it. {advice}"


def _dates(name: str, one: Numbers) -> Iterator[str]:
    """A date as a number: 20240131 and 20240201 are a day apart, and 70 as numbers."""
    if compact_dates(one):
        yield (
            f"{name} looks like dates, such as {one[0]:.0f}, and models take it as a number. Replace it by what the "
            "date means, such as an age in years or days since admission, or leave it out with drop."
        )


def _label_of_dates(federation: Federation) -> Iterator[str]:
    if are_dates(federation.classes):
        yield (
            f"The label looks like dates, such as {federation.classes[0]}, and each date is a class of its own. Choose "
            "another label, or predict a number, such as days since admission."
        )
    elif not federation.classes and federation.y.dim() == 1 and compact_dates(federation.y[:MOST].double().numpy()):
        yield (
            f"The label looks like dates, such as {float(federation.y[0]):.0f}, and models take it as a number. "
            "Predict what the date means, such as days since admission."
        )


def _numbers_rows(name: str, one: Numbers, examples: int) -> Iterator[str]:
    """A row number as a feature: a model can learn the order of the file from it."""
    whole = np.unique(np.round(one)) + 0.0  # without minus zero
    if len(whole) == len(one) == examples == whole[-1] - whole[0] + 1 and np.abs(one - np.round(one)).max() < 0.05:
        yield f"{name} numbers the rows, from {whole[0]:.0f} to {whole[-1]:.0f}: leave it out with drop."


def identifies(name: str, values: Numbers, is_named: bool, may_group: bool) -> Iterator[str]:
    """Yield a sentence about numbers that identify a patient or a row, by the column's name or by how they follow."""
    known = values[np.isfinite(values)]
    whole = np.unique(known)
    if len(known) < FEWEST or (whole != np.round(whole)).any():
        return
    share, reach = len(whole) / len(known), whole[-1] - whole[0] + 1
    if len(whole) == len(values) == reach:
        return  # the number of the row, which has its own caution
    in_sequence = share > 0.95 and np.median(np.diff(whole)) == 1  # measurements this close to each other would repeat
    if in_sequence or (is_named and share > NAMED_DISTINCT):
        group = f' If rows with the same one belong together, set group = "{name}" instead.' if may_group else ""
        yield (
            f"{name} looks like an identifier and is a feature: {len(whole):,} different whole numbers in "
            f'{len(known):,} rows. Models learn rows by heart from it: leave it out with drop = ["{name}"].{group}'
        )


def marks_gaps(name: str, one: Numbers) -> Iterator[str]:
    """Yield a sentence about a number such as -999 that stands for a missing value: it is far from all others."""
    for mark in MARKS:
        here = np.abs(one - mark) < 1e-4 * abs(mark)
        rest = one[~here]
        if here.any() and len(rest) and np.abs(rest - mark).min() > max(np.ptp(rest), 1.0):
            count = f"{here.sum():,} row" + ("s" if here.sum() > 1 else "")
            advice = f'if it means missing, set missing = {{ "{mark:g}" = nan }} in [data]'
            yield f"{name} is {mark:g} in {count}, far from all other values: {advice}."


def _unit_of_clients(
    federation: Federation, name: str, one: Numbers, owner: NDArray[np.int64], known: NDArray[np.bool_], where: str
) -> Iterator[str]:
    """Compare what clients measured; what is missing would pull them towards each other."""
    if federation.preprocessing.clients or not 2 <= federation.clients <= MOST:
        return  # every client scales features by its own statistics, so units do not matter
    bounds = np.searchsorted(owner, np.arange(federation.clients + 1))
    parts = [one[start:end][known[start:end]] for start, end in pairwise(bounds)]
    typical = {
        federation.name(client): (np.median(part), np.median(np.abs(part)), np.subtract(*np.percentile(part, [75, 25])))
        for client, part in enumerate(parts)
        if len(part) >= FEWEST_KNOWN
    }
    of_csv = federation.preprocessing.label and federation.names is not None  # only there a client can be converted
    form = (lambda client, factor: f"{toml_text({client: factor})} in [data]") if of_csv else None
    yield from _other_unit(name, typical, where, form)


def _unit_of_site(preprocessing: Preprocessing, name: str, place: int, one: Numbers) -> Iterator[str]:
    """Compare a site's values with what all sites agreed on; where nobody else has data, the two are the same."""
    if not preprocessing.has_training_means or len(preprocessing.mean) <= place or len(one) < FEWEST_KNOWN:
        return
    moments = {"all sites": (preprocessing.mean[place], preprocessing.std[place]), "this site": (one.mean(), one.std())}
    typical = {who: (mean, np.hypot(mean, std), std) for who, (mean, std) in moments.items()}
    yield from _other_unit(name, typical, form=lambda _, factor: f"{toml_text(factor)} in [data]")


def units_of_sites(name: str, moments: Mapping[str, Moment]) -> Iterator[str]:
    """Yield a sentence about each site whose values are far from those of the others, by mean and variance."""
    typical = {
        site: (mean, np.hypot(mean, np.sqrt(variance)), np.sqrt(variance))
        for site, (count, mean, variance) in moments.items()
        if count >= FEWEST_KNOWN
    }
    yield from _other_unit(name, typical, form=lambda site, factor: f"{toml_text(factor)} in [data] at {site}")


def _other_unit(
    name: str,
    typical: Mapping[str, tuple[float, float, float]],
    where: str = "",
    form: Callable[[str, dict[str, float]], str] | None = None,
) -> Iterator[str]:
    """A client whose values are far from those of the others: perhaps another unit.

    `typical` has the centre, the size and the spread of each client's values. `form` says how a client's factor is
    written, where a key converts units.
    """
    typical = {client: found for client, found in typical.items() if min(found[1:]) > 0}
    if len(typical) < 2:
        return
    numbers = np.array(list(typical.values()))
    doubt = f"{OTHER_UNIT_THERE}, or do numbers such as -999 stand for missing values?"
    for place, client in enumerate(typical):
        (centre, *sizes), others = numbers[place], np.delete(numbers, place, axis=0)
        ratio = np.log(sizes / others[:, 1:])  # to every other client: of size and of spread
        usual = np.median(ratio, axis=0)
        side = np.sign(usual[0])  # a client whose size is larger and whose spread is not has no other unit
        alike = np.ptp(np.log(others[:, 1])) <= 2 * np.log(ALIKE)  # within this factor of what is between them
        least = np.log(OTHER_UNIT if alike else CERTAINLY_OTHER_UNIT)
        other_unit = (side * usual).min() > least and (side * ratio).min() > np.log(ALIKE)
        apart = np.abs(others[:, 0] - centre) / np.maximum(others[:, 2], sizes[1])
        if len(typical) == 2 and place == 0 and (other_unit or apart.min() > OTHER_ZERO):
            continue  # one sentence is enough for two
        if other_unit:
            times = np.median(np.exp(side * ratio))
            factor = {name: float(f"{times**-side:.2g}")}
            remedy = f" For another unit, set convert = {form(client, factor)}" if form else ""
            remedy += ", with the exact factor, times one that is set there already." if form else ""
            how = f"{times:,.0f} times {'larger' if side > 0 else 'smaller'}"
            yield f"{name} is about {how} at {client} than elsewhere{where}: {doubt}{remedy}"
        elif apart.min() > OTHER_ZERO:
            usual_centre = f"{np.median(others[:, 0]):.4g} elsewhere{where}"
            yield f"{name} is about {centre:.4g} at {client} and {usual_centre}: {doubt}"


def _gives_away(name: str, one: Numbers, y: Numbers, classes: int) -> Iterator[str]:
    if y.ndim > 1 or not np.ptp(one) or len(np.unique(y)) < 2:
        return
    if not classes:
        strength, what = abs(np.corrcoef(one, y)[0, 1]), "correlation"
    elif len(np.unique(y)) == 2:
        from fedloom.score_metrics import auroc

        strength, what = auroc(one, y == y.max()), "AUROC"
        strength = max(strength, 1 - strength)
    else:
        between = sum((y == label).sum() * (one[y == label].mean() - one.mean()) ** 2 for label in np.unique(y))
        strength, what = between / ((one - one.mean()) ** 2).sum(), "share of its variance that labels explain"
    if strength > GIVEN_AWAY:
        yield f"{name} alone gives the label away ({what} {strength:.4f}). If it is not known beforehand, drop it."


def _copies(rows: Numbers) -> Iterator[str]:
    """Repeated rows, if they repeat more often than the values of single columns let expect."""
    copies = len(rows) - len(np.unique(rows, axis=0))
    by_chance = _repeated_by_chance(rows) if copies >= FEW_COPIES else np.inf
    if copies > CHANCE * by_chance and (copies > COPIES * len(rows) or by_chance < HARDLY_ANY):
        seen = f"{copies:,} of {len(rows):,} rows repeat another one"
        yield f"{seen}. Where one is for training and its copy for a test, results look better than they are."


def _repeated_by_chance(rows: Numbers) -> float:
    """Return how many pairs of rows would be equal if columns were independent; related columns count once."""
    codes = np.column_stack([np.unique(column, return_inverse=True)[1] for column in rows.T]).astype(float)
    codes = codes[:, np.ptp(codes, axis=0) > 0]
    related = np.abs(np.atleast_2d(np.corrcoef(codes, rowvar=False))) > RELATED
    pairs, counted = len(rows) * (len(rows) - 1) / 2, np.zeros(codes.shape[1], dtype=bool)
    for place in np.argsort([-len(np.unique(column)) for column in codes.T]).tolist():
        if not related[place, counted].any():
            counted[place] = True
            pairs *= ((np.bincount(codes[:, place].astype(int)) / len(rows)) ** 2).sum()
    return float(pairs)


def unusual(
    names: Sequence[str],
    values: Numbers,
    mean: Numbers,
    std: Numbers,
    reach: Numbers | None = None,
    rows: str = "rows",
) -> Iterator[str]:
    """Yield a sentence for each feature with values outside of what a model was trained on.

    `reach` is how many standard deviations training values were from the mean, below and above. Where nobody may know
    that, very far values are named. `rows` says what these examples are.
    """
    low, high = np.full((2, len(names)), [[-FAR], [FAR]]) if reach is None else reach
    away = (values - mean) / std
    below, above = (np.nan_to_num(gap, nan=-np.inf) for gap in (low - away, away - high))
    beyond = np.maximum(below, above)
    for place in np.flatnonzero((beyond > SLACK).any(axis=0)).tolist():
        here = beyond[:, place]
        beyond_it = f"{(here > SLACK).sum():,} of {len(values):,} {rows}"
        usual = f"it was trained on {mean[place]:.4g} ± {std[place]:.2g}"
        if reach is not None:
            ends = {"below": (below, low), "above": (above, high)}  # one that no value passes may be impossible
            passed = [
                f"{side} {mean[place] + end[place] * std[place]:.3g}"
                for side, (gap, end) in ends.items()
                if (gap[:, place] > SLACK).any()
            ]
            usual += f", with nothing {' or '.join(passed)} (in whole standard deviations)"
        worst = f"such as {values[here.argmax(), place]:g}"
        yield f"{names[place]} is outside of what the model knows in {beyond_it}, {worst}: {usual}."
