"""The figure of an evolution: fitness, validation and diversity against generations, and the bytes it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.errors import InputError
from fedloom.results.figure_style import INK, add_legend, finish_axes, legend_size, line_styles, new_figure, styled
from fedloom.results.run_data import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Generations = dict[str, dict[int, list[float]]]  # label → generation → one value per seed
PANELS = {
    "fitness": "Fitness of the fittest",
    "validation": "Validation accuracy of the fittest",
    "diversity": "Diversity of the population",
}


def draw(run: RunData) -> Figure:
    """Draw the mean over seeds with the range over seeds as a band; bytes per client and round are bars."""
    panels = {name: found for name in PANELS if (found := generations(run, name))}
    if not panels:
        raise InputError("There is nothing to draw: no algorithm of this run notes a fitness (see neuroevolution).")
    styles = line_styles(run.labels)
    with styled():
        width, height = legend_size(list({label: None for found in panels.values() for label in found}))
        names = 0.066 * max(map(len, run.labels))  # beside the bars
        figure = new_figure(3.1 * (len(panels) + 1) + names + width, max(2.9, height, 0.6 + 0.25 * len(run.labels)))
        *places, last = figure.subplots(1, len(panels) + 1)
        for axes, (name, found) in zip(places, panels.items(), strict=True):
            for label, values in found.items():
                rounds, colour = list(values), styles[label]["color"]
                low, high, mean = ([float(rule(seeds)) for seeds in values.values()] for rule in (min, max, np.mean))
                axes.fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)
                axes.plot(rounds, mean, color=colour, linewidth=0.8, label=label)
            finish_axes(axes, PANELS[name], percent=name == "validation")
            axes.set_xlabel("Generation")
        _draw_bytes(last, bytes_per_client_and_round(run), styles)
        add_legend(figure)
    return figure


def generations(run: RunData, note: str) -> Generations:
    """One of the numbers that evolutions note about each generation."""
    found: Generations = {}
    for label, seed in run.cells:
        for round, value in zip(*run.server_values(label, seed, note, "notes"), strict=True):
            found.setdefault(label, {}).setdefault(int(round), []).append(float(value))
    return {label: dict(sorted(values.items())) for label, values in found.items()}


def bytes_per_client_and_round(run: RunData) -> dict[str, tuple[float, float]]:
    """Label → mean bytes that one client sends and receives in a round."""
    found = {}
    for label in run.labels:
        costs = [run.costs(label, seed) for seed in run.seeds]
        clients = max(sum(int(one.participants.sum()) for one in costs), 1)
        up, down = sum(int(one.bytes_up.sum()) for one in costs), sum(int(one.bytes_down.sum()) for one in costs)
        found[label] = (up / clients, down / clients)
    return found


def _draw_bytes(axes: Axes, found: dict[str, tuple[float, float]], styles: dict[str, dict[str, Any]]) -> None:
    places = np.arange(len(found))
    colours = [styles[label]["color"] for label in found]
    for part, (word, shade) in enumerate((("sent", 1.0), ("received", 0.45))):
        values, heights = [both[part] for both in found.values()], places + 0.4 * part - 0.2
        axes.barh(heights, values, height=0.36, color=colours, alpha=shade)
        for height, value in zip(heights, values, strict=True):
            axes.text(value, height, f" {word} {value:,.0f}", va="center", size=6.5, color=INK)
    axes.set_yticks(places, list(found))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(10, 100 * max(max(both) for both in found.values()))
    axes.set_title("Bytes per client and round", loc="left")
