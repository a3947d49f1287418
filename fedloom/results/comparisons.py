"""The numbers that algorithms are compared by: one for each algorithm and seed, for each way of measuring."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fedloom.results import headline
from fedloom.results.common_clients import WORDS, at_end, measured, only, shared
from fedloom.results.result import CellResult
from fedloom.results.run_data import RunData
from fedloom.results.run_values import MetricInfo
from fedloom.results.statistics import spread

# the first of these that has values is the main comparison: the model that predict and export give comes first
TITLES = {
    "server_test": "global model, server's test data",
    "test": "final model, own test",
    "post_fit_test": "after local training, own test",
    "pre_fit_test": "before local training, own test",
    "universal": "after local training, universal test",
    "pooled_test": "final model, all tests pooled",
    "pooled_post_fit_test": "after local training, own tests pooled",
    "pooled_pre_fit_test": "before local training, all tests pooled",
    "server_validation": "global model, server's validation data",
}
UNTESTED = {"validation": "final model, own validation data"}  # only where nothing was tested, such as to tune
UNITED = {"server_test": "global model, all clients' tests", "server_validation": "global model, all validation data"}
_OWN_TESTS = {"post_fit_test": "post_fit", "pre_fit_test": "pre_fit", "test": "final"}
# the phases of the keys that are about clients
PHASES = {**_OWN_TESTS, **{f"pooled_{key}": phase for key, phase in _OWN_TESTS.items()}}
HERE = " on these test examples"  # what a claim must add if no seed has others
_BY_CLIENT = {**_OWN_TESTS, "universal": "universal"}  # the keys whose numbers are means over clients
ABOUT_CLIENTS = {**PHASES, **_BY_CLIENT}


@dataclass(frozen=True)
class Comparison:
    """One way of measuring a metric, with its value for each algorithm and seed."""

    key: str  # of TITLES
    metric: MetricInfo
    values: dict[str, dict[int, float]]
    rule: str = "final"
    drawn: str = ""  # says so if the numbers are about some of the clients only
    common: dict[int, int] = field(default_factory=dict)  # seed → at how many clients all have a value, if not alike
    one_split: bool = False  # whether all seeds test on the same examples
    sparse: bool = False  # whether not every round was measured
    measured_on: str = ""  # which model on which examples, where the key alone does not tell

    @property
    def way(self) -> str:
        """How the metric was measured, in words."""
        rounds = "measured rounds" if self.sparse else "rounds"
        words = {"final": "", "best": ", best round (chosen on the same data)"}
        when = words.get(self.rule, f", mean of the last {self.rule.removeprefix('last:')} {rounds}")
        common = WORDS if self.common else ""
        when = "" if self.key in ("universal", "test", "pooled_test") else when
        return (self.measured_on or {**TITLES, **UNTESTED}[self.key]) + self.drawn + common + when

    @property
    def title(self) -> str:
        """The metric and how it was measured, in words."""
        return f"{self.metric.title}, {self.way}"

    @property
    def where(self) -> str:
        """What a claim about several seeds must add: which examples it is about."""
        here = HERE.replace("test", "validation") if self.key in UNTESTED else HERE
        return here if self.one_split else ""


def comparisons(run: RunData, metric: str) -> list[Comparison]:
    """All ways in which a metric was measured at the end. Cells that are not finished are left out."""
    info, found = run.metric(metric), list[Comparison]()
    for key in (*TITLES, *UNTESTED):
        if (key.startswith("pooled") and info.is_mean) or (key in UNTESTED and found):
            continue  # the mean over clients says the same
        values: dict[str, dict[int, float]] = {}
        for cell in finished(run.result.runs):
            value = headline_of(run, cell, key, metric, run.result.rule)
            if value is not None:
                values.setdefault(cell.algorithm, {})[cell.seed] = value
        if values:
            drawn = run.drawn(ABOUT_CLIENTS[key]) if key in ABOUT_CLIENTS else ""
            sparse = run.evaluation.get("every", 1) != 1
            one = Comparison(key, info, values, run.result.rule, drawn, one_split=run.has_one_split, sparse=sparse)
            found.append(_at_common_clients(run, replace(one, measured_on=measured_on(run, key))))
    return [one for one in found if one.values]


def measured_on(run: RunData, key: str) -> str:
    """Which model was measured on which examples: a server without data measures on those of all clients."""
    united = key in UNITED and not run.server_holds(key.removeprefix("server_"))
    return UNITED[key] if united else {**TITLES, **UNTESTED}[key]


def _at_common_clients(run: RunData, comparison: Comparison) -> Comparison:
    """The comparison over clients at which all algorithms have a value, in seeds where some lack it at other clients.

    A seed without a common client is left out.
    """
    phase, metric = _BY_CLIENT.get(comparison.key), comparison.metric.name
    labels = [label for label in comparison.values if phase != "universal" or not run.is_pooled(label)]
    if phase is None or comparison.metric.is_mean or len(labels) < 2:
        return comparison
    values, common = {label: dict(seeds) for label, seeds in comparison.values.items()}, {}
    done = {(cell.algorithm, cell.seed) for cell in finished(run.result.runs)}
    for seed in run.seeds:
        found = {label: measured(run, label, seed, phase, metric) for label in labels if (label, seed) in done}
        if comparison.rule == "final":
            found = {label: at_end(one) for label, one in found.items()}
        kept = shared([*found.values()])
        if kept is None:
            continue
        common[seed] = len(kept)
        for label, (known, _) in found.items():
            values[label].pop(seed, None)
            if kept:
                means = only(known, kept).by_round().mean
                values[label][seed] = headline.of_rounds(means, comparison.rule, comparison.metric.higher_is_better)
    return replace(comparison, values={label: seeds for label, seeds in values.items() if seeds}, common=common)


def finished(cells: Iterable[CellResult]) -> list[CellResult]:
    """The cells whose numbers may be compared and averaged: others are not at the end, and each at another round."""
    return [cell for cell in cells if cell.status == "done"]


def headline_of(run: RunData, cell: CellResult, key: str, metric: str, rule: str) -> float | None:
    """The headline number of a cell; that of the pooled model is about the clients that the others are about."""
    value = cell.headline.get(f"{key}_{metric}")
    if value is not None and key in PHASES and run.is_pooled(cell.algorithm):
        return at_clients(run, cell.algorithm, cell.seed, key, metric, rule)
    return value


def at_clients(run: RunData, label: str, seed: int, key: str, metric: str, rule: str) -> float | None:
    """The headline number of the pooled model at the clients that the other algorithms are measured at."""
    if key.startswith("pooled"):
        rounds, values = run.pooled_values(label, seed, PHASES[key], metric)
    else:
        stats = run.client_values(label, seed, PHASES[key], metric).by_round()
        rounds, values = stats.index, stats.mean
    if not len(rounds):
        return None
    return headline.of_rounds(values, rule, run.metric(metric).higher_is_better)


def main_comparison(run: RunData) -> Comparison | None:
    """The comparison that a report starts with: the global model on the server's test data, else the final model."""
    return next((found[0] for metric in run.metrics if (found := comparisons(run, metric))), None)


def in_common_seeds(run: RunData, comparison: Comparison) -> Comparison:
    """The comparison in the seeds that all algorithms have, so that no ranking is one of easy and hard seeds.

    Algorithms that move the data to one place are not ranked, and keep their seeds, unless there are no others. If no
    seed is common to all, it is the comparison itself.
    """
    federated = [label for label in comparison.values if not run.is_pooled(label)]
    ranked = federated or [*comparison.values]
    common = set.intersection(*({*comparison.values[label]} for label in ranked))
    if not common:
        return comparison
    values = {
        label: {seed: value for seed, value in seeds.items() if seed in common} if label in ranked else seeds
        for label, seeds in comparison.values.items()
    }
    return replace(comparison, values=values)


def best_first(run: RunData, comparison: Comparison) -> list[str]:
    """The algorithms, the best mean over common seeds first; those that move the data to one place come last."""
    sign = -1 if comparison.metric.higher_is_better else 1
    comparison = in_common_seeds(run, comparison)
    means = {label: sign * spread(list(values.values())).mean for label, values in comparison.values.items()}
    return sorted(means, key=lambda label: (run.is_pooled(label), means[label]))


def best_labels(run: RunData, comparison: Comparison) -> list[str]:
    """The algorithms with the best mean: several, if they are tied."""
    best, *others = best_first(run, comparison)
    comparison = in_common_seeds(run, comparison)
    means = {label: spread(list(values.values())).mean for label, values in comparison.values.items()}
    tied = (label for label in others if math.isclose(means[label], means[best], abs_tol=1e-12))
    return [best, *(label for label in tied if run.is_pooled(label) == run.is_pooled(best))]


def universal_comparison(run: RunData, metric: str) -> Comparison | None:
    """The universal test of a metric; None if it is the main comparison already."""
    main = main_comparison(run)
    if main is None or main.key == "universal":
        return None
    return next((one for one in comparisons(run, metric) if one.key == "universal"), None)


def after_training_comparison(run: RunData, metric: str) -> Comparison | None:
    """Clients' models after local training, in the seeds in which all algorithms are measured at the same clients.

    None if it is the main comparison already, or if there are no such seeds.
    """
    main = main_comparison(run)
    found = next((one for one in comparisons(run, metric) if one.key == "post_fit_test"), None)
    if main is None or found is None or main.key == found.key:
        return None
    if found.drawn and found.rule != "final":
        return None  # the best round of each algorithm has clients of its own
    clients: dict[int, set[tuple[int, ...]]] = {}
    for label, seed in ((label, seed) for label, values in found.values.items() for seed in values):
        last = run.client_values(label, seed, "post_fit", metric).last_round()
        clients.setdefault(seed, set()).add(tuple(sorted(last.clients.tolist())))
    same = {seed for seed, known in clients.items() if len(known) == 1}
    values = {
        label: {seed: value for seed, value in seeds.items() if seed in same} for label, seeds in found.values.items()
    }
    return replace(found, values=values) if same else None
