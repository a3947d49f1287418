"""Writes docs/reproductions/summary.md and its pictures: every published number beside ours, from the stored results.

    python docs/_generate/reproductions.py

`docs/reproductions/results/NAME.json` has the records of `fedloom reproduce NAME` (its reproduction.json), one for each
row and each way of running it. `docs/reproductions/reasons.toml` says why a number differs or was not run. A number
without a result and without a reason is an error, so the page cannot leave anything out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fedloom.files import tomllib
from fedloom.papers import published
from fedloom.papers.published import Measure, Published, Reproduction, Row
from fedloom.papers.reproduce import Rerun

sys.path.insert(0, str(Path(__file__).parents[1]))

from _generate.costs import hours
from _generate.shared_runs import elsewhere, records

FOLDER = Path(__file__).parents[1] / "reproductions"
ROUNDS, POINTS, SHARE = 1.25, 0.02, 0.05  # as close as this counts as reproduced: a factor, points, a share
VERDICTS = ("reproduced", "reproduced in direction", "not reproduced", "not run")
PAGES = {
    "mcmahan-table1-2nn": "fedavg-mnist.md",
    "mcmahan-table1-cnn": "fedavg-mnist.md",
    "mcmahan-table2": "fedavg-mnist.md",
    "fedavg-validation": "fedavg-mnist.md",
    "postures": "seven-ways.md",
    "images-iid": "seven-ways.md",
    "images-skewed": "seven-ways.md",
    "crosscheck": "crosscheck.md",
    "eeg-baseline": "neuroevolution-eeg.md",
    "eeg-neuroevolution": "neuroevolution-eeg.md",
    "next-word": "next-word.md",
    "next-word-mu": "next-word.md",
    "next-word-dropout": "next-word.md",
    "next-word-scan": "next-word.md",
    "fsvrg": "fsvrg.md",
    "mcmahan-figure2": "fedavg-mnist.md",
    "postures-hapt": "seven-ways.md",
    "eeg-held-out": "neuroevolution-eeg.md",
    "next-word-20": "next-word.md",
}
NOT_COMPARED = {
    "fsvrg": "it was published as a figure",
    "mcmahan-figure2": "its published numbers are those of Table 2",
    "postures-hapt": "nothing was published for these people",
    "eeg-held-out": "nothing was published for people held out",
    "next-word-20": "nothing was published for twenty authors",
}
About = tuple[str, str, str, str, tuple[str, ...]]  # reproduction, row, measure, source, what the run changed


@dataclass(frozen=True)
class Number:
    """One published number, our result for it if there is one, and what follows."""

    reproduction: str
    row: str
    measure: str
    source: str
    told: Published
    kind: str
    mean: float | None = None
    ours: str = ""
    ratio: str = ""
    seeds: str = ""
    how: str = ""
    verdict: str = "not run"
    because: str = ""
    hours: float | None = None  # that a row takes which was not run

    @property
    def note(self) -> str:
        """What was changed, and the reason of the verdict."""
        return f"with {self.how}: {self.because}" if self.how else self.because


def numbers(folder: Path = FOLDER) -> Iterator[Number]:
    """Yield every published number with what the stored results say about it."""
    reasons = tomllib.loads((folder / "reasons.toml").read_text(encoding="utf-8"))["reason"]
    for name in published.names():
        if name in NOT_COMPARED:
            continue
        reproduction = published.load(name)
        own = records(folder / "results", name)
        for row in reproduction.row:
            made = _made(folder / "results", name, row, reproduction.measure, own)
            planned = None if made else Rerun(reproduction).experiment(row)
            for measure, source, told in _told(row, reproduction.measure):
                measured = _longest([one for one in made if measure.name in one["ours"]])
                for record in measured:
                    yield _number(name, row, measure, source, told, record, reasons)
                if not measured:
                    about = (name, row.name, measure.name, source)
                    because = _because(reasons, (*about, ()), ("not run",))
                    number = Number(*about, told, _kind(measure), because=because)
                    if planned is not None:
                        rounds = told if measure.counts_rounds and isinstance(told, float) else planned.rounds
                        number = replace(number, hours=hours(planned, row.label, rounds))
                    yield number


def _made(
    folder: Path, name: str, row: Row, measures: Sequence[Measure], own: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the results of a row, the best first; of those that were run in the same way, the one with most seeds."""
    mine = [one for one in own if one["row"] == row.name]
    found: dict[tuple[tuple[str, str], ...], Mapping[str, Any]] = {}
    for one in (*mine, *elsewhere(folder, name, row, measures)):
        way = tuple(sorted(_changes(one).items()))
        if way not in found or len(one["seeds"]) > len(found[way]["seeds"]):
            found[way] = one
    return sorted(found.values(), key=_distance)


def _longest(made: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out runs that are shorter than another one: the page of the reproduction has them."""
    return [one for one in made if _distance(one)[:2] == _distance(made[0])[:2]]


def _distance(record: Mapping[str, Any]) -> tuple[float, float, int]:
    """Order the runs of a row: the published rounds and epochs first, then the longest; then the fewest changes."""
    changes = _changes(record)
    return -float(changes.get("rounds", "inf")), -float(changes.get("train.epochs", "inf")), len(changes)


def _told(row: Row, measures: Sequence[Measure]) -> Iterator[tuple[Measure, str, Published]]:
    """Yield what was published; a number that names no measure is about the first one."""
    for measure in measures:
        for source, told in row.numbers(measure).items():
            if measure is measures[0] or isinstance(row.published[source], dict):
                yield measure, source, told


def _number(
    name: str,
    row: Row,
    measure: Measure,
    source: str,
    told: Published,
    record: Mapping[str, Any],
    reasons: Sequence[Mapping[str, Any]],
) -> Number:
    changes = _changes(record)
    ways = [f"{key} = {value}" for key, value in changes.items()]
    about = (name, row.name, measure.name, source, (*changes, *ways))
    mean, shown = _ours(record["ours"][measure.name], measure)
    ratio = mean / told if mean is not None and isinstance(told, float) and told else None
    if changes or not _is_close(mean, told, measure):
        verdict = _verdict(reasons, about)
        because = _because(reasons, about, VERDICTS[1:3])
    else:
        verdict, because = "reproduced", ""
    how = ", ".join(ways)
    many = len(record["seeds"])
    times = "" if ratio is None else f"{ratio:.2f}"
    return Number(*about[:4], told, _kind(measure), mean, shown, times, f"{many}", how, verdict, because)


def _changes(record: Mapping[str, Any]) -> dict[str, str]:
    """Return what differs from the published settings; the number of seeds does not."""
    return {key: value for key, value in record["changes"].items() if key not in ("seeds", "data.path")}


def _ours(found: Any, measure: Measure) -> tuple[float | None, str]:
    """Return our mean over seeds, and how it is shown: with a 95 % t interval if there are several seeds."""
    if isinstance(found, dict):  # a result that was kept as mean and interval
        mean, interval = found["mean"], found["interval"]
    elif None in found:
        return None, "not reached"
    else:
        mean, interval = float(np.mean(found)), None
        if len(found) > 1:
            interval = float(stats.t.ppf(0.975, len(found) - 1) * np.std(found, ddof=1) / np.sqrt(len(found)))
    digits = 0 if measure.counts_rounds and mean >= 100 else 1 if measure.counts_rounds else 2 if abs(mean) > 1 else 4
    spread = "" if interval is None else f" ± {interval:.{digits}f}"
    return mean, f"{mean:,.{digits}f}{spread}"


def _is_close(ours: float | None, told: Published, measure: Measure) -> bool:
    """Return whether ours is close enough to count as the same."""
    if ours is None or isinstance(told, str):
        return ours is None and told == "-"
    kind = _kind(measure)
    if kind == "rounds":
        return 1 / ROUNDS <= ours / told <= ROUNDS
    if kind in ("accuracy", "percent"):
        return abs(ours - told) <= POINTS * (100 if measure.percent else 1)
    return abs(ours - told) <= SHARE * abs(told)


def _kind(measure: Measure) -> str:
    """Say what a measure counts: rounds, an accuracy as a share, a percentage, or something else."""
    if measure.counts_rounds:
        return "rounds"
    return "percent" if measure.percent else "accuracy" if measure.metric == "accuracy" else "other"


def _reason(reasons: Sequence[Mapping[str, Any]], about: About) -> Mapping[str, Any]:
    """Return the first reason that fits a number."""
    name, row, measure, source, changes = about
    for reason in reasons:
        if (
            name in reason["reproductions"]
            and any(fnmatchcase(row, pattern) for pattern in reason.get("rows", ["*"]))
            and any(fnmatchcase(measure, pattern) for pattern in reason.get("measures", ["*"]))
            and source in reason.get("sources", [source])
            and _fits(reason.get("changed"), changes)
        ):
            return reason
    changed = ", ".join(changes) or "nothing"
    raise SystemExit(f"reasons.toml has no reason for {name}, '{row}', '{measure}', {source} (changed: {changed}).")


def _fits(changed: bool | str | None, changes: Sequence[str]) -> bool:
    """Return whether a run changed what a reason is about: something, nothing, a key, or a key to a certain value."""
    return changed in changes if isinstance(changed, str) else changed in (None, bool(changes))


def _verdict(reasons: Sequence[Mapping[str, Any]], about: About) -> str:
    return str(_reason(reasons, about)["verdict"])


def _because(reasons: Sequence[Mapping[str, Any]], about: About, allowed: Sequence[str]) -> str:
    reason = _reason(reasons, about)
    if reason["verdict"] not in allowed:
        raise SystemExit(f"reasons.toml calls {about} '{reason['verdict']}'. Possible: {', '.join(allowed)}.")
    return str(reason["because"])


def page(folder: Path = FOLDER) -> str:
    """Write the whole page."""
    found = list(numbers(folder))
    first = {(one.reproduction, one.row, one.measure, one.source): one for one in reversed(found)}
    counts = Counter(one.verdict for one in first.values())
    lines = [
        "# All published numbers",
        "",
        "<!-- written by `make summary`: change the stored results or reasons.toml instead -->",
        "",
        f"The source documents have {len(first)} numbers that fedloom can compare with a result of its own: "
        + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
        + ".",
        "",
        "A number counts as reproduced if we ran the published settings and rounds differ by at most "
        f"{100 * (ROUNDS - 1):.0f} %, accuracies by at most {100 * POINTS:.0f} points, and other numbers by at most "
        f"{100 * SHARE:.0f} %. Otherwise a note below the table gives the reason. ± is a 95 % interval over seeds. "
        "The page of each reproduction says more, and has shorter runs of the same row. "
        "The hours of a row that was not run are those of one free core for "
        "one seed and as many rounds as published (or as its file allows), computed from measured speeds.",
        "",
        "![Our numbers against the published ones](../images/reproductions-beside.png)",
        "",
        "*Every number that was run, from shortened runs and other data too. On the line, ours equals the published "
        "one; in the shaded band, a run with the published settings counts as reproduced.*",
        "",
        "Left out: " + "; ".join(f"[{name}]({PAGES[name]}), because {why}" for name, why in NOT_COMPARED.items()) + ".",
        "",
    ]
    for name in (name for name in PAGES if name not in NOT_COMPARED):
        lines += [*_section(published.load(name), name, [one for one in found if one.reproduction == name]), ""]
    return "\n".join(lines)


def _section(reproduction: Reproduction, name: str, found: Sequence[Number]) -> list[str]:
    several = len({one.measure for one in found}) > 1
    lines = [f"## {name}", "", reproduction.title + ".", ""]
    sources = "; ".join(f"{short}: {where}" for short, where in reproduction.sources.items())
    lines += [f"{sources}. [More]({PAGES[name]}).", ""]
    lines += ["| row | source | published | ours | ratio | seeds | verdict |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | --- |"]
    notes = list(dict.fromkeys(one.note for one in found if one.note))
    ways = Counter((one.row, one.measure, one.source) for one in found)
    for one in found:
        row = f"{one.row}: {one.measure}" if several else one.row
        if one.how and ways[one.row, one.measure, one.source] > 1:  # say which of several runs it is
            row += f" ({one.how})"
        told = "not reached" if one.told == "-" else f"{one.told:,.10g}" if isinstance(one.told, float) else one.told
        verdict = one.verdict if one.hours is None else f"{one.verdict}: {one.hours:.1f} h"
        verdict += f" ({notes.index(one.note) + 1})" if one.note else ""
        cells = (row, one.source, told, one.ours or "–", one.ratio, one.seeds, verdict)
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", *(f"{number}. {note[0].upper()}{note[1:]}." for number, note in enumerate(notes, 1))]


if __name__ == "__main__":
    from _generate import reproduction_figures as figures
    from fedloom.results.figure_style import save_figure

    target, images = FOLDER / "summary.md", FOLDER.parent / "images"
    target.write_text(page(), encoding="utf-8")
    save_figure(figures.beside(list(numbers()), ROUNDS, POINTS), images / "reproductions-beside.png")
    save_figure(figures.curves(FOLDER), images / "fedavg-mnist-curves.png")
    save_figure(figures.figure2(FOLDER), images / "fedavg-mnist-figure2.png")
    sys.stdout.write(f"{target}\n")
