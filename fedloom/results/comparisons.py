"""The numbers that algorithms are compared by: one per algorithm and seed, for each way of measuring."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.results import headline
from fedloom.results.run_data import RunData

# in the order in which one of them becomes what the comparison is about
TITLES = {
    "server_test": "global model, server's test data",
    "post_fit_test": "after local training, own test",
    "pre_fit_test": "before local training, own test",
    "test": "final model, own test",
    "universal": "universal test",
    "pooled_post_fit_test": "after local training, all tests together",
    "pooled_pre_fit_test": "before local training, all tests together",
    "server_validation": "global model, server's validation data",
}


PHASES = {
    "post_fit_test": "post_fit",
    "pre_fit_test": "pre_fit",
    "test": "final",
    "pooled_post_fit_test": "post_fit",
    "pooled_pre_fit_test": "pre_fit",
    "pooled_test": "final",
}  # what the keys are about, where it is clients


@dataclass(frozen=True)
class Comparison:
    """A metric, how it was taken, and its value for each algorithm and seed."""

    key: str
    metric: str
    values: dict[str, dict[int, float]]
    percent: bool
    higher_is_better: bool
    rule: str = "final"

    @property
    def title(self) -> str:
        """In words."""
        words = {"final": "", "best": ", best round (chosen on the same data)"}
        when = words.get(self.rule, f", mean of the last {self.rule.removeprefix('last:')} rounds")
        return f"{self.metric}, {TITLES[self.key]}" + ("" if self.key in ("universal", "test") else when)


def measures(view: RunData, metric: str) -> list[Comparison]:
    """All ways in which a metric was measured at the end."""
    result = view.result
    kind = view.metric(metric)
    found = []
    for key in TITLES:
        if key.startswith("pooled") and kind.is_mean:
            continue  # means over clients say the same
        values: dict[str, dict[int, float]] = {}
        for run in result.runs:
            value = run.headline.get(f"{key}_{metric}")
            if value is not None and key in PHASES and view.is_pooled(run.algorithm):
                value = at_clients(view, run.algorithm, run.seed, key, metric, result.rule)
            if value is not None and run.status == "done":
                values.setdefault(run.algorithm, {})[run.seed] = value
        if values:
            found.append(Comparison(key, metric, values, kind.percent, kind.higher_is_better, result.rule))
    return found


def at_clients(view: RunData, label: str, seed: int, key: str, metric: str, rule: str) -> float | None:
    """The pooled model as clients see it, the same ones as for other algorithms, each of them counting once."""
    if key.startswith("pooled"):
        at, values = view.pooled_values(label, seed, PHASES[key], metric)
    else:
        stats = view.client_values(label, seed, PHASES[key], metric).by_round()
        at, values = stats.index, stats.mean
    if not len(at):
        return None
    return headline.of_rounds(values, rule, view.metric(metric).higher_is_better)


def primary(view: RunData) -> Comparison | None:
    """What the comparison is about: the server's test data if it holds some, else clients after local training."""
    for metric in view.metrics:
        found = measures(view, metric)
        if found:
            return found[0]
    return None
