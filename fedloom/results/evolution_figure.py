"""The picture of an evolution: fitness, validation and diversity against generations, and what a node sends for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.errors import InputError
from fedloom.results.learning_curves import FAINT, FORMATS, INK, line_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Series = dict[str, dict[int, list[float]]]  # label → round → one value a seed

PANELS = {
    "fitness": "Fitness of the fittest",
    "validation": "Validation accuracy of the fittest",
    "diversity": "Diversity of the population",
}


def picture(server: Iterable[Row], rounds: Iterable[Row], path: str | Path) -> None:
    """Write the picture as PNG, SVG or PDF, from the tidy rows of `server_metrics` and `rounds`."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"The name of a picture must end in {', '.join(FORMATS)}. Got '{path.name}' instead.")
    draw(server, rounds).savefig(path, dpi=200, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def draw(server: Iterable[Row], rounds: Iterable[Row]) -> Figure:
    """Mean over seeds, the range over seeds as a band; bytes of a client and round as bars."""
    from matplotlib.figure import Figure

    rounds = list(rounds)
    looks = {
        label: line_style(number) for number, label in enumerate(dict.fromkeys(row["algorithm"] for row in rounds))
    }
    panels = series(server)
    if not panels:
        raise InputError("There is nothing to draw: no algorithm of this run notes a fitness (see neuroevolution).")
    figure = Figure(figsize=(3.1 * (len(panels) + 1), 2.9), layout="constrained")
    places = figure.subplots(1, len(panels) + 1)
    for axes, (name, found) in zip(places, panels.items(), strict=False):
        _curves(axes, found, looks)
        axes.set_title(PANELS[name], size=8.5, color=INK, loc="left")
        axes.set_xlabel("Generation", size=8)
    _traffic(places[-1], rounds, looks)
    for axes in places:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(labelsize=7, color=FAINT, labelcolor=INK)
    places[0].legend(fontsize=7, frameon=False)
    return figure


def series(server: Iterable[Row]) -> dict[str, Series]:
    """What algorithms noted about their generations, by panel."""
    panels: dict[str, Series] = {}
    for row in server:
        if row["split"] == "notes" and row["metric"] in PANELS:
            found = panels.setdefault(row["metric"], {}).setdefault(row["algorithm"], {})
            found.setdefault(row["round"], []).append(row["value"])
    return {name: panels[name] for name in PANELS if name in panels}


def traffic(rounds: Iterable[Row]) -> dict[str, tuple[float, float]]:
    """Mean bytes that one client sends and receives in a round, by algorithm."""
    sums: dict[str, list[int]] = {}
    for row in rounds:
        total = sums.setdefault(row["algorithm"], [0, 0, 0])
        for place, key in enumerate(("bytes_up", "bytes_down", "participants")):
            total[place] += row[key]
    return {label: (up / max(clients, 1), down / max(clients, 1)) for label, (up, down, clients) in sums.items()}


def _curves(axes: Axes, found: Series, looks: Mapping[str, dict[str, Any]]) -> None:
    for label, by_round in found.items():
        generations = np.array(sorted(by_round))
        values = [by_round[int(generation)] for generation in generations]
        low, high = (np.array([rule(value) for value in values]) for rule in (min, max))
        axes.fill_between(generations, low, high, color=looks[label]["color"], alpha=0.2, linewidth=0)
        mean = [float(np.mean(value)) for value in values]
        axes.plot(generations, mean, color=looks[label]["color"], linewidth=0.8, label=label)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)


def _traffic(axes: Axes, rounds: Iterable[Row], looks: Mapping[str, dict[str, Any]]) -> None:
    found = traffic(rounds)
    places = np.arange(len(found))
    for shift, (part, shade) in enumerate((("sent", 1.0), ("received", 0.45))):
        values = [both[shift] for both in found.values()]
        colours = [looks[label]["color"] for label in found]
        axes.barh(places + 0.4 * shift - 0.2, values, height=0.36, color=colours, alpha=shade)
        for place, value in zip(places, values, strict=True):
            axes.text(value, place + 0.4 * shift - 0.2, f" {part} {value:,.0f}", va="center", size=6.5, color=INK)
    axes.set_yticks(places, list(found))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(10, 100 * max(max(both) for both in found.values()))
    axes.set_title("Bytes a client and round", size=8.5, color=INK, loc="left")
