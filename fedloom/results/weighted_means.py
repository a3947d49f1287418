"""The caution that another algorithm leads if clients count by their test examples: in a mean, each counts once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedloom.results.comparisons import PHASES, Comparison, best_first, main_comparison
from fedloom.results.run_data import RunData
from fedloom.results.sentences import say
from fedloom.results.table import show


def another_leads_by_examples(run: RunData) -> Iterator[str]:
    """Say which algorithm leads by examples if it is another one than by clients."""
    main = main_comparison(run)
    if main is None or main.key not in PHASES or not main.metric.is_mean or main.rule != "final":
        return
    if run.hides_sizes or not run.same_clients:
        return
    weighted = {label: _by_examples(run, label, main) for label in main.values}
    if len(weighted) < 2 or not all(weighted.values()):
        return
    clients, examples = (best_first(run, one) for one in (main, Comparison(main.key, main.metric, weighted)))
    shown = {
        label: show(float(np.mean([*weighted[label].values()])), main.metric.number_format)
        for label in (examples[0], clients[0])
    }
    if shown[examples[0]] != shown[clients[0]]:
        sizes = sorted(int(client["test"] or 0) for client in run.clients)
        yield say(
            "caution",
            "another_leads",
            sizes=f"{sizes[0]:,} to {sizes[-1]:,}",
            first=f"{examples[0]} ({shown[examples[0]]})",
            other=f"{clients[0]} ({shown[clients[0]]})",
        )


def _by_examples(run: RunData, label: str, main: Comparison) -> dict[int, float]:
    """Seed → the mean over clients, each by its number of test examples."""
    found = {}
    for seed in main.values[label]:
        last = run.client_values(label, seed, PHASES[main.key], main.metric.name).last_round()
        known = last.keep(last.clients < len(run.clients))
        sizes = np.array([run.clients[client]["test"] or 0 for client in known.clients.tolist()], dtype=np.float64)
        if sizes.any():
            found[seed] = float(np.average(known.values, weights=sizes))
    return found
