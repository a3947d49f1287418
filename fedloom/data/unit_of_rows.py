"""Compare a column of new rows as a whole with what a model was trained on: all of it may be in another unit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedloom.data.plausibility import ALIKE, FEWEST, FEWEST_KNOWN, OTHER_UNIT, Numbers

CERTAIN = 3.0  # standard errors between the means, since a few rows of a skewed column are often much smaller


def other_unit(name: str, values: Numbers, mean: float, std: float, rows: str = "rows") -> Iterator[str]:
    """Yield a sentence if a column is so much smaller or larger than in training that it may be in another unit.

    `mean` and `std` are those of the training rows, and missing values are nan. `rows` says what these examples are.
    """
    known = values[np.isfinite(values)]
    if len(known) < FEWEST_KNOWN or not (np.isfinite([mean, std]).all() and std > 0 and np.ptp(known) > 0):
        return
    middle, spread = float(known.mean()), float(known.std())
    size = np.hypot(mean, std)
    ratio = np.log([np.hypot(middle, spread) / size, spread / std])  # of size and of spread: a unit changes both
    typical = np.median(np.abs(known))  # 0 of most rows is 0 in every unit
    if ratio.min() > np.log(OTHER_UNIT):
        found = typical > OTHER_UNIT * size  # not only a few rows: one in twenty may be, at most
    elif ratio.max() < -np.log(OTHER_UNIT) and typical > 0:
        apart = (abs(mean) - np.sign(mean) * middle) * np.sqrt(len(known)) / std
        found = (np.ptp(ratio) < np.log(ALIKE) and apart > CERTAIN) or _near_zero(known, mean, std)
    else:
        return
    if found:
        times = f"{np.exp(abs(ratio[0])):,.0f} times {'larger' if ratio[0] > 0 else 'smaller'}"
        usual = f"{middle:.3g}, trained on {mean:.3g} ± {std:.3g}"
        yield f"{name} is about {times} in these {rows} than in training ({usual}): another unit?"


def _near_zero(known: Numbers, mean: float, std: float) -> bool:
    """Whether values on both sides of 0 are all much nearer to it than in training, where means say nothing."""
    sides = min((known < 0).mean(), (known > 0).mean())
    return bool(len(known) >= FEWEST and abs(mean) < std and sides > 0.2 and np.abs(known).max() < std / 2)
