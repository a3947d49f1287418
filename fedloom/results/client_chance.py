"""What guessing reaches at a client, and how far chance takes a number that rests on few test examples."""

from __future__ import annotations

import math
import re
from statistics import NormalDist

import numpy as np

from fedloom.results.run_data import RunData
from fedloom.results.run_values import Floats

RARE = 0.2  # the assumed share of the rarest class where nobody says how many examples each has, as on a network
RANKS = re.compile(r"c_index|auroc(_macro|_of_\d+)?")
OF_ONE_CLASS = re.compile(r"(recall|sensitivity|f1)(_macro|_of_\d+)?")


def far(clients: int) -> float:
    """Return how many standard errors chance alone rarely exceeds, at any of this number of clients."""
    return NormalDist().inv_cdf(1 - 0.025 / max(clients, 1))


def labels_tested(run: RunData, client: int) -> Floats | None:
    """Return how many test examples of each class a client has; None if that is unknown."""
    known = run.facts.get("labels") or {}
    held = known.get("tested", known.get("counts"))  # runs of earlier versions have the labels of all examples only
    return np.array(held[client], dtype=np.float64) if held and client < len(held) else None


def chance(metric: str, counts: Floats | None) -> float | None:
    """Return what guessing reaches at a client. `counts` are its test examples of each class; None means unknown.

    >>> [chance(name, np.array([30.0, 10.0])) for name in ("auroc", "accuracy", "balanced_accuracy", "r2", "f1")]
    [0.5, 0.75, 0.5, 0.0, None]
    """
    if RANKS.fullmatch(metric):
        return 0.5
    if metric == "r2":  # always predicting the client's own mean
        return 0.0
    if counts is None or not counts.any():
        return None
    known = {"accuracy": counts.max() / counts.sum(), "balanced_accuracy": 1 / np.count_nonzero(counts)}
    return float(known[metric]) if metric in known else None


def standard_error(metric: str, tested: int, counts: Floats | None) -> float | None:
    """Return the standard error of a metric on `tested` examples, on the large side; None if it is not known.

    The test examples are taken to have the classes in the shares of `counts`.
    """
    shares = np.array([RARE, 1 - RARE]) if counts is None or not counts.any() else counts[counts > 0] / counts.sum()
    sizes = np.maximum(shares * tested, 1)
    rarest = float(sizes.min())
    if RANKS.fullmatch(metric):  # the variance of Mann and Whitney's U, of a score that says nothing
        return math.sqrt((tested + 1) / (12 * rarest * max(tested - rarest, 1)))
    if metric == "balanced_accuracy":
        return float(np.sqrt((0.25 / sizes).sum())) / len(sizes)
    if OF_ONE_CLASS.fullmatch(metric):
        return 0.5 / math.sqrt(rarest)
    return {"accuracy": 0.5, "r2": 1.0}[metric] / math.sqrt(tested) if metric in ("accuracy", "r2") else None
