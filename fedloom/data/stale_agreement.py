"""Says where data no longer fits what several sites agreed on: their tables have changed, or others are here."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.federation import Federation
from fedloom.data.preprocessing import Preprocessing

Numbers = NDArray[np.float64]
SHIFTED = 0.1  # standard deviations between the mean here and the one that was agreed on
STRETCHED = 1.5  # by this factor, the spread here is another one
CERTAIN = 5.0  # standard errors: other training rows of the same tables differ by less
NEVER_VARIED = 1.0  # stands for the deviation of a feature that had one value when sites agreed
SURELY = 10.0  # rows that would have a category, were it as frequent as when sites agreed
MOST_NAMED = 3

AGREE_AGAIN = "Agree again: `fedloom data summarize` at each site, then `fedloom data agree`."


def stale(
    federation: Federation,
    rows: NDArray[np.int64],
    values: Numbers,
    known: NDArray[np.bool_],
    explained: Collection[str] = (),
) -> Iterator[str]:
    """Yield a sentence if the `values` of these `rows`, in their own units, are not those that sites agreed on.

    One client may well be unlike all of them together, and so may a site, however many clients it has. Features that
    are `explained`, such as by another unit, have a sentence already.
    """
    agreed = federation.agreed
    if agreed is None or not agreed.mean or federation.clients < 2:
        return
    # sites agree on what their training rows have
    train = np.isin(rows, torch.cat([federation.indices(client, "train") for client in range(federation.clients)]))
    found: list[str] = []
    place = 0
    for column in agreed.columns:
        for feature in column.features:
            if column.categories and not column.embedded:
                found += _vanished(feature, agreed, place, values[train, place])
            elif not column.categories and feature not in explained:
                here = known[:, place]
                found += _moved(feature, agreed, place, values[here, place], train[here])
            place += 1
    if found:
        more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        yield (
            f"The data is not what the sites agreed on: {'; '.join(found[:MOST_NAMED])}{more}. Their tables have "
            f"changed since, or these are others. {AGREE_AGAIN}"
        )


def _vanished(feature: str, agreed: Preprocessing, place: int, values: Numbers) -> Iterator[str]:
    expected = agreed.mean[place] * len(values)
    if expected > SURELY and not (values > 0.5).any():
        yield f"nobody has {feature}, and {agreed.mean[place]:.0%} had it"


def _moved(feature: str, agreed: Preprocessing, place: int, values: Numbers, train: NDArray[np.bool_]) -> Iterator[str]:
    """Compare training values with what was agreed on.

    The same tables may be split differently, so all their values say how far training values can be apart by chance: a
    few large ones, which another split has elsewhere, may be most of a spread.
    """
    mean, std, some = agreed.mean[place], agreed.std[place], values[train]
    if len(some) < 2 or not math.isfinite(std) or std == NEVER_VARIED or not np.ptp(values):
        return
    here, spread = float(some.mean()), float(some.std())
    variance, error = float(values.var()), CERTAIN / math.sqrt(len(some))
    kurtosis = float(((values - values.mean()) ** 4).mean()) / variance**2
    moved = abs(here - mean) > max(SHIFTED * std, error * math.sqrt(variance))
    other_spread = spread > 0 and abs(math.log(spread / std)) > math.log(STRETCHED)
    if moved or (other_spread and abs(spread**2 - std**2) > error * variance * math.sqrt(kurtosis - 1)):
        yield f"{feature} is {here:.4g} ± {spread:.2g} here, and was {mean:.4g} ± {std:.2g}"
