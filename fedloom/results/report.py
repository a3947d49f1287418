"""A run as one HTML file that needs nothing else: what was run, what came out, and how far to trust it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from fedloom import __version__
from fedloom.files import write_atomically
from fedloom.results import figures, tables
from fedloom.results.comparisons import Comparison, measures, primary
from fedloom.results.figure_style import CaptionedFigure
from fedloom.results.report_warnings import cautions
from fedloom.results.run_data import RunData
from fedloom.results.statistics import Spread, differences, spread
from fedloom.results.table import STATISTICS, Table, missing, show
from fedloom.results.table import write as write_tables

FILES = Path(__file__).parent / "templates"
MOST_ROWS = 300  # of a table on the page; the files have them all
# figures and tables of each chapter, by the beginning of their names
CHAPTERS = {
    "Learning": (("comparison", "global_model", "sausage_rounds", "pooled_curve"), ("target", "fairness")),
    "Differences": ((), ("differences",)),
    "Clients": (("clients", "sausage_users", "labels"), ("summary", "universal_test", "clients")),
    "Cost": (("bytes",), ("traffic",)),
}


def write(folder: Path, *, fill: str = "min-max", files: bool = True) -> Path:
    """Write `report.html` into a run's folder, and its tables and figures as files of their own beside it."""
    view = RunData.read(folder)
    drawn = figures.draw_all(view, fill)
    made = tables.all_tables(view)
    if files:
        write_tables(made, folder / "tables")
        figures.write(view, folder / "figures", drawn=drawn)
    path = folder / "report.html"
    write_atomically(path, html(view, drawn, made).encode())
    return path


def html(view: RunData, drawn: Sequence[CaptionedFigure], made: Sequence[Table]) -> str:
    """The page."""
    chapters = [("Result", "".join(_result(view, drawn, made))), ("Cautions", _cautions(view))]
    for title, (pictures, names) in CHAPTERS.items():
        shown = [each for name in pictures for each in drawn if each.name == name]
        listed = [table for name in names for table in made if table.name.startswith(name) and _wanted(view, table)]
        more = [table for name in names for table in made if table.name.startswith(name) and not _wanted(view, table)]
        body = "".join(map(_figure, shown)) + "".join(_table(view, table) for table in listed)
        if more:
            body += "<details><summary>More tables</summary>" + "".join(_table(view, t) for t in more) + "</details>"
        if body:
            chapters.append((title, f"<h2>{title}</h2>{body}"))
    chapters.append(("What was run", "".join(_what_was_run(view))))
    chapters = [(title, body) for title, body in chapters if body]
    links = "".join(f'<a href="#{_anchor(title)}">{title}</a>' for title, _ in chapters)
    sections = "".join(
        f'<section id="{_anchor(title)}"{" class=warnings" if title == "Cautions" else ""}>{body}</section>'
        for title, body in chapters
    )
    finished = [cell["finished"] for cell in view.cells.values() if cell["finished"]]
    when = f"{_moment(max(finished))} · " if finished else ""
    state = "" if view.done else " · not finished"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(view.name)} – fedloom report</title>"
        f"<style>{(FILES / 'report.css').read_text(encoding='utf-8')}</style></head><body>"
        f"<header><div><h1>{escape(view.name)}</h1><p>{when}fedloom {escape(_version(view))}{state}</p>"
        f"<nav>{links}</nav></div></header><main>{sections}"
        f"<footer>Written by fedloom {__version__}. All of this page is in this file: it needs no network.</footer>"
        f"</main><script>{(FILES / 'report.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )


def _result(view: RunData, drawn: Sequence[CaptionedFigure], made: Sequence[Table]) -> Iterator[str]:
    """The first thing one reads: sentences, a few large numbers, a figure and the main table."""
    yield "<h2>Result</h2>"
    for paragraph in result_in_words(view):
        first, _, rest = paragraph.partition(". ")
        yield f'<p class="lead"><b>{_text(first)}{"." if rest else ""}</b> {_text(rest)}</p>'
    yield f'<div class="cards">{"".join(_cards(view))}</div>'
    yield from (_figure(each) for each in drawn if each.name == "headline")
    yield from (_table(view, table) for table in made if table.name == f"overview_{view.main_metric}")
    more = [
        t for t in made if t.name.startswith(("overview", "comparison")) and t.name != f"overview_{view.main_metric}"
    ]
    if more:
        yield f"<details><summary>More results</summary>{''.join(_table(view, table) for table in more)}</details>"


def result_in_words(view: RunData) -> Iterator[str]:
    """What came out, a paragraph for each way of measuring."""
    first = primary(view)
    if first is None:
        yield "Nothing has been measured to the end yet."
        return
    yield " ".join(_best(view, first))
    for measure in measures(view, first.metric):
        if measure.key == "universal" and first.key != "universal":
            yield " ".join(_best(view, measure))


def _best(view: RunData, measure: Comparison) -> Iterator[str]:
    """The best that leaves the data where it is, what it can be told apart from, and the pooled model beside it."""
    over = {label: spread(list(values.values())) for label, values in measure.values.items()}
    order = sorted(over, key=lambda label: -over[label].mean if measure.higher_is_better else over[label].mean)
    shared = [label for label in order if not view.is_pooled(label)]
    kind = "percent" if measure.percent else "number"
    best = (shared or order)[0]
    many = f" has the best mean of the {len(shared)} algorithms that leave the data where it is"
    text = f"{measure.title[:1].upper()}{measure.title[1:]}: {_of(best, over[best], kind)}"
    yield f"{text}{many if len(shared) > 1 else ''}."
    yield from _told_apart(best, shared[1:], measure)
    for label in order:
        if view.is_pooled(label) and shared:
            yield f"With all data in one place: {_of(label, over[label], kind)}."


def _told_apart(best: str, others: Sequence[str], measure: Comparison) -> Iterator[str]:
    """Which ones the best is really better than, as far as these seeds tell."""
    pairs = {(each.first, each.second): each for each in differences(measure.values)}
    found = {other: pairs.get((best, other)) or pairs[other, best] for other in others}
    if not found or all(each.spread.count < 2 for each in found.values()):
        return
    tested = any(each.p is not None for each in found.values())
    apart = [other for other, each in found.items() if (each.clear if tested else each.excludes_zero)]
    close = [other for other in found if other not in apart]
    if close:
        scale, unit = (100, " points") if measure.percent else (1, "")
        widest = max(max(abs(found[o].spread.low), abs(found[o].spread.high)) for o in close) * scale
        yield (
            f"These seeds do not tell it apart from {_and(close)}: by their 95 % intervals, differences of up to "
            f"{widest:.2g}{unit} remain possible."
        )
    if apart:
        why = "corrected p ≤ 0.05" if tested else "the 95 % interval of the difference excludes zero"
        yield f"It is {'above' if measure.higher_is_better else 'below'} {_and(apart)} ({why})."


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _of(label: str, found: Spread, kind: str) -> str:
    low, high = (max(found.low, 0.0), min(found.high, 1.0)) if kind == "percent" else (found.low, found.high)
    span = f", 95 % interval {show(low, kind)} to {show(high, kind)}"
    return f"{label} ({show(found.mean, kind)}{span if found.count > 1 else ''})"


def _cards(view: RunData) -> Iterator[str]:
    rounds = max((cell["rounds_done"] for cell in view.cells.values()), default=0)
    seconds = sum(float(view.costs(*key).seconds.sum()) for key in view.cells)
    examples = sum(client["train"] + client["validation"] + client["test"] for client in view.clients)
    counts = {
        "algorithms": len(view.labels),
        "seeds": len(view.seeds),
        "rounds": rounds,
        "clients": len(view.clients),
        "examples": examples,
    }
    facts = [(f"{count:,}", what if count != 1 else what[:-1]) for what, count in counts.items()]
    facts.append((_duration(seconds), "of computing, all cells"))
    return (f"<div class=card><b>{value}</b><span>{what}</span></div>" for value, what in facts)


def _cautions(view: RunData) -> str:
    found = cautions(view)
    if not found:
        return ""
    return "<h2>Cautions</h2><ul>" + "".join(f"<li>{_text(text)}</li>" for text in found) + "</ul>"


def _figure(drawn: CaptionedFigure) -> str:
    """An inline drawing whose ids are its own: several of them share the page."""
    prefix = f"{drawn.name}-"
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{prefix}", drawn.svg)
    width = float(drawn.figure.get_size_inches()[0]) * 1.36 * 72
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', _opening(drawn, width), svg, count=1)
    return (
        f"<figure><figcaption><b>{escape(drawn.title)}</b>{_text(drawn.caption)}</figcaption>"
        f'<div class="drawing">{svg}</div></figure>'
    )


def _opening(drawn: CaptionedFigure, width: float) -> str:
    return (
        r'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="\1" '
        f'width="{width:.0f}" role="img" aria-label="{escape(drawn.title)}">'
    )


def _table(view: RunData, table: Table) -> str:
    colours = {label: look["color"] for label, look in figures.looks(view).items()}
    heads = "".join(
        f'<th class="{"text" if kind == "text" else "number"}" scope="col">'
        f'<button type="button">{escape(name) or "&nbsp;"}</button></th>'
        for name, kind in zip(table.columns, table.kinds, strict=True)
    )
    body = []
    for row in table.rows[:MOST_ROWS]:
        total = ' class="total"' if row[0] in STATISTICS and table.name.startswith("universal") else ""
        cells = []
        for value, text, kind in zip(row, table.shown(row), table.kinds, strict=True):
            swatch = (
                f'<i class="swatch" style="background:{colours[value]}"></i>'
                if value in colours and kind == "text"
                else ""
            )
            key = "" if missing(value) else escape(str(value))
            cells.append(f'<td class="{"text" if kind == "text" else "n"}" data-v="{key}">{swatch}{_text(text)}</td>')
        body.append(f"<tr{total}>{''.join(cells)}</tr>")
    cut = f" The first {MOST_ROWS} of {len(table.rows):,} rows." if len(table.rows) > MOST_ROWS else ""
    return (
        f"<h3>{escape(table.title)}</h3><div class=scroll><table class=sorts><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
        f'<p class="note">{_text(table.note)}{cut} File: <code>tables/{escape(table.name)}.csv</code></p>'
    )


def _wanted(view: RunData, table: Table) -> bool:
    """Whether a table is shown at once: those about the main metric."""
    others = [metric for metric in view.metrics if metric != view.main_metric]
    return not any(f"_{metric}" in table.name for metric in others)


def _what_was_run(view: RunData) -> Iterator[str]:
    yield "<h2>What was run</h2><dl>"
    started = [cell["started"] for cell in view.cells.values() if cell["started"]]
    finished = [cell["finished"] for cell in view.cells.values() if cell["finished"]]
    facts = dict(view.facts.get("machine") or {})
    yield from _pair("Experiment", view.name)
    yield from _pair("Algorithms", ", ".join(view.labels))
    yield from _pair("Seeds", ", ".join(map(str, view.seeds)))
    if started and finished:
        yield from _pair("From – to (UTC)", f"{_moment(min(started))} – {_moment(max(finished))}")
    yield from _pair(
        "Versions", ", ".join(f"{n} {facts.pop(n)}" for n in ("fedloom", "torch", "numpy", "python") if n in facts)
    )
    yield from _pair("Machine", ", ".join(f"{name} {value}" for name, value in facts.items()))
    setup = view.facts.get("setup") or {}
    yield from _pair("Computed with", ", ".join(f"{name} {value}" for name, value in setup.items()))
    yield from _pair("Data (SHA-256)", _fingerprints(view))
    yield from _pair("All final weights (SHA-256)", view.result.weights_sha256 or "")
    yield "</dl>"
    file = view.folder / "experiment.toml"
    if file.is_file():
        yield (
            "<p>The whole experiment, every key with its value. Saved as a file, <code>fedloom run FILE</code> makes "
            "it again, to the same bits with the same versions on the same kind of processor.</p>"
            "<details open><summary>Experiment file</summary>"
            f"<pre>{escape(file.read_text(encoding='utf-8'))}</pre></details>"
        )
    else:
        import json

        text = json.dumps(view.description, indent=2, ensure_ascii=False)
        yield f"<details><summary>What the Python call was given</summary><pre>{escape(text)}</pre></details>"


def _fingerprints(view: RunData) -> str:
    found = {key: str(value) for key, value in view.facts.items() if key.startswith("data of seed")}
    different = dict.fromkeys(found.values())
    if len(different) == 1:
        return next(iter(different))
    return ", ".join(f"seed {key.split()[-1]}: {value[:12]}…" for key, value in found.items())


def _text(text: str) -> str:
    """For the page: a number and its sign stay on one line."""
    return escape(text).replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")


def _pair(name: str, value: str) -> Iterator[str]:
    if value:
        yield f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"


def _version(view: RunData) -> str:
    return str((view.facts.get("machine") or {}).get("fedloom", __version__))


def _moment(text: str) -> str:
    return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
