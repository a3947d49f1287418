"""The report of a run: one HTML file that shows what was run, what came out, and how far you can trust it.

This module gathers the values; `templates/report.html.j2` lays them out and escapes every one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fedloom import __version__
from fedloom.files import write_atomically
from fedloom.results import badly_served, figures, tables
from fedloom.results.comparisons import (
    PHASES,
    UNITED,
    Comparison,
    best_first,
    best_labels,
    finished,
    in_common_seeds,
    main_comparison,
    universal_comparison,
)
from fedloom.results.disclosure import not_evaluated, what_left
from fedloom.results.figure_style import CaptionedFigure, line_styles
from fedloom.results.figure_style import svg as svg_of
from fedloom.results.report_warnings import cautions
from fedloom.results.run_data import RunData
from fedloom.results.run_values import MetricInfo
from fedloom.results.sentences import TEMPLATES, page, say
from fedloom.results.statistics import Spread, differences, spread
from fedloom.results.table import STATISTICS, Table, missing, show
from fedloom.results.table import write as write_tables

MOST_ROWS = 300  # of a table on the page; the CSV file has all of them
ONE = {"it": "it", "it_is": "It is", "its": "Its"}  # what stands for the best algorithm in later sentences
TIED = {"it": "them", "it_is": "They are", "its": "Their"}
CHAPTERS = {  # chapter → how the names of its figures begin, and how those of its tables begin
    "Result": (("headline",), ("overview", "comparison")),
    "Learning": (("comparison", "global_model", "sausage_rounds", "pooled_curve"), ("target", "fairness")),
    "Differences": ((), ("differences",)),
    "Clients": (("clients", "sausage_users", "labels"), ("summary", "universal_test", "clients", "against_alone")),
    "Cost": (("bytes",), ("traffic",)),
    "Time": (("time", "round_time"), ("virtual_time",)),
    "Audit": (("reconstruction", "poisoning"), ("audit",)),
}


def write(
    folder: Path, *, fill: str = "min-max", files: bool = True, progress: Callable[[str], object] = lambda text: None
) -> Path:
    """Write `report.html` into a run's folder and return its path.

    With `files`, also write the tables and figures as files into `tables` and `figures`. `progress` is called with a
    line of text before each step that takes time.
    """
    run = RunData.read(folder)
    made_figures = figures.draw_all(run, fill, progress=progress)
    progress("Computing tables")
    made_tables = tables.all_tables(run)
    if files:
        progress("Writing tables and figures")
        write_tables(made_tables, folder / "tables")
        figures.write(made_figures, folder / "figures")
    progress("Writing the report")
    path = folder / "report.html"
    write_atomically(path, html(run, made_figures, made_tables).encode())
    return path


def html(run: RunData, made_figures: Sequence[CaptionedFigure], made_tables: Sequence[Table]) -> str:
    """The page as text."""
    template = page("report.html.j2", keep_units=_keep_units, minute=_minute, inline_svg=_inline_svg)
    style, script = (Markup((TEMPLATES / name).read_text(encoding="utf-8")) for name in ("report.css", "report.js"))
    experiment_file = run.folder / "experiment.toml"
    return template.render(
        run=run,
        version=__version__,
        style=style,
        script=script,
        paragraphs=[paragraph.partition(". ") for paragraph in (*result_in_words(run), *badly_served.in_short(run))],
        seconds=sum(float(run.costs(*cell).seconds.sum()) for cell in run.cells),
        cautions=cautions(run),
        what_left=what_left(run),
        chapters=[(title, *_contents(run, title, made_figures, made_tables)) for title in CHAPTERS],
        experiment_file=experiment_file.read_text(encoding="utf-8") if experiment_file.is_file() else "",
        description=json.dumps(run.description, indent=2, ensure_ascii=False),
        colours={label: style["color"] for label, style in line_styles(run.labels).items()},
        missing=missing,
        statistics=STATISTICS,
        most_rows=MOST_ROWS,
    )


def _contents(
    run: RunData, title: str, made_figures: Sequence[CaptionedFigure], made_tables: Sequence[Table]
) -> tuple[list[CaptionedFigure], list[Table], list[Table]]:
    """The figures of a chapter, the tables it shows at once (those about the main metric), and its other tables."""
    figure_names, table_names = CHAPTERS[title]
    others = [metric for metric in run.metrics if metric != run.main_metric]

    def shown_at_once(table: Table) -> bool:
        if title == "Result":
            return table.name == f"overview_{run.main_metric}"
        if title == "Differences":  # all pairs, for each way to measure: long, and the first is what leads
            return table is listed[0]
        return not any(f"_{metric}" in table.name for metric in others)

    listed = [table for name in table_names for table in made_tables if table.name.startswith(name)]
    return (
        [figure for name in figure_names for figure in made_figures if figure.name == name],
        [table for table in listed if shown_at_once(table)],
        [table for table in listed if not shown_at_once(table)],
    )


def result_in_words(run: RunData, baseline: str | None = None) -> Iterator[str]:
    """What came out: one paragraph for the main comparison, and one for the universal test.

    With a `baseline`, only differences to it are tested, and the paragraphs say nothing of other pairs.
    """
    main = main_comparison(run)
    if main is None:
        why = not_evaluated(run)
        yield f"The model {why}." if run.done and why else "No algorithm has finished with a measurement yet."
        return
    yield " ".join(_best_in_words(run, main, baseline))
    universal = universal_comparison(run, main.metric.name)
    if universal is not None:
        others = main.key in PHASES and not {*best_labels(run, universal)} & {*best_labels(run, main)}
        yield " ".join([*_best_in_words(run, universal, baseline), *([say("result", "two_tests")] if others else [])])


def _best_in_words(run: RunData, comparison: Comparison, baseline: str | None = None) -> Iterator[str]:
    """The best federated algorithm, how it compares with the others, and the pooled model beside it."""
    ranked = in_common_seeds(run, comparison)
    over_seeds = {label: spread(list(values.values())) for label, values in ranked.values.items()}
    order, tied = best_first(run, comparison), best_labels(run, comparison)
    federated = [label for label in order if not run.is_pooled(label)]
    metric, best = comparison.metric, order[0]
    same = [label for label in tied if comparison.values[label] == comparison.values[best]]
    title = f"{comparison.metric.capital_title}, {comparison.way}"
    uneven = len({*map(frozenset, comparison.values.values())}) > 1
    fewer = uneven and any(ranked.values[label] != comparison.values[label] for label in federated)
    one_seed = over_seeds[best].count == 1
    without = _without_global_model(run, comparison)
    names, several = _with_interval(_listed(same), over_seeds[best], metric, uneven), ""
    if len(same) < len(tied):
        names = _listed([_with_interval(label, over_seeds[label], metric, uneven) for label in tied])
        several = " have the same mean"
    elif len(tied) > 1:
        several = f" have the same {metric.name}" + ("" if one_seed else " in every seed")
    if len(federated) > len(tied):
        what, limit = "mean", f",{comparison.where}" if comparison.one_split else ""
        if fewer:
            several_seeds = f"the {over_seeds[best].count} seeds" if not one_seed else "the one seed"
            limit = f", over {several_seeds} that all of them have{limit}"
        if one_seed:
            what, limit = "number", f"{limit if fewer else ', with one seed'}: this may be chance"
        which = "with a global model" if without else "that leave the data where it is"
        best_of = f"the best {what} of the {len(federated)} algorithms {which}{limit}"
        several += f", {best_of}" if several else f" has {best_of}"
    yield f"{title}: {names}{several}."
    if without:
        yield say("result", "no_global_model", labels=_listed(without), have="has" if len(without) == 1 else "have")
    if uneven:
        apart = len(federated) > 1 and not set.intersection(*({*comparison.values[label]} for label in federated))
        yield say("result", "common_seeds" if fewer else "no_common_seeds" if apart else "other_seeds")
    first = baseline if baseline in tied else best
    others = [label for label in federated if label != first and (label not in same or first not in same)]
    named = {"it": first, "it_is": f"{first} is", "its": f"{first}'s"}  # where another one has the same mean
    pronouns = named if len(same) < len(tied) else TIED if len(tied) > 1 else ONE
    if baseline is None or first == baseline:
        yield from _against_others(first, others, comparison, pronouns, baseline)
    elif baseline in comparison.values:
        yield from _against_baseline(best, baseline, comparison, pronouns)
    for label in order:
        if run.is_pooled(label) and federated:
            yield say("result", "pooled", pooled=_with_interval(label, over_seeds[label], metric, uneven))
    if over_seeds[best].count > 1 and comparison.one_split:
        yield say("result", "one_split")


def _without_global_model(run: RunData, comparison: Comparison) -> list[str]:
    """The algorithms that a comparison of global models leaves out, because clients have models of their own."""
    if comparison.key not in UNITED:
        return []
    done = dict.fromkeys(cell.algorithm for cell in finished(run.result.runs))
    return [label for label in done if label not in comparison.values and not run.is_pooled(label)]


def _against_others(
    best: str,
    others: Sequence[str],
    comparison: Comparison,
    pronouns: Mapping[str, str] = ONE,
    baseline: str | None = None,
) -> Iterator[str]:
    """Which algorithms the best one is better than, as far as these seeds show.

    `pronouns` stand for it, or for several that have its numbers. With a `baseline`, intervals are those of the pairs
    with it, which are all that there are.
    """
    pairs = {(each.first, each.second): each for each in differences(comparison.values, baseline)}
    found = {other: pairs.get((best, other)) or pairs[other, best] for other in others}
    if not found or all(each.spread.count < 2 for each in found.values()):
        return
    apart = [other for other, each in found.items() if each.clear]
    alike = [other for other, each in found.items() if each.spread.std == 0]
    close = [other for other in found if other not in (*apart, *alike)]
    for fixed in (True, False):  # whether seeds change nothing at all, or only not this difference
        if some := [
            other for other in alike if (_is_fixed(comparison, best) and _is_fixed(comparison, other)) == fixed
        ]:
            yield say("result", "alike_fixed" if fixed else "alike", alike=_listed(some), **pronouns)
    if close:
        widest = max(abs(side) for other in close for side in found[other].interval)
        widest = min(widest, 1.0) if comparison.metric.share else widest  # further apart they cannot be
        bound = show(widest, comparison.metric.difference_format).removeprefix("+")  # with the digits of the table
        unit = " points" if comparison.metric.percent else ""
        yield say("result", "close", close=_listed(close), widest=bound, unit=unit, where=comparison.where, **pronouns)
    if apart:
        several = "intervals, which hold together, exclude" if len(pairs) > 1 else "interval excludes"
        why = f"the 95 % {several} zero"
        # where seeds differ, the best mean may be worse in the seeds that both have
        above = [other for other in apart if (found[other].spread.mean > 0) == (found[other].first == best)]
        for side, some in (("above", above), ("below", [other for other in apart if other not in above])):
            if some:
                yield say(
                    "result", "apart", side=side, apart=_listed(some), where=comparison.where, why=why, **pronouns
                )


def _against_baseline(best: str, baseline: str, comparison: Comparison, pronouns: Mapping[str, str]) -> Iterator[str]:
    """How the best algorithm compares with a baseline that is another one."""
    found = differences(comparison.values, baseline)
    (each,) = (one for one in found if one.first == best)
    if each.spread.std > 0:
        kind, unit = comparison.metric.difference_format, " points" if comparison.metric.percent else ""
        gap, low, high = (show(value, kind) for value in (each.spread.mean, *each.interval))
        yield say("result", "to_baseline", baseline=baseline, gap=gap, low=low, high=high, unit=unit, **pronouns)
    yield from _against_others(best, [baseline], comparison, pronouns, baseline)
    if len(found) > 1 and each.spread.count > 1:
        yield say("result", "not_tested", baseline=baseline)


def _is_fixed(comparison: Comparison, label: str) -> bool:
    """Whether all seeds of an algorithm have the same number."""
    return spread(list(comparison.values[label].values())).std == 0


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _with_interval(label: str, found: Spread, metric: MetricInfo, count: bool) -> str:
    kind, (low, high) = metric.number_format, found.interval
    interval = f", 95 % interval {show(low, kind)} to {show(high, kind)}"
    if found.std == 0:
        interval = f", the same in all {found.count} seeds"  # an interval without a width would look like certainty
    seeds = f", {found.count} seed" + ("s" if found.count > 1 else "") if count and found.std != 0 else ""
    return f"{label} ({show(found.mean, kind)}{interval if found.count > 1 else ''}{seeds})"


def _inline_svg(figure: CaptionedFigure, on_phones: bool = False) -> Markup:
    """A figure as an `<svg>` element whose ids start with the figure's name: several figures share the page."""
    drawn, name, svg = figure.figure, figure.name, figure.svg
    if on_phones and figure.on_phones is not None:
        drawn, name, svg = figure.on_phones, f"{figure.name}-on-phones", svg_of(figure.on_phones)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
    # markers take the colour of each use: the page's dark scheme does not reach into the shape that they share
    svg = re.sub(r'(<path id="[^"]*" d="[^"]*") style="[^"]*"', r"\1", svg)
    width = float(drawn.get_size_inches()[0]) * 1.36 * 72
    opening = (
        r'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="\1" '
        f'width="{width:.0f}" role="img" aria-label="{escape(figure.title)}">'
    )
    return Markup(re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', opening, svg, count=1))


def _keep_units(text: Any) -> str:
    """Keep a number and its unit or its interval on one line."""
    return str(text).replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")


def _minute(moment: str) -> str:
    return datetime.fromisoformat(moment).strftime("%Y-%m-%d %H:%M")
