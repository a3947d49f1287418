"""Intervals over seeds that cover most of a metric's scale, and so say hardly anything."""

from __future__ import annotations

from collections.abc import Iterator

from fedloom.results.comparisons import comparisons
from fedloom.results.run_data import RunData
from fedloom.results.sentences import say
from fedloom.results.statistics import spread
from fedloom.results.table import show

WIDE = 0.5  # of all possible values: such an interval does not even tell good from bad


def cautions(run: RunData) -> Iterator[str]:
    """Yield a sentence for each metric between 0 and 1 with such an interval."""
    for metric in filter(lambda one: one.share, run.metrics.values()):
        wide, fewest = [], len(run.seeds)
        for label, values in next((one.values for one in comparisons(run, metric.name)), {}).items():
            found = spread(list(values.values()))
            low, high = found.interval
            if found.count > 1 and min(high, 1.0) - max(low, 0.0) > WIDE:
                wide.append(f"{label} ({show(low, metric.number_format)} to {show(high, metric.number_format)})")
                fewest = min(fewest, found.count)
        if wide:
            yield say("caution", "wide_intervals", seeds=fewest, metric=metric.name, labels=", ".join(wide))
