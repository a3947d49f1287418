"""The tables of a run that compare algorithms, each with a note that says how to read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedloom.privacy.words import IN_A_WORD
from fedloom.results import audit_findings, client_tables, curve_numbers, headline
from fedloom.results.against_alone import against_alone
from fedloom.results.comparisons import (
    HERE,
    Comparison,
    after_training_comparison,
    comparisons,
    main_comparison,
    universal_comparison,
)
from fedloom.results.run_data import RunData
from fedloom.results.run_values import MetricInfo
from fedloom.results.sentences import say
from fedloom.results.statistics import (
    FOR_EFFECTS,
    Difference,
    Spread,
    differences,
    in_words,
    known_mean,
    seeds_for_a_rank_test,
    spread,
)
from fedloom.results.table import Table, Value, from_to, show, with_column, with_half

LAST = 10  # rounds at the end of a curve whose mean the table has
FEWER_ROUNDS = "speed-up in rounds"  # not in time: its column is beside those of time
MOST_NAMED = 6  # of more pairs that differ clearly, or alike in all seeds, a note does not say which ones


def all_tables(run: RunData) -> list[Table]:
    """Every table that the run has numbers for."""
    makers = (overview, comparison, paired_differences, targets, fairness, against_alone, costs, virtual_time)
    found = [table for maker in makers for table in maker(run)]
    for name in run.metrics:
        found += client_tables.all_tables(run, name)
    return [*found, *audit_findings.tables(run.audit)]


def overview(run: RunData) -> Iterator[Table]:
    """One row per algorithm, one column per way of measuring: mean ± half of the 95 % interval over seeds."""
    for metric in run.metrics:
        found = comparisons(run, metric)
        labels = [label for label in run.labels if any(label in one.values for one in found)]
        if labels:
            name, title, note = f"overview_{metric}", f"Results: {run.metric(metric).title}", _overview_note(found)
            if run.server_tests and any(one.key == "server_test" for one in found):
                note += " " + say("note", "server_test", count=run.server_tests)
            if run.result.rule != "final":
                note = f"{note} {headline.unlike_rounds(run, metric)}".rstrip()
            spreads = {label: [spread(list(one.values.get(label, {}).values())) for one in found] for label in labels}
            numbers = tuple((label, *(each for one in spreads[label] for each in _numbers(one))) for label in labels)
            columns = ("algorithm", *(text for one in found for text in (one.way, f"{one.way}, ±")))
            kinds = ("text", *["number"] * (len(columns) - 1))
            for_programs = _with_more(Table(name, title, columns, numbers, kinds, note), found, run)
            rows = tuple((label, *(_shown(one, run.metric(metric)) for one in spreads[label])) for label in labels)
            columns, kinds = ("algorithm", *(one.way for one in found)), ("text", *["shown"] * len(found))
            yield _with_more(Table(name, title, columns, rows, kinds, note, numbers=for_programs), found, run)


def _overview_note(found: Sequence[Comparison]) -> str:
    counts = _seed_counts(found)
    alike = any(spread(list(values.values())).std == 0 for one in found for values in one.values.values())
    shares = [spread(list(one.values())) for each in found if each.metric.share for one in each.values.values()]
    ways = [one.way for one in found]
    parts = {
        "own_test": any("own test" in way for way in ways),
        "same_number": alike,
        "universal": counts != {1} and any(one.key == "universal" for one in found),
        "phases": counts != {1} and all(any(way.startswith(one) for way in ways) for one in ("after local", "final")),
        "pooled": any(one.key.startswith("pooled") for one in found),
        "drawn": any(one.drawn for one in found),
    }
    words = [_note_over_seeds(found, "overview"), *(say("note", part) for part, here in parts.items() if here)]
    if any(one.std > 0 and (one.low < 0 or one.high > 1) for one in shares):
        words.insert(1, say("note", "beyond"))
    return " ".join(words)


def _numbers(over_seeds: Spread) -> tuple[float, float | None]:
    """The mean and half of the interval; None if there is none: without a width, it would look like certainty."""
    return over_seeds.mean, over_seeds.mean - over_seeds.low if over_seeds.std > 0 else None


def _shown(over_seeds: Spread, metric: MetricInfo) -> str:
    mean, half = _numbers(over_seeds)
    if half is None:
        return show(mean, metric.number_format)
    if not metric.percent:
        return with_half(mean, half)
    return f"{show(mean, metric.number_format)} ± {show(half, metric.deviation_format)}"


def _with_more(table: Table, found: Sequence[Comparison], run: RunData) -> Table:
    """The table with the ε that each row has spent, if it is private, and the number of seeds, if rows differ in it."""
    labels = [str(label) for label, *_ in table.rows]
    for kind, title in IN_A_WORD.items():
        spent = [_most_spent(run, label, kind) for label in labels]
        if any(spent):
            table = with_column(table, title, spent, "number")
            table = replace(table, note=f"{table.note} {say('note', 'spent')}")
    if len(_seed_counts(found)) > 1:
        counts = [_seed_counts(found, label) for label in labels]
        table = with_column(table, "seeds", [*map(from_to, counts)], "whole")
    return table


def _most_spent(run: RunData, label: str, kind: str) -> float | None:
    """The largest ε of one kind that an algorithm has spent in a seed; None without one."""
    spent = [run.server_values(*cell, kind, "notes")[1] for cell in run.cells if cell[0] == label]
    return max((float(values[-1]) for values in spent if len(values)), default=None)


def _seed_counts(found: Sequence[Comparison], only: str | None = None) -> set[int]:
    """Over how many seeds the means are: of all algorithms, or only of one."""
    return {len(seeds) for one in found for label, seeds in one.values.items() if only in (None, label)}


def _note_over_seeds(found: Sequence[Comparison], name: str) -> str:
    counts = _seed_counts(found)
    if counts == {1}:
        return say("note", "one_seed")
    return say("note", name, seeds=f"{counts.pop()} seeds" if len(counts) == 1 else "the seeds of each row")


def comparison(run: RunData) -> Iterator[Table]:
    """One row per algorithm and way of measuring: mean, standard deviation and interval over seeds."""
    columns = ("measured", "algorithm", "mean", "std over seeds", "95 % low", "95 % high", "seeds")
    for name, metric in run.metrics.items():
        rows: list[tuple[Value, ...]] = []
        found = comparisons(run, name)
        for one in found:
            for label, values in one.values.items():
                over_seeds = spread(list(values.values()))
                interval = over_seeds.interval if over_seeds.std != 0 else (None, None)
                rows.append((one.way, label, over_seeds.mean, over_seeds.std, *interval, over_seeds.count))
        if rows:
            shown = metric.number_format
            kinds = ("text", "text", shown, metric.deviation_format, shown, shown, "whole")
            note = _note_over_seeds(found, "comparison")
            if any(row[3] == 0 for row in rows):
                note += " " + say("note", "no_width")
            if metric.share and any(row[4] is not None and (row[4] < 0 or row[5] > 1) for row in rows):  # type: ignore[operator]
                note += " " + say("note", "beyond")
            if run.leaves_out_clients("post_fit"):
                note += " " + say("note", "drawn")
            yield Table(f"comparison_{name}", f"Results in full: {metric.title}", columns, tuple(rows), kinds, note)


def paired_differences(run: RunData, baseline: str | None = None, *, explain: bool = True) -> Iterator[Table]:
    """All pairs of algorithms, or those with a baseline: in the main comparison, after training and universal.

    Other metrics than the first have a table each, of their main way of measuring. With `explain`, notes also say how
    to read the tables. What a note has said, later ones do not repeat.
    """
    main = main_comparison(run)
    if main is None:
        return
    known = (main.metric.name, "loss")
    measured = {
        "": main,
        "_after_training": after_training_comparison(run, main.metric.name),
        "_universal": universal_comparison(run, main.metric.name),
        **{f"_{name}": next(iter(comparisons(run, name)), None) for name in run.metrics if name not in known},
    }
    said: set[str] = set()
    for ending, one in measured.items():
        if one is not None and len(one.values) > 1 and (baseline is None or baseline in one.values):
            found = differences(one.values, baseline)
            new = [text for text in how_to_read(found, one.one_split) if explain and text not in said]
            said.update(new)
            yield _paired_differences(f"differences{ending}", one, found, new)


def _paired_differences(
    name: str, comparison: Comparison, found: Sequence[Difference], explanations: Sequence[str] = ()
) -> Table:
    rows: list[tuple[Value, ...]] = []
    for each in found:
        pair, over_seeds = f"{each.first} − {each.second}", each.spread
        interval, wins = each.interval, f"{each.wins} of {over_seeds.count}"
        rows.append((pair, over_seeds.mean, *interval, each.effect, wins, each.p, each.rank_p))
    columns = (
        "pair",
        "difference",
        "95 % low",
        "95 % high",
        "effect size",
        "seeds higher",
        "corrected p",
        "rank test's p",
    )
    kind = comparison.metric.difference_format
    kinds = ("text", kind, kind, kind, "short", "text", "p", "p")
    ranked, tested = (any(getattr(each, name) is not None for each in found) for name in ("rank_p", "p"))
    kept = 8 if ranked else 7 if tested else 6  # leave out columns of p-values that no pair has
    unit = " (percentage points)" if comparison.metric.percent else ""
    title = f"Paired differences over the same seeds: {comparison.title}{unit}"
    beyond = comparison.metric.share and any(max(map(abs, each.interval)) > 1 for each in found)
    remarks = [*explanations, *([say("note", "beyond")] if beyond else [])]
    note = " ".join([*verdict(found, comparison.metric, comparison.one_split), *remarks])
    paper_note = " ".join(_note_for_a_paper(found, comparison.metric, comparison.one_split))
    return Table(name, title, columns[:kept], tuple(row[:kept] for row in rows), kinds[:kept], note, paper_note)


def _note_for_a_paper(found: Sequence[Difference], metric: MetricInfo, one_split: bool) -> Iterator[str]:
    """The units, and what the interval is; nothing for one seed, whose note is short."""
    if not any(each.spread.count > 1 for each in found):
        return
    unit = " in percentage points" if metric.percent else ""
    corrected = f", corrected for {len(found)} pairs (Bonferroni)" if len(found) > 1 else ""
    yield say("differences", "for_a_paper", metric=metric.name, unit=unit, corrected=corrected)
    if one_split:
        yield say("result", "one_split")


def verdict(found: Sequence[Difference], metric: MetricInfo, one_split: bool = False) -> Iterator[str]:
    """What the pairs of one table show, in sentences."""
    better = {"higher_is_better": metric.higher_is_better}
    if not any(each.spread.count > 1 for each in found):
        yield say("differences", "one_seed")
    elif len(found) == 1:
        yield in_words(found[0], metric=metric.name, percent=metric.percent, one_split=one_split, **better)
    else:
        if any(each.spread.std > 0 for each in found):
            counted, why = _clear_pairs(found, metric.higher_is_better)
            yield say("differences", "counted", counted=counted, why=why, where=HERE if one_split else "")
        fixed = [each for each in found if each.spread.std == 0]
        for name, some in (
            ("same", [each for each in fixed if not each.spread.mean]),
            ("no_width", [each for each in fixed if each.spread.mean]),
        ):
            pairs = [f"{each.first} − {each.second}" for each in some]
            if pairs:
                yield say(
                    "differences", name, pairs=", ".join(pairs) if len(pairs) <= MOST_NAMED else f"{len(pairs)} pairs"
                )


def how_to_read(found: Sequence[Difference], one_split: bool) -> Iterator[str]:
    """What the intervals and tests of a table of pairs are, in sentences; nothing for one seed, which has none."""
    most = max(each.spread.count for each in found)
    if most < 2:
        return
    pairs = "one pair" if len(found) == 1 else f"{len(found)} pairs"
    yield say("differences", "one_pair" if len(found) == 1 else "together")
    if one_split:
        yield say("result", "one_split")
    ranked, needed = any(each.rank_p is not None for each in found), seeds_for_a_rank_test(len(found))
    yield say("differences", "rank_test" if ranked else "no_rank_test", needed=needed, pairs=pairs)
    yield say("differences", "effect_size" if most >= FOR_EFFECTS else "no_effect_size", needed=FOR_EFFECTS)


def _clear_pairs(found: Sequence[Difference], higher_is_better: bool) -> tuple[str, str]:
    """How many of several pairs differ clearly, as the beginning of a sentence, and which ones or why."""
    clear = [each for each in found if each.clear]
    if not clear:
        why = (
            "every interval includes zero"
            if all(each.spread.std > 0 for each in found)
            else "no interval excludes zero"
        )
        return f"Of {len(found)} pairs, none differs", why
    counted = f"Of {len(found)} pairs, {len(clear)} {'differs' if len(clear) == 1 else 'differ'}"
    if len(clear) == len(found):
        counted = "Both pairs differ" if len(found) == 2 else f"All {len(found)} pairs differ"
    if len(clear) > MOST_NAMED:
        return counted, "their intervals exclude zero"
    sides = [
        (each.first, each.second) if (each.spread.mean > 0) == higher_is_better else (each.second, each.first)
        for each in clear
    ]
    (best, worst), *others = sides
    return counted, ", ".join([f"{best} is better than {worst}", *(f"{one} than {other}" for one, other in others)])


def target_costs(run: RunData, label: str, metric: str, target: float) -> list[tuple[float, ...] | None]:
    """Round, interpolated round, bytes and seconds at which each seed reached a target; None if it did not.

    With a virtual clock, the virtual seconds follow.
    """
    found: list[tuple[float, ...] | None] = []
    for seed, (rounds, values) in headline.curves(run, label, metric).items():
        reached = curve_numbers.reached(rounds, values, target, run.metric(metric).higher_is_better)
        if reached is None:
            found.append(None)
        else:
            costs = run.costs(label, seed)
            until = costs.rounds <= reached.round
            sent = (costs.bytes_up + costs.bytes_down)[until].sum()
            times = run.times(label, seed)
            virtual = times.at(np.array([reached.round])).tolist() if len(times.rounds) else []
            found.append((reached.round, reached.crossing, int(sent), float(costs.seconds[until].sum()), *virtual))
    return found


def targets(run: RunData) -> Iterator[Table]:
    """Rounds, bytes and seconds to each target of the experiment."""
    columns: tuple[str, ...] = ("algorithm", "seeds there", "first round", "crossing", "bytes", "time")
    kinds: tuple[str, ...] = ("text", "text", "short", "short", "bytes", "seconds")
    columns += ("virtual time", FEWER_ROUNDS) if run.has_clock else (FEWER_ROUNDS,)
    kinds += ("seconds", "factor") if run.has_clock else ("factor",)
    note = say("note", "target", curve=headline.curve_in_words(run))
    for metric, target in (run.evaluation.get("target") or {}).items():
        rows: list[tuple[Any, ...]] = []
        for label in run.labels:
            found = target_costs(run, label, metric, target)
            reached = [costs for costs in found if costs is not None]
            means: list[float | None] = []
            if reached and len(reached) == len(found):
                means = [float(np.mean(column)) for column in zip(*reached, strict=True)]
            means += [None] * (5 - len(means))
            if run.is_pooled(label):
                means[2] = None
            if found:
                rows.append((label, f"{len(reached)} of {len(found)}", *means[: 5 if run.has_clock else 4]))
        unlike = headline.unlike_rounds(run, metric, ends=False)
        slowest = max((row[2] for row in rows if row[2] and not unlike), default=0.0)
        rows = [(*row, slowest / row[2] if row[2] and slowest else None) for row in rows]
        if rows:
            title = f"Until {run.metric(metric).title} {show(target, run.metric(metric).number_format)}"
            yield Table(f"target_{metric}", title, columns, tuple(rows), kinds, f"{note} {unlike}".strip())


def fairness(run: RunData) -> Iterator[Table]:
    """How evenly clients fare at the end, and the last rounds and the peak of the curve."""
    name, metric = run.main_metric, run.metric(run.main_metric)
    rows: list[tuple[Value, ...]] = []
    measured, sparse = 0, False
    at_end, common = client_tables.at_common_clients(run, run.end_phase, name)
    for label, last in at_end.items():
        found = [curve_numbers.fairness(clients.values, metric.higher_is_better) for clients in last.values()]
        curves = headline.curves(run, label, name).values()
        peaks = [curve_numbers.peak(*curve, metric.higher_is_better) for curve in curves]
        if found or curves:
            fair = ([getattr(each, part) for each in found] for part in ("worst", "std", "jain"))
            last_rounds = [curve_numbers.last_mean(values, LAST) for _, values in curves]
            measured = max([measured, *(len(values) for _, values in curves)])
            sparse = sparse or any((np.diff(rounds[-LAST:]) > 1).any() for rounds, _ in curves)
            means = map(known_mean, (*fair, last_rounds, [best for best, _ in peaks]))
            rows.append((label, *means, ", ".join(str(round) for _, round in peaks)))
    if rows:
        few = f"last {min(LAST, measured)} rounds" if measured > 1 else "last round"
        last_few = few.replace(" rounds", " measured rounds") if sparse else few
        at_clients, of_curve = ("worst 10 %", "std over clients", "Jain index"), (last_few, "peak")
        columns = ("algorithm", *at_clients, *of_curve, "peak's round")
        shown = metric.number_format
        kinds = ("text", shown, metric.deviation_format, "number", shown, shown, "text")
        drawn = "; others were not drawn" if run.leaves_out_clients(run.end_phase) else ""
        model = say("note", client_tables.MODEL[run.end_phase])
        note = say("note", "fairness", model=model, drawn=drawn, curve=headline.curve_in_words(run), few=few)
        note += " " + say("note", "fairness_in_common") if common else ""
        title = f"Fairness, last rounds and peak: {metric.title}"
        note = f"{note} {headline.unlike_rounds(run, name)}".strip()
        yield Table("fairness", title, columns, tuple(rows), kinds, note)


def virtual_time(run: RunData) -> Iterator[Table]:
    """Virtual time of every algorithm, and what clients did with it."""
    rows: list[tuple[Value, ...]] = []
    for label in run.labels:
        found = [_time_of(run, label, seed) for seed in run.seeds if len(run.times(label, seed).rounds)]
        if found:
            rows.append((label, *(float(np.mean(column)) for column in zip(*found, strict=True))))
    if rows:
        columns = ("algorithm", "rounds", "virtual time", "a round (median)", "clients at work", "in vain", "staleness")
        kinds = ("text", "whole", "seconds", "seconds", "percent", "percent", "short")
        yield Table("virtual_time", "Virtual time", columns, tuple(rows), kinds, say("note", "virtual_time"))


def _time_of(run: RunData, label: str, seed: int) -> tuple[float, ...]:
    """Rounds, time, time of a round, utilisation, share of work that did not count, and staleness of one cell."""
    times, rows = run.times(label, seed), run.rows("client_times", label, seed)
    busy = np.array([row["ended"] - row["began"] for row in rows])
    counted = np.array([row["status"] == "counted" for row in rows], dtype=bool)
    lengths = times.ended - times.began
    slots = dict.fromkeys(times.rounds.tolist(), 0)
    for row in rows:
        slots[row["round"]] += 1
    offered = float(sum(length * slots[round] for round, length in zip(times.rounds.tolist(), lengths, strict=True)))
    if run.slots is not None:  # asynchronous: the same number of clients all the time
        offered = float(lengths.sum() * run.slots)
    late = [row["round"] - row["version"] for row, counts in zip(rows, counted, strict=True) if counts]
    return (
        len(lengths),
        float(times.ended[-1]),
        float(np.median(lengths)),
        min(float(busy.sum()) / offered, 1.0) if offered else 0.0,
        float(busy[~counted].sum() / busy.sum()) if busy.sum() else 0.0,
        float(np.mean(late)) if late else 0.0,
    )


def costs(run: RunData) -> Iterator[Table]:
    """Bytes and seconds of every algorithm."""
    rows: list[tuple[Value, ...]] = []
    for label in run.labels:
        found = [each for seed in run.seeds if len((each := run.costs(label, seed)).rounds)]
        if found:
            totals = [(len(each.rounds), each.bytes_up.sum(), each.bytes_down.sum()) for each in found]
            seconds = [(each.seconds.sum(), np.median(each.seconds)) for each in found]
            rounds, *sent = (float(np.mean(column)) for column in zip(*totals, strict=True))
            times = (float(np.mean(column)) for column in zip(*seconds, strict=True))
            rows.append((label, rounds, *((None, None) if run.is_pooled(label) else sent), *times))
    if rows:
        columns = ("algorithm", "rounds", "sent by clients", "received by clients", "time", "a round (median)")
        kinds = ("text", "whole", "bytes", "bytes", "seconds", "seconds")
        yield Table("traffic", "Bytes and time", columns, tuple(rows), kinds, _traffic_note(run))


def _traffic_note(run: RunData) -> str:
    packed = "as [compress] makes them smaller" if run.description.get("compress") else "uncompressed"
    peers = [label for label in run.labels if label in (run.facts.get("peers") or ())]
    once = f" In {', '.join(peers)}, a client sends its model once, and each client that it is for receives it."
    return say("note", "traffic", compressed=packed) + (once if peers else "")
