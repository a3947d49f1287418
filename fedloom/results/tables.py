"""A run's results as tables: CSV for programs, Markdown and LaTeX for papers, each with a sentence in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedloom.results import client_tables, curve_numbers, headline
from fedloom.results.comparisons import Comparison, measures, primary
from fedloom.results.run_data import RunData
from fedloom.results.statistics import SEEDS_FOR_A_TEST, Difference, differences, in_words, known_mean, spread
from fedloom.results.table import Table, Value, show

FEW_SENTENCES = 6


def all_tables(view: RunData) -> list[Table]:
    """Every table that the run has numbers for."""
    makers = (overview, comparison, paired, universal_comparison, targets, fairness, traffic)
    found = [table for maker in makers for table in maker(view)]
    for metric, kind in view.metrics.items():
        if kind.is_mean:
            found += client_tables.of_metric(view, metric)
    return found


def overview(view: RunData) -> Iterator[Table]:
    """One row per algorithm, one column per way of measuring: mean ± half of the 95 % interval over seeds."""
    for metric, kind in view.metrics.items():
        found = measures(view, metric)
        labels = [label for label in view.labels if any(label in measure.values for measure in found)]
        rows: list[tuple[Value, ...]] = []
        for label in labels:
            cells = []
            for measure in found:
                over = spread(list(measure.values.get(label, {}).values()))
                half = (
                    ""
                    if over.count < 2
                    else f" ± {show(over.mean - over.low, 'deviation' if kind.percent else 'number')}"
                )
                cells.append(show(over.mean, "percent" if kind.percent else "number") + half)
            rows.append((label, *cells))
        if rows:
            titles = [measure.title.removeprefix(f"{metric}, ") for measure in found]
            note = (
                f"Mean over {len(view.seeds)} seeds ± half the width of the 95 % t interval. “Own test” is the mean "
                "over clients, each on its own test split; the universal test is each client's model on all of them."
                if len(view.seeds) > 1
                else "One seed: there is no interval, and differences may be chance. Use several seeds."
            )
            kinds = ("text", *["shown"] * len(found))
            yield Table(f"overview_{metric}", f"Results: {metric}", ("algorithm", *titles), tuple(rows), kinds, note)


def comparison(view: RunData) -> Iterator[Table]:
    """One row per algorithm and way of measuring: mean, standard deviation and interval over seeds."""
    columns = ("measured", "algorithm", "mean", "std over seeds", "95 % low", "95 % high", "seeds")
    for metric, kind in view.metrics.items():
        rows: list[tuple[Value, ...]] = []
        for measure in measures(view, metric):
            for label, values in measure.values.items():
                over = spread(list(values.values()))
                low, high = (max(over.low, 0.0), min(over.high, 1.0)) if kind.percent else (over.low, over.high)
                where = measure.title.removeprefix(f"{metric}, ")
                rows.append((where, label, over.mean, over.std, low, high, over.count))
        if rows:
            shown, deviation = ("percent", "deviation") if kind.percent else ("number", "number")
            kinds = ("text", "text", shown, deviation, shown, shown, "whole")
            note = (
                f"Mean, standard deviation and 95 % t interval over {len(view.seeds)} seeds; the seed is the unit."
                if len(view.seeds) > 1
                else "One seed: there is no interval, and differences may be chance. Use several seeds."
            )
            yield Table(f"comparison_{metric}", f"Results in full: {metric}", columns, tuple(rows), kinds, note)


def paired(view: RunData) -> Iterator[Table]:
    """All pairs of algorithms on what the comparison is about."""
    measure = primary(view)
    if measure is not None and len(measure.values) > 1:
        yield _paired("differences", measure)


def universal_comparison(view: RunData) -> Iterator[Table]:
    """The same for the universal test."""
    for measure in measures(view, view.main_metric):
        first = primary(view)
        if measure.key == "universal" and len(measure.values) > 1 and first is not None and first.key != "universal":
            yield _paired("differences_universal", measure)


def _paired(name: str, measure: Comparison) -> Table:
    found = differences(measure.values)
    kind = "points" if measure.percent else "difference"
    rows: tuple[tuple[Value, ...], ...] = tuple(
        (
            f"{each.first} − {each.second}",
            each.spread.mean,
            each.spread.low,
            each.spread.high,
            each.effect,
            f"{each.wins} of {each.spread.count}",
            each.p,
            each.corrected,
        )
        for each in found
    )
    columns = ("pair", "difference", "95 % low", "95 % high", "effect size", "seeds higher", "p", "corrected p")
    tested = 8 if any(each.p is not None for each in found) else 6  # without tests there are no columns for them
    unit = " (percentage points)" if measure.percent else ""
    title = f"Paired differences over the same seeds: {measure.title}{unit}"
    kinds = ("text", kind, kind, kind, "short", "text", "p", "p")
    rows = tuple(row[:tested] for row in rows)
    return Table(name, title, columns[:tested], rows, kinds[:tested], " ".join(verdict(found, measure)))


def verdict(found: Sequence[Difference], measure: Comparison) -> Iterator[str]:
    """What the pairs say all together, in sentences."""
    tested = [each for each in found if each.p is not None]
    apart = [each for each in found if each.excludes_zero]
    clear = [each for each in found if each.clear]
    pairs = f"{len(found)} pair" + ("s" if len(found) > 1 else "")
    if not any(each.spread.count > 1 for each in found):
        yield "One seed: differences are shown, but nothing can be said about chance."
        return
    if tested:
        yield (
            f"Of {pairs}, {len(clear)} differ clearly (the interval excludes zero, and Wilcoxon's signed-rank test, "
            f"with Holm's correction for {len(tested)} comparisons, has p ≤ 0.05)."
        )
    else:
        yield (
            f"Intervals of {len(apart)} of {pairs} exclude zero; each is a 95 % interval by itself, so about "
            "one in twenty would do so even if nothing differed. "
            f"With fewer than {SEEDS_FOR_A_TEST} seeds no p-values are given."
        )
    if len(found) <= FEW_SENTENCES:
        for each in found:
            yield in_words(each, metric=measure.metric, percent=measure.percent, higher=measure.higher_is_better)
    yield "The effect size is the mean difference in standard deviations of the differences."


def targets(view: RunData) -> Iterator[Table]:
    """Rounds, bytes and seconds to the target, if there is one."""
    wanted = (view.description.get("evaluate") or {}).get("target") or {}
    for metric, target in wanted.items():
        kind = view.metric(metric)
        rows: list[tuple[Value, ...]] = []
        slowest: float | None = None
        for label in view.labels:
            firsts, crossings, sent, seconds, runs = [], [], [], [], 0
            for seed in view.seeds:
                rounds, values = headline.curve(view, label, seed, metric)
                if not len(rounds):
                    continue
                runs += 1
                found = curve_numbers.reached(rounds, values, target, kind.higher_is_better)
                if found is None:
                    continue
                traffic = view.costs(label, seed)
                until = traffic.rounds <= found.round
                firsts.append(found.round)
                crossings.append(found.crossing)
                sent.append(int((traffic.bytes_up + traffic.bytes_down)[until].sum()))
                seconds.append(float(traffic.seconds[until].sum()))
            if not runs:
                continue
            everyone = len(firsts) == runs
            mean = float(np.mean(firsts)) if everyone else None
            slowest = max(slowest or 0.0, mean) if mean else slowest
            rows.append(
                (
                    label,
                    f"{len(firsts)} of {runs}",
                    mean,
                    float(np.mean(crossings)) if everyone else None,
                    None if view.is_pooled(label) or not everyone else float(np.mean(sent)),
                    float(np.mean(seconds)) if everyone else None,
                )
            )
        if rows:
            rows = [(*row, slowest / row[2] if slowest and isinstance(row[2], float) else None) for row in rows]
            shown = show(target, "percent" if kind.percent else "number")
            columns = ("algorithm", "seeds there", "first round", "crossing", "bytes", "time", "speed-up")
            kinds = ("text", "text", "short", "short", "bytes", "seconds", "factor")
            note = (
                f"The curve is {headline.curve_in_words(view)}, made monotone (best so far). “First round” is the "
                "first one measured at or beyond the target, “crossing” interpolates between it and the one "
                "measured before. Means over seeds, given only where every seed got there. Bytes are all that clients "
                "sent and received (the pooled baseline sends no weights: it would move the data). The speed-up is "
                "against the slowest that got there. Time depends on this machine and on what else ran on it."
            )
            yield Table(f"target_{metric}", f"Until {metric} {shown}", columns, tuple(rows), kinds, note)


def fairness(view: RunData) -> Iterator[Table]:
    """How evenly the clients fare at the end, and the last rounds and peak of the curve."""
    metric = view.main_metric
    kind = view.metric(metric)
    shown = "percent" if kind.percent else "number"
    rows: list[tuple[Value, ...]] = []
    for label in view.labels:
        last = view.last_round(label, "post_fit", metric)
        found = [curve_numbers.fairness(clients.values, kind.higher_is_better) for clients in last.values()]
        curves = [headline.curve(view, label, seed, metric) for seed in view.seeds]
        curves = [curve for curve in curves if len(curve[0])]
        peaks = [curve_numbers.peak(*curve, kind.higher_is_better) for curve in curves]
        if found or curves:
            rows.append(
                (
                    label,
                    known_mean([each.worst for each in found]),
                    known_mean([each.std for each in found]),
                    known_mean([each.jain for each in found]),
                    known_mean([curve_numbers.last_mean(values, 10) for _, values in curves]),
                    known_mean([best for best, _ in peaks]),
                    ", ".join(str(round) for _, round in peaks),
                )
            )
    if rows:
        columns = (
            "algorithm", "worst 10 %", "std over clients", "Jain index", "last 10 rounds", "peak", "peak's round"
        )  # fmt: skip
        spread_kind = "deviation" if kind.percent else "number"
        kinds = ("text", shown, spread_kind, "number", shown, shown, "text")
        note = (
            "Clients: each one's model on its own test split after its last local training; "
            "the worst tenth is at least one client; Jain's index is 1 when all clients fare the same. Curve: "
            f"{headline.curve_in_words(view)}; mean of the last 10 measured rounds, and the peak, chosen on the test "
            "data and so optimistic. Means over seeds."
        )
        yield Table("fairness", f"Fairness, last rounds and peak: {metric}", columns, tuple(rows), kinds, note)


def traffic(view: RunData) -> Iterator[Table]:
    """Bytes and time."""
    rows: list[tuple[Value, ...]] = []
    for label in view.labels:
        found = [view.costs(label, seed) for seed in view.seeds]
        found = [each for each in found if len(each.rounds)]
        if not found:
            continue
        pooled = view.is_pooled(label)
        rows.append(
            (
                label,
                known_mean([len(each.rounds) for each in found]),
                None if pooled else known_mean([float(each.bytes_up.sum()) for each in found]),
                None if pooled else known_mean([float(each.bytes_down.sum()) for each in found]),
                known_mean([float(each.seconds.sum()) for each in found]),
                known_mean([float(np.median(each.seconds)) for each in found]),
            )
        )
    if rows:
        columns = ("algorithm", "rounds", "sent by clients", "received by clients", "time", "a round (median)")
        kinds = ("text", "whole", "bytes", "bytes", "seconds", "seconds")
        note = (
            "Means over seeds, evaluation included in the time. Bytes are those of weights and numbers, uncompressed."
        )
        yield Table("traffic", "Bytes and time", columns, tuple(rows), kinds, note)
