"""The cautions about clients that have too little data, or no value of a metric, in every seed or in some.

With `seed = "run"` in `[data]`, every seed may draw clients of its own: nothing about those of one seed is true of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedloom import metrics
from fedloom.data.scarcity import COUNTED, NO_TEST, SAID, SMALL_TEST, SMALL_TESTS
from fedloom.errors import InputError
from fedloom.results.common_clients import at_end, lacking, measured
from fedloom.results.comparisons import PHASES, comparisons
from fedloom.results.run_data import RunData
from fedloom.results.sentences import first_three, say
from fedloom.score_metrics import BINS

EXAMPLES_IN_A_BIN = 10  # with fewer, a perfectly calibrated model has a calibration error above 0.07: see its test


def about_data(run: RunData) -> Iterator[str]:
    """What `fedloom data describe` warns of; of clients that every seed draws, in every seed."""
    counted, stored = _counted(run), run.facts.get("cautions about the data") or ()
    # earlier versions kept what is true of the first seed, without saying so
    seed = "" if run.same_clients or run.seeds[0] in counted else f"In seed {run.seeds[0]}: "
    yield from (seed + text for text in stored)
    for what in SAID:
        if found := _scarce(counted, what):
            values = {"what": what, "counts": by_seeds(found, run.seeds)}
            yield say("caution", "no_tests" if what == NO_TEST else "scarce", **values)


def small_tests(run: RunData) -> Iterator[str]:
    """Clients whose own numbers are coarse, because they have few test examples."""
    if counted := _counted(run):
        if found := _scarce(counted, SMALL_TESTS):
            yield say("caution", "small_tests_by_seed", what=SMALL_TESTS, counts=by_seeds(found, run.seeds))
        return
    sizes = [client["test"] for client in run.clients]
    small = sum(0 < size < SMALL_TEST for size in sizes)
    if small:
        words = {"clients": "client" if len(sizes) == 1 else "clients", "have": "has" if small == 1 else "have"}
        words["seed"] = run.in_first_seed
        yield say("caution", "small_tests", small=small, all=len(sizes), needed=SMALL_TEST, **words)


def coarse_calibration(run: RunData) -> Iterator[str]:
    """Clients with too few test examples for the calibration error: chance alone makes it large, never small."""
    name, needed = "calibration_error", EXAMPLES_IN_A_BIN * BINS
    ways = {one.key for one in comparisons(run, name)} if name in run.metrics else set()
    small = [run.client_name(place) for place, one in enumerate(run.clients) if 0 < (one["test"] or 0) < needed]
    if small and any(key in PHASES for key in ways):
        pooled = say("caution", "pooled_calibration") if any(key.startswith("pooled") for key in ways) else ""
        values = {"small": len(small), "all": len(run.clients), "clients": first_three(small), "needed": needed}
        yield say("caution", "coarse_calibration", bins=BINS, seed=run.in_first_seed, pooled=pooled, **values)


def undefined(run: RunData) -> Iterator[str]:
    """Metrics that some clients do not have, such as the AUROC of a client with one class."""
    lacking: dict[tuple[str, str], list[str]] = {}  # why, and at which clients → metrics
    for name, metric in run.metrics.items():
        if without := "" if metric.is_mean else undefined_at(run, name):
            lacking.setdefault((_why_undefined(name), without), []).append(name)
    for (why, some), names in lacking.items():
        metrics_are = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
        yield say("caution", "undefined", metrics_are=metrics_are, why=why, clients=some)


def undefined_at(run: RunData, metric: str) -> str:
    """Return at how many clients a metric has no value with any algorithm, and which; empty if at none, or at all.

    Clients may lack it in some seeds only: where each seed splits the data again, and where each draws its own clients.
    """
    counted = _counted(run)
    found: dict[int, str] = {}
    if not any(run.last_round(label, "post_fit", metric) for label in run.labels):
        return ""
    for seed in run.seeds:
        found_at = [at_end(measured(run, label, seed, "post_fit", metric)) for label in run.labels]
        without = set[int]().union(*(lacking(*one) for one in found_at))
        without = without.difference(run.withheld.get(metric, ()), *(one.clients.tolist() for one, _ in found_at))
        if without:
            names = first_three([run.client_name(client) for client in sorted(without)])
            clients = counted.get(seed, {}).get("clients", len(run.clients))
            # a number of a client that one seed drew says nothing about that of another seed
            found[seed] = f"{len(without):,} of {clients:,} clients" + (f" ({names})" if run.same_clients else "")
    return by_seeds(found, run.seeds) if found else ""


def training_sizes(run: RunData) -> tuple[list[int], str]:
    """Return sizes of clients' training splits, the smallest and the largest among them, and which seed they are of."""
    if counted := _counted(run):
        return [size for one in counted.values() for size in one["train"]], ""
    return [int(client["train"] or 0) for client in run.clients], run.in_first_seed


def by_seeds(found: Mapping[int, str], seeds: Sequence[int]) -> str:
    """Say what is found in which seeds; nothing of seeds if it is the same in all.

    >>> by_seeds({1: "2 of 5", 2: "1 of 5", 4: "2 of 5"}, [1, 2, 3, 4])
    '2 of 5 in seeds 1 and 4, 1 of 5 in seed 2'
    >>> by_seeds({1: "2 of 5", 2: "2 of 5"}, [1, 2]), by_seeds({1: "2 of 5"}, [1])
    ('2 of 5 in every seed', '2 of 5')
    """
    groups: dict[str, list[int]] = {}
    for seed, text in found.items():
        groups.setdefault(text, []).append(seed)
    if len(seeds) == 1:
        return next(iter(groups))
    return ", ".join(f"{text} in {_seeds(some, seeds)}" for text, some in groups.items())


def _seeds(some: Sequence[int], seeds: Sequence[int]) -> str:
    if len(some) == len(seeds):
        return "every seed"
    if len(some) == 1:
        return f"seed {some[0]}"
    return "seeds " + (first_three([*map(str, some)]) if len(some) > 3 else " and ".join(_but_last(some)))


def _but_last(some: Sequence[int]) -> tuple[str, str]:
    return ", ".join(map(str, some[:-1])), str(some[-1])


def _counted(run: RunData) -> dict[int, dict[str, Any]]:
    """Seed → what its clients lack and how large they are, as counted in runs whose seeds draw their clients."""
    known = {seed: run.facts.get(f"{COUNTED}{seed}") for seed in run.seeds}
    return {seed: facts for seed, facts in known.items() if facts}


def _scarce(counted: Mapping[int, Mapping[str, Any]], what: str) -> dict[int, str]:
    numbers = {seed: (facts["scarce"].get(what, 0), facts["clients"]) for seed, facts in counted.items()}
    return {seed: f"{some:,} of {clients:,}" for seed, (some, clients) in numbers.items() if some}


def _why_undefined(name: str) -> str:
    """Say why a metric has no value at a client, as far as it is known."""
    try:
        numbers = metrics.of_numbers(metrics.metric(name))
        return "their test labels are all alike" if numbers else "their test examples lack a class"
    except InputError:
        return "your function returned NaN there"
