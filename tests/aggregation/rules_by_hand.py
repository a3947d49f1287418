"""Robust rules written from the papers, with loops instead of tensor operations."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedloom.aggregation import robust

Vectors = NDArray[np.float64]  # one row per client
WIDTH = 5
seeds = st.integers(0, 2**32 - 1)


def rule(name: str, **parameters: Any) -> Callable[[Any, Any], Any]:
    return robust.RULES[name](**parameters)


def apply(name: str, x: Vectors, weights: Vectors | None = None, **parameters: Any) -> Vectors:
    """A rule on rows of numbers, which it sees as trees of two leaves."""
    stacked = {"a": torch.from_numpy(x[:, :3].copy()), "b": torch.from_numpy(x[:, 3:].copy()).reshape(len(x), 1, -1)}
    given_weights = torch.ones(len(x), dtype=torch.float64) if weights is None else torch.from_numpy(weights)
    before = {leaf: stacked[leaf].clone() for leaf in stacked}
    found = rule(name, **parameters)(stacked, given_weights)
    assert all(torch.equal(before[leaf], stacked[leaf]) for leaf in stacked), "the rule changed its input"
    assert found["a"].shape == (3,)
    assert found["b"].shape == (1, WIDTH - 3)
    return np.concatenate([found["a"].numpy(), found["b"].numpy().ravel()])


def drawn(seed: int, clients: int, scale: float = 1.0) -> Vectors:
    return np.random.default_rng(seed).normal(size=(clients, WIDTH)) * scale


def coarse(seed: int, clients: int) -> Vectors:
    """Many equal numbers."""
    return np.random.default_rng(seed).integers(-2, 3, size=(clients, WIDTH)).astype(np.float64)


def drawn_weights(seed: int, clients: int) -> Vectors:
    return np.random.default_rng(seed + 1).integers(1, 30, size=clients).astype(np.float64)


# --- brute force


def middle(values: list[float]) -> float:
    values, half = sorted(values), len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def median(x: Vectors) -> Vectors:
    return np.array([middle(list(column)) for column in x.T])


def trimmed_mean(x: Vectors, trim: int) -> Vectors:
    return np.array([sum(sorted(column)[trim : len(column) - trim]) / (len(column) - 2 * trim) for column in x.T])


def krum_scores(x: Vectors, byzantine: int) -> list[float]:
    """For each change the sum of its squared distances to the n − f − 2 nearest others."""
    near = max(len(x) - byzantine - 2, 1)
    return [
        sum(sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(len(x)) if j != i)[:near]) for i in range(len(x))
    ]


def krum(x: Vectors, byzantine: int) -> Vectors:
    return x[int(np.argmin(krum_scores(x, byzantine)))]


def multi_krum(x: Vectors, byzantine: int, keep: int | None = None) -> Vectors:
    best = np.argsort(krum_scores(x, byzantine), kind="stable")[: keep or len(x) - byzantine]
    return x[best].mean(0)


def bulyan(x: Vectors, byzantine: int) -> Vectors:
    rest, chosen = list(range(len(x))), []
    while len(chosen) < len(x) - 2 * byzantine:
        chosen.append(rest.pop(int(np.argmin(krum_scores(x[rest], byzantine)))))
    return bulyan_of(x, chosen, byzantine)


def bulyan_of(x: Vectors, chosen: Iterable[int], byzantine: int) -> Vectors:
    """Bulyan's second half: for each coordinate the mean of the θ − 2f chosen values nearest to their median."""
    columns = []
    for column in x[list(chosen)].T:
        centre = middle(list(column))
        nearest = sorted(column, key=lambda value, centre=centre: abs(value - centre))
        nearest = nearest[: len(nearest) - 2 * byzantine]
        columns.append(sum(nearest) / len(nearest))
    return np.array(columns)


def chosen_by_bulyan(x: Vectors, byzantine: int) -> set[frozenset[int]]:
    """All that Bulyan's first half may choose, if ties are broken in any way."""
    found = {frozenset[int]()}
    for _ in range(len(x) - 2 * byzantine):
        longer = set()
        for chosen in found:
            rest = [i for i in range(len(x)) if i not in chosen]
            scores = krum_scores(x[rest], byzantine)
            longer |= {chosen | {i} for i, score in zip(rest, scores, strict=True) if score <= min(scores) + 1e-12}
        found = longer
    return found


def shortened(row: Vectors, longest: float) -> Vectors:
    length = float(np.sqrt((row**2).sum()))
    return row if length <= longest else row / length * longest


def centred_clipping(x: Vectors, radius: float, iterations: int) -> Vectors:
    centre = np.zeros(x.shape[1])
    for _ in range(iterations):
        centre = centre + sum(shortened(row - centre, radius) for row in x) / len(x)
    return centre


def norm_bounding(x: Vectors, weights: Vectors, bound: float) -> Vectors:
    short = [shortened(row, bound) for row in x]
    return sum(weight * row for weight, row in zip(weights, short, strict=True)) / weights.sum()


def sum_of_distances(x: Vectors, weights: Vectors, point: Vectors) -> float:
    return float(sum(weight * np.linalg.norm(row - point) for weight, row in zip(weights, x, strict=True)))


def weighted_distance_optimum(x: Vectors, weights: Vectors) -> float:
    from scipy.optimize import minimize

    starts = [x.mean(0), *x]
    return min(
        sum_of_distances(x, weights, np.array(minimize(lambda p: sum_of_distances(x, weights, p), begin, tol=1e-12).x))
        if number == 0
        else sum_of_distances(x, weights, begin)
        for number, begin in enumerate(starts)
    )


EVERY_RULE: dict[str, dict[str, Any]] = {
    "median": {},
    "trimmed_mean": {"trim": 2},
    "krum": {"byzantine": 1},
    "multi_krum": {"byzantine": 1},
    "bulyan": {"byzantine": 1},
    "geometric_median": {"iterations": 500, "tolerance": 1e-12},
    "centred_clipping": {"radius": 1.0, "iterations": 5},
    "norm_bounding": {"bound": 1.0},
}
CENTRED = {"centred_clipping", "norm_bounding"}  # no change at all is special for them: they are not translated
