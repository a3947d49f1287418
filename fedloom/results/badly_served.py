"""Clients that a model serves badly, which a mean over clients hides: guessing or their own models do better there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedloom.experiment.store import OWN_MODELS
from fedloom.results.run_data import RunData
from fedloom.results.run_values import Floats
from fedloom.results.sentences import say
from fedloom.results.table import show

RARE = 0.2  # the assumed share of the rarest class where nobody says how many examples each has, as on a network
LEAST = 0.05  # a smaller gap harms few, however many test examples show it
MOST_CLIENTS, MOST_ALGORITHMS = 3, 3  # that get words of their own
RANKS = re.compile(r"c_index|auroc(_macro|_of_\d+)?")
OF_ONE_CLASS = re.compile(r"(recall|sensitivity|f1)(_macro|_of_\d+)?")


@dataclass(frozen=True)
class BadlyServed:
    """A client at which a model is worse than guessing, or than the client's own model."""

    client: int
    metric: str
    value: float
    errors: float  # the larger gap, in its standard errors
    chance: float | None  # what guessing reaches, if the model is worse than that
    own: float | None  # what the client's own model reaches, if it is known


def badly_served(run: RunData) -> dict[str, list[BadlyServed]]:
    """Label → its badly served clients. The worst come first, of labels and of clients."""
    if run.facts.get("rounds") == 0:
        return {}  # nothing was trained: all algorithms have the model that was given
    done = dict.fromkeys(label for (label, _), cell in run.cells.items() if cell["status"] == "done")
    alone = [label for label in done if _trains_alone(run, label)]
    found = {label: _of_label(run, label, alone[0] if alone else None) for label in done if label not in alone}
    return dict(sorted(((label, some) for label, some in found.items() if some), key=lambda pair: _worst(pair[1][0])))


def in_words(run: RunData, whole: RunData | None = None) -> Iterator[str]:
    """Yield a sentence for each of the worst algorithms, and one for all others.

    If these are some of the `whole` run's algorithms, clients' own models may be among the others.
    """
    found = {label: clients for label, clients in badly_served(whole or run).items() if label in run.labels}
    model = {"final": "final model", "post_fit": "models after local training"}[run.end_phase]
    seed = run.in_first_seed
    for label in list(found)[:MOST_ALGORITHMS]:
        clients = [_with_numbers(run, one) for one in found[label][:MOST_CLIENTS]]
        more = _more(len(found[label]) - MOST_CLIENTS)
        yield say("caution", "badly_served", label=label, model=model, seed=seed, clients="; ".join(clients) + more)
    if others := list(found)[MOST_ALGORITHMS:]:
        yield say("caution", "badly_served_too", labels=", ".join(others), seed=seed)


def in_short(run: RunData) -> Iterator[str]:
    """Yield one sentence that names algorithms and clients, if there are any; the cautions have the numbers."""
    named = []
    for label, clients in badly_served(run).items():
        names = ", ".join(run.client_name(one.client) for one in clients[:MOST_CLIENTS])
        named.append(f"{label} at {names}{_more(len(clients) - MOST_CLIENTS)}")
    if named:
        yield say("result", "badly_served", seed=run.in_first_seed, named="; ".join(named[:MOST_ALGORITHMS]))


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


def _of_label(run: RunData, label: str, alone: str | None) -> list[BadlyServed]:
    """The badly served clients of an algorithm, each with the first metric that shows it."""
    known = run.facts.get("labels") or {}
    held = known.get("tested", known.get("counts"))  # runs of earlier versions have the labels of all examples only
    # as many standard errors as chance alone hardly exceeds at any of the clients
    far = NormalDist().inv_cdf(1 - 0.025 / max(len(run.clients), 1))
    found: dict[int, BadlyServed] = {}
    for metric in run.metrics:
        values = run.last_means(label, run.end_phase, metric)
        of_own = run.last_means(alone, run.end_phase, metric) if alone else {}
        for client, value in values.items():
            tested = run.clients[client]["test"] if client < len(run.clients) else 0
            counts = np.array(held[client], dtype=np.float64) if held and client < len(held) else None
            error = standard_error(metric, tested, counts) if tested else None
            if client in found or error is None:
                continue
            guess, own = chance(metric, counts), of_own.get(client)
            below = 0.0 if guess is None else guess - value
            # two numbers of a client vary more than one, although they are about the same examples
            behind = 0.0 if own is None else (own - value) / math.sqrt(2)
            is_below, is_behind = (gap > max(LEAST, far * error) for gap in (below, behind))
            if is_below or is_behind:
                gap = max(below, behind) / error
                found[client] = BadlyServed(client, metric, value, gap, guess if is_below else None, own)
    return sorted(found.values(), key=_worst)


def _worst(one: BadlyServed) -> tuple[bool, float]:
    return one.chance is None, -one.errors


def _trains_alone(run: RunData, label: str) -> bool:
    """Whether clients train models of their own and send nothing, as with `local`."""
    costs = [run.costs(*cell) for cell in run.cells if cell[0] == label]
    return label in (run.facts.get(OWN_MODELS) or ()) and not any(cost.bytes_up.any() for cost in costs)


def _with_numbers(run: RunData, one: BadlyServed) -> str:
    kind = run.metric(one.metric).number_format
    said = [f"{one.metric} {show(one.value, kind)}"]
    said += [] if one.chance is None else [f"guessing has {show(one.chance, kind)}"]
    said += [] if one.own is None else [f"its own model {show(one.own, kind)}"]
    return f"{run.client_name(one.client)} ({', '.join(said)}, {run.clients[one.client]['test']:,} test examples)"


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
