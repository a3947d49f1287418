"""Look for probable mistakes in a table: one class, a feature that gives the label away, other units, copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fedloom.data.federation import Federation

Numbers = NDArray[np.float64]
MOST = 10_000  # rows that are looked at
WIDEST = 300  # features; a wider table is not looked at
FEWEST = 30  # with fewer rows, anything may be chance
GIVEN_AWAY = 0.999  # an AUROC, a share of the variance or a correlation that no honest feature has
OTHER_UNIT = 10.0  # by this factor, both the size and the spread of a feature differ at one client
FAR = 30.0  # standard deviations from the mean: heavy tails reach 20
COPIES = 0.05  # a share of repeated rows
MARKS = tuple(sign * number for number in (99.0, 999.0, 9999.0, 99999.0) for sign in (-1, 1))  # of missing values


def suspicions(federation: Federation) -> Iterator[str]:
    """Yield a sentence about each thing that is probably a mistake. On a network there is no data here to look at."""
    if len(federation.classes) == 1 and len(federation.y):
        yield f"The label has one class only ({federation.classes[0]}): there is nothing to learn."
    columns = federation.preprocessing.columns
    numeric = [not column.categories for column in columns for _ in column.features]
    if not any(numeric) or federation.x.dim() != 2 or len(federation.x) < FEWEST or len(numeric) > WIDEST:
        return
    rows = np.arange(0, len(federation.x), len(federation.x) // MOST + 1)
    owner = np.searchsorted(federation.offsets, rows, side="right") - 1
    values, y = _as_measured(federation, rows, owner), federation.y[rows].double().numpy()
    for place in np.flatnonzero(numeric).tolist():
        name, one = federation.features[place], values[:, place]
        yield from _numbers_rows(name, one, len(federation.x))
        yield from _marks_gaps(name, one)
        yield from _other_unit(federation, name, one, owner)
    for place, name in enumerate(federation.features):
        yield from _gives_away(name, values[:, place], y, len(federation.classes))
    yield from _copies(values[:, numeric], np.column_stack([values, y]))


def _as_measured(federation: Federation, rows: NDArray[np.int64], owner: NDArray[np.int64]) -> Numbers:
    """Return features in their own units; missing values may be means."""
    values: Numbers = federation.x[rows].double().numpy()
    fitted = federation.preprocessing
    for client in np.unique(owner) if fitted.clients else [-1]:
        statistics = fitted.statistics(federation.name(int(client)) if fitted.clients else None)
        if statistics is not None:
            here = owner == client if fitted.clients else slice(None)
            mean, std = (each.numpy() for each in statistics)
            values[here] = np.nan_to_num(values[here] * std, posinf=0.0, neginf=0.0) + mean
    return values


def _numbers_rows(name: str, one: Numbers, examples: int) -> Iterator[str]:
    """A row number as a feature: a model can learn the order of the file from it."""
    whole = np.unique(np.round(one))
    if len(whole) == len(one) == examples == whole[-1] - whole[0] + 1 and np.abs(one - np.round(one)).max() < 0.05:
        yield f"{name} numbers the rows, from {whole[0]:.0f} to {whole[-1]:.0f}: leave it out with drop."


def _marks_gaps(name: str, one: Numbers) -> Iterator[str]:
    """A number such as -999 that stands for a missing value: it is far from all others."""
    for mark in MARKS:
        here = np.abs(one - mark) < 1e-4 * abs(mark)
        rest = one[~here]
        if here.any() and len(rest) and np.abs(rest - mark).min() > max(np.ptp(rest), 1.0):
            count = f"{here.sum():,} row" + ("s" if here.sum() > 1 else "")
            advice = f'if it means missing, set missing = {{ "{mark:g}" = nan }} in [data]'
            yield f"{name} is {mark:g} in {count}, far from all other values: {advice}."


def _other_unit(federation: Federation, name: str, one: Numbers, owner: NDArray[np.int64]) -> Iterator[str]:
    """A client whose values are larger or smaller than those of every other, by a factor: perhaps another unit."""
    if federation.preprocessing.clients or not 3 <= federation.clients <= MOST:
        return  # every client scales features by its own statistics, so units do not matter
    known = [one[owner == client] for client in range(federation.clients)]
    if min(map(len, known)) < 10:
        return
    sizes = np.array([[np.median(np.abs(part)), np.subtract(*np.percentile(part, [75, 25]))] for part in known])
    if not (sizes > 0).all():
        return
    for client in range(federation.clients):
        ratio = sizes[client] / np.delete(sizes, client, axis=0)  # to every other client: of size and of spread
        factor = ratio.min() if ratio.min() > 1 else 1 / ratio.max()
        if factor > OTHER_UNIT:
            side = "larger" if ratio.min() > 1 else "smaller"
            times = f"{np.median(np.maximum(ratio, 1 / ratio)):,.0f} times {side}"
            where = federation.name(client)
            yield f"{name} is about {times} at {where} than at every other client: is it in another unit there?"


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


def _copies(measured: Numbers, rows: Numbers) -> Iterator[str]:
    """Repeated rows, in a table with a column of measurements that hardly repeat by chance."""
    distinct = len(np.unique(rows, axis=0))
    varied = max(len(np.unique(column)) for column in measured.T)
    copies = len(rows) - distinct
    if copies > COPIES * len(rows) and varied > distinct / 2:
        seen = f"{copies:,} of {len(rows):,} rows repeat another one"
        yield f"{seen}. Where one is for training and its copy for a test, results look better than they are."


def unusual(names: Sequence[str], values: Numbers, mean: Numbers, std: Numbers) -> Iterator[str]:
    """Yield a sentence for each feature with values that are far from all that a model was trained on."""
    far = np.abs(values - mean) > FAR * std
    for place in np.flatnonzero(far.any(axis=0)).tolist():
        worst = values[np.abs(values[:, place] - mean[place]).argmax(), place]
        rows = f"{far[:, place].sum():,} of {len(values):,} rows"
        usual = f"the model was trained on {mean[place]:.4g} ± {std[place]:.2g}"
        yield f"{names[place]} is far outside of what is usual in {rows}, such as {worst:g}: {usual}."
