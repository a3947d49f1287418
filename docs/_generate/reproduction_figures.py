"""Draws the pictures of docs/reproductions/summary.md from the stored results: ours beside the published numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.papers import published
from fedloom.results.curve_numbers import monotone
from fedloom.results.figure_style import COLOURS, FAINT, add_legend, finish_axes, line_style, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from _generate.reproductions import Number

VERDICTS = {
    "reproduced": ("o", COLOURS[2]),
    "reproduced in direction": ("s", COLOURS[0]),
    "not reproduced": ("^", COLOURS[1]),
}
SOURCES = {"paper": ("v", "#222222"), "slides": ("v", "white")}
Record = Mapping[str, Any]


def beside(numbers: Sequence[Number], rounds: float, points: float) -> Figure:
    """Draw every number that was run against the published one; the shading is what counts as reproduced."""
    with styled():
        figure = new_figure(8.2, 3.5)
        left, right = figure.subplots(1, 2)
        for axes, places in ((left, places_of(numbers, "rounds")), (right, places_of(numbers, "accuracy", "percent"))):
            for verdict, (marker, colour) in VERDICTS.items():
                found = np.array([(x, y) for x, y, name in places if name == verdict]).reshape(-1, 2)
                axes.scatter(*found.T, s=18, marker=marker, color=colour, linewidths=0, alpha=0.75, label=verdict)
        ends = np.array([10, 6000])
        left.fill_between(ends, ends / rounds, ends * rounds, color="#000000", alpha=0.08, linewidth=0)
        left.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        ends = np.array([0, 101])
        right.fill_between(ends, ends - 100 * points, ends + 100 * points, color="#000000", alpha=0.08, linewidth=0)
        right.set(xlim=ends, ylim=ends)
        for axes, title, unit in ((left, "Rounds to a target", "rounds"), (right, "Accuracy", "%")):
            axes.plot([0.1, 1e5], [0.1, 1e5], color=FAINT, linewidth=0.7, zorder=0)
            finish_axes(axes, title, percent=False, most_ticks=0)
            axes.set(xlabel=f"Published, {unit}", ylabel=f"Ours, {unit}")
        add_legend(figure)
    return figure


def places_of(numbers: Sequence[Number], *kinds: str) -> list[tuple[float, float, str]]:
    """Return the published number, ours and the verdict of all numbers of these kinds; shares become per cent."""
    return [
        (one.told * scale, one.mean * scale, one.verdict)
        for one in numbers
        if one.kind in kinds and one.mean is not None and isinstance(one.told, float) and "deviation" not in one.measure
        for scale in (100 if one.kind == "accuracy" else 1,)
    ]


def curves(folder: Path) -> Figure:
    """Draw the stored curves of the CNN, and of the 2NN by lr, with the rounds that were published for their target."""
    cnn = _stored(folder, "mcmahan-table2", "iid, ")
    nets = _stored(folder, "mcmahan-table1-2nn", "non-iid, B 10, C 0.1")
    by_lr = {
        f"lr {one['changes'].get('train.lr', '0.1')}": one
        for one in nets
        if set(one["changes"]) <= {"train.lr", "seeds"}
    }
    shown = {one["row"].removeprefix("iid, "): one for one in cnn if set(one["changes"]) <= {"seeds"}}
    with styled():
        figure = new_figure(8.2, 5.6)
        above, below = figure.subplots(2, 1)
        _panel(above, "The CNN, IID (Table 2)", shown, "mcmahan-table2", 0.99, 0.96)
        ordered = dict(sorted(by_lr.items(), key=lambda one: float(one[0].removeprefix("lr "))))
        _panel(below, "The 2NN, non-IID (Table 1), by learning rate", ordered, "mcmahan-table1-2nn", 0.97, 0.9)
    return figure


def figure2(folder: Path) -> Figure:
    """Draw the stored curves of Figure 2, and the rounds in which the published ones reach 99 %."""
    found = {one["row"]: one for one in _stored(folder, "mcmahan-figure2", "")}
    with styled():
        figure = new_figure(8.2, 5.6)
        panels = figure.subplots(2, 1, sharex=True)
        for axes, begin, title in zip(panels, ("iid, ", "non-iid, "), ("IID", "Two shards a client"), strict=True):
            lines = {name.removeprefix(begin): one for name, one in found.items() if name.startswith(begin)}
            ordered = dict(sorted(lines.items(), key=lambda one: [int(part[2:]) for part in one[0].split(", ")]))
            _panel(axes, title, ordered, "mcmahan-figure2", 0.99, 0.96)
            axes.set(xlim=(0, 300), ylim=(0.96, 0.997))
        panels[0].set_xlabel("")
    return figure


def _panel(axes: Axes, title: str, lines: Mapping[str, Record], name: str, target: float, low: float) -> None:
    reproduction = published.load(name)
    told = {row.name: row.numbers(reproduction.measure[0]) for row in reproduction.row}
    for number, (label, record) in enumerate(lines.items()):
        style = line_style(number)
        for place, (rounds, values) in enumerate(record["curves"]):
            axes.plot(rounds, monotone(np.array(values), True), **style, linewidth=1.1, label="" if place else label)
        for source, (marker, inside) in SOURCES.items():
            if isinstance(told[record["row"]].get(source), float):
                edge = "#222222" if name == "mcmahan-table1-2nn" else style["color"]
                face = inside if inside == "white" else edge
                axes.plot(told[record["row"]][source], target, marker, color=edge, markerfacecolor=face, markersize=6)
    axes.axhline(target, color=FAINT, linewidth=0.7, linestyle=(0, (1, 2)), zorder=0)
    finish_axes(axes, title, percent=True)
    axes.set(ylim=(low, target + (1 - target) / 4), xlim=(0, None), xlabel="Round", ylabel="Best accuracy so far")
    for source, (marker, inside) in SOURCES.items():
        axes.plot([], [], marker, color="#222222", markerfacecolor=inside, markersize=6, label=f"published: {source}")
    axes.legend(loc="lower right", frameon=False)


def _stored(folder: Path, name: str, begin: str) -> list[Record]:
    """Return the stored results whose row begins so and whose curves were kept."""
    records = json.loads((folder / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return [one for one in records if one["row"].startswith(begin) and any(one["curves"])]
