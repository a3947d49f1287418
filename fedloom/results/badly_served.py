"""Clients that a model serves badly, which means hide: a constant answer or their own models do better there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fedloom.results.against_alone import finished, gains, learning_alone
from fedloom.results.client_chance import chance, chance_in_words, far, labels_tested, standard_error
from fedloom.results.run_data import RunData
from fedloom.results.sentences import say
from fedloom.results.table import show

LEAST = 0.05  # a smaller gap harms few, however many test examples show it
MOST_CLIENTS, MOST_ALGORITHMS = 3, 3  # that get words of their own


@dataclass(frozen=True)
class BadlyServed:
    """A client at which a model is worse than one that knows nothing, or than the client's own model."""

    client: int
    metric: str
    value: float
    errors: float  # the larger gap, in its standard errors
    chance: float | None  # what a model that knows nothing reaches, if the model is worse than that
    own: float | None  # what the client's own model reaches, if it is known


def badly_served(run: RunData) -> dict[str, list[BadlyServed]]:
    """Label → its badly served clients. The worst come first, of labels and of clients."""
    if run.facts.get("rounds") == 0:
        return {}  # nothing was trained: all algorithms have the model that was given
    done, alone = finished(run), learning_alone(run)
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
        serve = "serve" if len(others) > 1 else "serves"
        yield say("caution", "badly_served_too", labels=", ".join(others), serve=serve, seed=seed)


def in_short(run: RunData) -> Iterator[str]:
    """Yield one sentence that names algorithms and clients, if there are any; the cautions have the numbers."""
    named = []
    for label, clients in badly_served(run).items():
        names = ", ".join(run.client_name(one.client) for one in clients[:MOST_CLIENTS])
        named.append(f"{label} at {names}{_more(len(clients) - MOST_CLIENTS)}")
    if named:
        yield say("result", "badly_served", seed=run.in_first_seed, named="; ".join(named[:MOST_ALGORITHMS]))


def _of_label(run: RunData, label: str, alone: str | None) -> list[BadlyServed]:
    """The badly served clients of an algorithm, each with the first metric that shows it."""
    found: dict[int, BadlyServed] = {}
    for metric in run.metrics:
        values = run.last_means(label, run.end_phase, metric)
        of_own = run.last_means(alone, run.end_phase, metric) if alone else {}
        against = gains(run, label, alone, metric) if alone else {}
        for client, value in values.items():
            tested = run.clients[client]["test"] if client < len(run.clients) else 0
            counts = labels_tested(run, client)
            error = standard_error(metric, tested, counts, value) if tested else None
            if client in found or error is None:
                continue
            guess, own = chance(metric, counts), of_own.get(client)
            below = 0.0 if guess is None else guess - value
            # two numbers of a client vary more than one, although they are about the same examples
            sign = 1 if run.metric(metric).higher_is_better else -1
            behind = 0.0 if own is None else sign * (own - value) / math.sqrt(2)
            is_below = below > max(LEAST, far(len(run.clients)) * error)
            least = LEAST if metric != "mae" else LEAST * value  # which has the labels' units
            is_behind = behind > least and client in against and against[client].told_apart  # as its table says
            if is_below or is_behind:
                gap = max(below, behind) / error
                found[client] = BadlyServed(client, metric, value, gap, guess if is_below else None, own)
    return sorted(found.values(), key=_worst)


def _worst(one: BadlyServed) -> tuple[bool, float]:
    return one.chance is None, -one.errors


def _with_numbers(run: RunData, one: BadlyServed) -> str:
    kind = run.metric(one.metric).number_format
    said = [f"{run.metric(one.metric).title} {show(one.value, kind)}"]
    said += [] if one.chance is None else [f"{chance_in_words(one.metric)} has {show(one.chance, kind)}"]
    said += [] if one.own is None else [f"its own model {show(one.own, kind)}"]
    return f"{run.client_name(one.client)} ({', '.join(said)}, {run.clients[one.client]['test']:,} test examples)"


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
