"""The tables of a run that compare algorithms, each with a note that says how to read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedloom.results import client_tables, curve_numbers, headline
from fedloom.results.comparisons import Comparison, comparisons, main_comparison, universal_comparison
from fedloom.results.run_data import MetricInfo, RunData
from fedloom.results.statistics import SEEDS_FOR_A_TEST, Difference, differences, in_words, known_mean, spread
from fedloom.results.table import Table, Value, show

MOST_SENTENCES = 6  # with more pairs of algorithms, the note has no sentence about each
ONE_SEED = "One seed: there is no interval, and differences may be chance. Use several seeds."


def all_tables(run: RunData) -> list[Table]:
    """Every table that the run has numbers for."""
    makers = (overview, comparison, paired_differences, targets, fairness, costs)
    found = [table for maker in makers for table in maker(run)]
    for name, metric in run.metrics.items():
        if metric.is_mean:
            found += client_tables.all_tables(run, name)
    return found


def overview(run: RunData) -> Iterator[Table]:
    """One row per algorithm, one column per way of measuring: mean ± half of the 95 % interval over seeds."""
    for metric in run.metrics:
        found = comparisons(run, metric)
        labels = [label for label in run.labels if any(label in one.values for one in found)]
        rows = tuple((label, *(_mean_and_interval(one, label) for one in found)) for label in labels)
        if rows:
            note = (
                f"Mean over {len(run.seeds)} seeds ± half the width of the 95 % t interval. “Own test” is the mean "
                "over clients, each on its own test split; the universal test is each client's model on all of them."
            )
            columns, kinds = ("algorithm", *(one.way for one in found)), ("text", *["shown"] * len(found))
            note = note if len(run.seeds) > 1 else ONE_SEED
            yield Table(f"overview_{metric}", f"Results: {metric}", columns, rows, kinds, note)


def _mean_and_interval(comparison: Comparison, label: str) -> str:
    over_seeds = spread(list(comparison.values.get(label, {}).values()))
    mean = show(over_seeds.mean, comparison.metric.number_format)
    if over_seeds.count < 2:
        return mean
    return f"{mean} ± {show(over_seeds.mean - over_seeds.low, comparison.metric.deviation_format)}"


def comparison(run: RunData) -> Iterator[Table]:
    """One row per algorithm and way of measuring: mean, standard deviation and interval over seeds."""
    columns = ("measured", "algorithm", "mean", "std over seeds", "95 % low", "95 % high", "seeds")
    for name, metric in run.metrics.items():
        rows: list[tuple[Value, ...]] = []
        for one in comparisons(run, name):
            for label, values in one.values.items():
                over_seeds = spread(list(values.values()))
                interval = over_seeds.interval(share=metric.percent)
                rows.append((one.way, label, over_seeds.mean, over_seeds.std, *interval, over_seeds.count))
        if rows:
            shown = metric.number_format
            kinds = ("text", "text", shown, metric.deviation_format, shown, shown, "whole")
            note = f"Mean, standard deviation and 95 % t interval over {len(run.seeds)} seeds; the seed is the unit."
            note = note if len(run.seeds) > 1 else ONE_SEED
            yield Table(f"comparison_{name}", f"Results in full: {name}", columns, tuple(rows), kinds, note)


def paired_differences(run: RunData) -> Iterator[Table]:
    """All pairs of algorithms, in the main comparison and in the universal test."""
    found = {
        "differences": main_comparison(run),
        "differences_universal": universal_comparison(run, run.main_metric),
    }
    for name, one in found.items():
        if one is not None and len(one.values) > 1:
            yield _paired_differences(name, one)


def _paired_differences(name: str, comparison: Comparison) -> Table:
    found = differences(comparison.values)
    rows: list[tuple[Value, ...]] = []
    for each in found:
        over_seeds = each.spread
        difference = (f"{each.first} − {each.second}", over_seeds.mean, over_seeds.low, over_seeds.high)
        rows.append((*difference, each.effect, f"{each.wins} of {over_seeds.count}", each.p, each.corrected))
    columns = ("pair", "difference", "95 % low", "95 % high", "effect size", "seeds higher", "p", "corrected p")
    kind = "points" if comparison.metric.percent else "difference"
    kinds = ("text", kind, kind, kind, "short", "text", "p", "p")
    kept = 8 if any(each.p is not None for each in found) else 6  # without tests, leave out the p-values
    unit = " (percentage points)" if comparison.metric.percent else ""
    title = f"Paired differences over the same seeds: {comparison.title}{unit}"
    note = " ".join(verdict(found, comparison.metric))
    return Table(name, title, columns[:kept], tuple(row[:kept] for row in rows), kinds[:kept], note)


def verdict(found: Sequence[Difference], metric: MetricInfo) -> Iterator[str]:
    """What all pairs together show, in sentences."""
    tested = [each for each in found if each.p is not None]
    pairs = f"{len(found)} pair" + ("s" if len(found) > 1 else "")
    if not any(each.spread.count > 1 for each in found):
        yield "One seed: differences are shown, but nothing can be said about chance."
        return
    if tested:
        yield (
            f"Of {pairs}, {sum(each.clear for each in found)} differ clearly (the interval excludes zero, and "
            f"Wilcoxon's signed-rank test, with Holm's correction for {len(tested)} comparisons, has p ≤ 0.05)."
        )
    else:
        yield (
            f"Intervals of {sum(each.excludes_zero for each in found)} of {pairs} exclude zero. Each is a 95 % "
            "interval by itself, so about one in twenty excludes zero even if no algorithms differ. "
            f"With fewer than {SEEDS_FOR_A_TEST} seeds, no p-values are given."
        )
    for each in found if len(found) <= MOST_SENTENCES else ():
        yield in_words(each, metric=metric.name, percent=metric.percent, higher_is_better=metric.higher_is_better)
    yield "The effect size is the mean difference in standard deviations of the differences."


def target_costs(run: RunData, label: str, metric: str, target: float) -> list[tuple[float, ...] | None]:
    """Round, interpolated round, bytes and seconds at which each seed reached a target; None if it did not."""
    found: list[tuple[float, ...] | None] = []
    for seed, (rounds, values) in headline.curves(run, label, metric).items():
        reached = curve_numbers.reached(rounds, values, target, run.metric(metric).higher_is_better)
        if reached is None:
            found.append(None)
        else:
            costs = run.costs(label, seed)
            until = costs.rounds <= reached.round
            sent = (costs.bytes_up + costs.bytes_down)[until].sum()
            found.append((reached.round, reached.crossing, int(sent), float(costs.seconds[until].sum())))
    return found


def targets(run: RunData) -> Iterator[Table]:
    """Rounds, bytes and seconds to each target of the experiment."""
    columns = ("algorithm", "seeds there", "first round", "crossing", "bytes", "time", "speed-up")
    kinds = ("text", "text", "short", "short", "bytes", "seconds", "factor")
    note = (
        f"The curve is {headline.curve_in_words(run)}, made monotone (best so far). “First round” is the first "
        "measured round at or beyond the target, “crossing” interpolates between it and the round measured before. "
        "Means over seeds, given only if every seed reached the target. Bytes are all that clients sent and received "
        "(the pooled baseline sends no weights: it would move the data). The speed-up is relative to the slowest "
        "algorithm that reached the target. Time depends on this machine and on what else ran on it."
    )
    for metric, target in (run.evaluation.get("target") or {}).items():
        rows: list[tuple[Any, ...]] = []
        for label in run.labels:
            found = target_costs(run, label, metric, target)
            reached = [costs for costs in found if costs is not None]
            means: list[float | None] = [None] * 4
            if reached and len(reached) == len(found):
                means = [float(np.mean(column)) for column in zip(*reached, strict=True)]
            if run.is_pooled(label):
                means[2] = None
            if found:
                rows.append((label, f"{len(reached)} of {len(found)}", *means))
        slowest = max((row[2] for row in rows if row[2]), default=0.0)
        rows = [(*row, slowest / row[2] if row[2] else None) for row in rows]
        if rows:
            title = f"Until {metric} {show(target, run.metric(metric).number_format)}"
            yield Table(f"target_{metric}", title, columns, tuple(rows), kinds, note)


def fairness(run: RunData) -> Iterator[Table]:
    """How evenly clients fare at the end, and the last rounds and the peak of the curve."""
    name, metric = run.main_metric, run.metric(run.main_metric)
    rows: list[tuple[Value, ...]] = []
    for label in run.labels:
        last = run.last_round(label, "post_fit", name).values()
        found = [curve_numbers.fairness(clients.values, metric.higher_is_better) for clients in last]
        curves = headline.curves(run, label, name).values()
        peaks = [curve_numbers.peak(*curve, metric.higher_is_better) for curve in curves]
        if found or curves:
            means = (
                [each.worst for each in found],
                [each.std for each in found],
                [each.jain for each in found],
                [curve_numbers.last_mean(values, 10) for _, values in curves],
                [best for best, _ in peaks],
            )
            rows.append((label, *map(known_mean, means), ", ".join(str(round) for _, round in peaks)))
    if rows:
        columns = (
            "algorithm",
            "worst 10 %",
            "std over clients",
            "Jain index",
            "last 10 rounds",
            "peak",
            "peak's round",
        )
        shown = metric.number_format
        kinds = ("text", shown, metric.deviation_format, "number", shown, shown, "text")
        note = (
            "Clients: each client's model on its own test split after its last local training. The worst tenth has at "
            "least one client. Jain's index is 1 if all clients fare the same. Curve: "
            f"{headline.curve_in_words(run)}; the mean of the last 10 measured rounds, and the peak, which is "
            "optimistic because it is chosen on the test data. Means over seeds."
        )
        yield Table("fairness", f"Fairness, last rounds and peak: {name}", columns, tuple(rows), kinds, note)


def costs(run: RunData) -> Iterator[Table]:
    """Bytes and seconds of every algorithm."""
    rows: list[tuple[Value, ...]] = []
    for label in run.labels:
        found = [each for seed in run.seeds if len((each := run.costs(label, seed)).rounds)]
        if found:
            rounds, up, down, seconds, median = (
                known_mean([float(value(each)) for each in found])
                for value in (
                    lambda each: len(each.rounds),
                    lambda each: each.bytes_up.sum(),
                    lambda each: each.bytes_down.sum(),
                    lambda each: each.seconds.sum(),
                    lambda each: np.median(each.seconds),
                )
            )
            sent = (None, None) if run.is_pooled(label) else (up, down)
            rows.append((label, rounds, *sent, seconds, median))
    if rows:
        columns = ("algorithm", "rounds", "sent by clients", "received by clients", "time", "a round (median)")
        kinds = ("text", "whole", "bytes", "bytes", "seconds", "seconds")
        note = "Means over seeds. The time includes evaluation. Bytes are those of weights and numbers, uncompressed."
        yield Table("traffic", "Bytes and time", columns, tuple(rows), kinds, note)
