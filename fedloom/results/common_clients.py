"""At which clients algorithms can be compared: a metric may be undefined at other clients with one than with another.

A metric of your own may return NaN for some predictions. Each algorithm then has a mean over clients of its own, and
such means cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fedloom.results.run_data import RunData
from fedloom.results.run_values import ClientValues

WORDS = " (clients where all algorithms have a value)"
# a metric, and the loss beside it, which every client has that was measured
Measured = tuple[ClientValues, ClientValues]


def common_clients(run: RunData, labels: Iterable[str], seed: int, phase: str, metric: str) -> set[int] | None:
    """Return the clients at which all algorithms have a value at the end; None if they lack it at the same clients."""
    return shared([at_end(measured(run, label, seed, phase, metric)) for label in labels])


def measured(run: RunData, label: str, seed: int, phase: str, metric: str, split: str = "test") -> Measured:
    """Return what one algorithm measured at its clients."""
    values, losses = (run.client_values(label, seed, phase, name, split) for name in (metric, "loss"))
    return values, losses


def at_end(found: Measured) -> Measured:
    """Keep the last round in which anything was measured."""
    last = max(one.rounds.max(initial=0) for one in found)
    values, losses = (one.keep(one.rounds == last) for one in found)
    return values, losses


def shared(found: Sequence[Measured]) -> set[int] | None:
    """Return the clients at which all have a value in every round; None if all lack it at the same clients."""
    everybody = [{*values.clients.tolist(), *losses.clients.tolist()} for values, losses in found]
    everywhere = set.intersection(*everybody) if everybody else set[int]()  # algorithms may draw other clients
    without = [lacking(*one) & everywhere for one in found]
    kept = everywhere.difference(*without)
    return None if all(clients == everywhere - kept for clients in without) else kept


def lacking(values: ClientValues, losses: ClientValues) -> set[int]:
    """Return the clients that were measured in some round without a value of the metric."""
    most = 1 + max(one.clients.max(initial=0) for one in (values, losses))
    here, there = (one.rounds * most + one.clients for one in (losses, values))
    return {*losses.clients[~np.isin(here, there)].tolist()}


def only(values: ClientValues, clients: Iterable[int]) -> ClientValues:
    """Keep the values of some clients."""
    return values.keep(np.isin(values.clients, [*clients]))
