"""What knowing nothing reaches at a client, and how far chance takes a number that rests on few test examples."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from fedloom.data.describe import LABELS_OF_SEED
from fedloom.results.run_data import RunData
from fedloom.results.run_values import Floats

RARE = 0.2  # the assumed share of the rarest class where nobody says how many examples each has, as on a network
RANKS = re.compile(r"c_index|auroc(_macro|_of_\d+)?")
OF_ONE_CLASS = re.compile(r"(recall|sensitivity|f1|auprc)(_macro|_of_\d+)?")


def far(clients: int) -> float:
    """Return how many standard errors chance alone rarely exceeds, at any of this number of clients."""
    return NormalDist().inv_cdf(1 - 0.025 / max(clients, 1))


def by_chance(run: RunData, examples: float | None, by_seed: Sequence[float]) -> float | None:
    """Return how far chance alone rarely takes a client's difference, a mean over seeds; None if that is not known.

    `examples` is its variance over test examples. The seeds may share these, so more seeds are no more examples.
    """
    seeds = statistics.variance(by_seed) / len(by_seed) if len(by_seed) > 1 else 0.0
    return None if examples is None else far(len(run.clients)) * math.sqrt(examples + seeds)


def variance(run: RunData, metric: str, client: int, value: float) -> float | None:
    """Return how much a model's number varies with a client's test examples if it is truly `value`; None if unknown."""
    tested, info = int(run.clients[client]["test"] or 0), run.metric(metric)
    if not tested:
        return None
    if info.is_mean and info.share:
        return max(value * (1 - value), 0.0) / tested
    error = standard_error(metric, tested, labels_tested(run, client), value)
    return None if error is None else error**2


def labels_tested(run: RunData, client: int) -> Floats | None:
    """Return how many test examples of each class a client has, on average over seeds; None if that is unknown."""
    known = run.facts.get("labels") or {}
    every = [{**known, **(run.facts.get(f"{LABELS_OF_SEED}{seed}") or {})} for seed in run.seeds_of_clients]
    tested = [one.get("tested", one.get("counts")) for one in every]  # earlier versions have the latter only
    held = [counts[client] for counts in tested if counts and client < len(counts)]
    return np.mean(held, axis=0, dtype=np.float64) if held else None


def chance(metric: str, counts: Floats | None) -> float | None:
    """Return what knowing nothing reaches at a client. `counts` are its test examples of each class, None if unknown.

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


def chance_in_words(metric: str) -> str:
    """Say what reaches the number of `chance`: readers take guessing for choosing among all classes alike.

    >>> chance_in_words("accuracy"), chance_in_words("auroc_of_2")
    ("always predicting the client's most frequent label", 'guessing')
    """
    constant = {
        "accuracy": "the client's most frequent label",
        "balanced_accuracy": "one label",
        "r2": "the client's mean",
    }
    return f"always predicting {constant[metric]}" if metric in constant else "guessing"


def standard_error(metric: str, tested: int, counts: Floats | None, value: float) -> float | None:
    """Return the standard error of a metric's `value` on `tested` examples, on the large side; None if it is not known.

    The test examples are taken to have the classes in the shares of `counts`.
    """
    if metric == "mae":  # absolute errors spread about as much as their mean; less if errors are normal
        return value / math.sqrt(tested)
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
