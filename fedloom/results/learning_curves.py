"""The comparison picture: one metric against rounds, one line per algorithm, in the same colours everywhere."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError, nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

Row = Mapping[str, Any]
Values = dict[int, dict[int, list[float]]]  # round → seed → one value per client

PANELS = {
    "pre_fit": "Before local training",
    "post_fit": "After local training",
    "server": "Global model on the server",
}
FORMATS = (".png", ".svg", ".pdf")
# Okabe and Ito's colours are told apart by all common kinds of colour vision; yellow, pale on white, comes last.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
STYLES: tuple[Any, ...] = ("solid", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2.5)))
INK, FAINT = "#222222", "#808080"
# In inches. Text has a fixed size: a picture with more in it is a larger one.
PANEL, HEIGHT, LEFT, GAP, TOP, BOTTOM, LINE = 2.5, 2.1, 0.62, 0.2, 0.3, 0.5, 0.165


@dataclass(frozen=True)
class Curve:
    """The mean of a metric in some rounds, and a band around it."""

    rounds: NDArray[np.int64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


Panels = dict[str, dict[str, Curve]]  # panel → label → curve


def curves(
    clients: Iterable[Row], server: Iterable[Row], path: str | Path, metric: str = "accuracy", split: str = "test"
) -> None:
    """Write the picture of a metric against rounds as PNG, SVG or PDF, as the path's ending says."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"The name of a picture must end in {', '.join(FORMATS)}. Got '{path.name}' instead.")
    figure = draw(clients, server, metric, split)
    figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def draw(clients: Iterable[Row], server: Iterable[Row], metric: str = "accuracy", split: str = "test") -> Figure:
    """A metric against rounds, from the tidy rows of the store's tables `client_metrics` and `server_metrics`."""
    values: dict[str, dict[str, Values]] = {}
    looks: dict[str, dict[str, Any]] = {}
    known: dict[str, None] = {}
    undefined = False
    for rows, fixed in ((clients, None), (server, "server")):
        for row in rows:
            panel, label, value = fixed or row["phase"], row["algorithm"], row["value"]
            looks.setdefault(label, line_style(len(looks)))
            if panel not in PANELS:
                continue
            known[f"{row['metric']} on {row['split']}"] = None
            if row["metric"] != metric or row["split"] != split:
                continue
            if value is None or not math.isfinite(value):
                undefined = True
                continue
            rounds = values.setdefault(panel, {}).setdefault(label, {})
            rounds.setdefault(row["round"], {}).setdefault(row["seed"], []).append(value)
    if not values:
        what = f"{metric} on {split}"
        raise InputError(
            f"There is nothing to draw: no finite value of {what}. Measured: {', '.join(known) or 'nothing'}."
            + nearest(what, set(known) - {what})
        )
    seeds = max(len(found) for panel in values.values() for rounds in panel.values() for found in rounds.values())
    panels = {
        name: {label: curve(rounds, metric, seeds) for label, rounds in values[name].items()}
        for name in PANELS
        if name in values
    }
    caption = _caption(seeds, set(panels)) + (" Values that are not finite are left out." if undefined else "")
    return _draw(panels, looks, f"{split.capitalize()} {metric}", caption, several=seeds > 1)


def curve(rounds: Values, metric: str, seeds: int = 1) -> Curve:
    """The mean over clients and seeds, ± one standard deviation over clients, or with a 95 % t interval over seeds.

    >>> band = curve({1: {7: [0.5, 1.0]}}, "accuracy")
    >>> [float(side[0]) for side in (band.mean, band.low, band.high)]
    [0.75, 0.5, 1.0]
    """
    # a round that some seeds have not reached is left out: the mean over the others would be another curve
    most = max(len(found) for found in rounds.values())
    kept = sorted(round for round, found in rounds.items() if len(found) == most)
    means = np.array([[np.mean(values) for values in rounds[round].values()] for round in kept])
    if seeds == 1:
        reach = np.array([np.std(values) for round in kept for values in rounds[round].values()])
    elif most == 1:
        reach = np.zeros(len(kept))
    else:
        from scipy.stats import t

        reach = t.ppf(0.975, most - 1) * means.std(1, ddof=1) / math.sqrt(most)
    mean = means.mean(1)
    low, high = mean - reach, mean + reach
    if metric in ("accuracy", "auroc") or metric.startswith("top_"):
        low, high = low.clip(0, 1), high.clip(0, 1)
    elif (means >= 0).all():
        low = low.clip(0)
    return Curve(np.array(kept), mean, low, high)


def line_style(number: int) -> dict[str, Any]:
    """Colour and line style of the algorithm with this number: forty differ."""
    shift = number // len(COLOURS)
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[(number + shift) % len(STYLES)]}


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to the wanted ones (ascending), at least `gap` apart and between `low` and `high`.

    >>> spread([1.0, 1.0, 5.0], gap=1, low=0, high=9)
    [0.5, 1.5, 5.0]
    """
    # with i · gap taken off, "at least a gap apart" means "not falling": pool what falls, as in isotonic regression
    pools: list[tuple[float, int]] = []
    for number, place in enumerate(wanted):
        level, size = place - number * gap, 1
        while pools and pools[-1][0] > level:
            above, many = pools.pop()
            level, size = (above * many + level * size) / (many + size), many + size
        pools.append((level, size))
    levels = [level for level, size in pools for _ in range(size)]
    most = high - gap * (len(wanted) - 1)
    return [max(low, min(level, most)) + number * gap for number, level in enumerate(levels)]


def _caption(seeds: int, panels: set[str]) -> str:
    if seeds > 1:
        means = "seeds" if panels == {"server"} else "clients and seeds"
        return f"Lines: mean over {means} ({seeds} seeds). Bands: 95 % t interval over seeds."
    if panels == {"server"}:
        return "One seed."
    return "Lines: mean over clients. Bands: ± one standard deviation over clients. One seed."


def _draw(panels: Panels, looks: Mapping[str, dict[str, Any]], title: str, caption: str, several: bool) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()  # not pyplot's: no global state, no window
    FigureCanvasAgg(figure)  # measures text
    shown = [label for label in looks if any(label in drawn for drawn in panels.values())]
    names = {
        label: figure.text(0, 0, _short(label), size=8, color=INK, va="center", parse_math=False) for label in shown
    }
    column = 0.61 + max(name.get_window_extent().width for name in names.values()) / figure.dpi
    right = LEFT + len(panels) * (PANEL + GAP) - GAP
    width = right + column
    lines = textwrap.wrap(caption, int(width * 20))
    bottom = BOTTOM + 0.13 * len(lines)
    plot = max(HEIGHT, LINE * len(shown))
    height = bottom + plot + TOP
    figure.set_size_inches(width, height)
    figure.text(0.08 / width, 0.06 / height, "\n".join(lines), size=6.5, color=FAINT, va="bottom", linespacing=1.3)
    shade = (
        0.2 if several else 0.14 if len(shown) <= 4 else 0.09
    )  # bands over clients are wide: many must not hide lines
    first: Axes | None = None
    for place, (panel, drawn) in enumerate(panels.items()):
        left = LEFT + place * (PANEL + GAP)
        axes = figure.add_axes(
            (left / width, bottom / height, PANEL / width, plot / height), sharey=first, sharex=first
        )
        _draw_panel(axes, drawn, looks, shade)
        axes.set_title(PANELS[panel], size=8.5, color=INK, loc="left", pad=6)
        if first is None:
            axes.set_ylabel(title, size=8.5, color=INK)
        else:
            axes.tick_params(labelleft=False)
        first = first or axes
    _scale(figure.axes, panels)
    _name_lines(figure, panels, looks, names, right, bottom, plot)
    return figure


def _draw_panel(axes: Axes, drawn: dict[str, Curve], looks: Mapping[str, dict[str, Any]], shade: float) -> None:
    from matplotlib.ticker import MaxNLocator

    for label, line in drawn.items():
        colour = looks[label]["color"]
        if len(line.rounds) == 1:
            axes.vlines(line.rounds, line.low, line.high, color=colour, alpha=2 * shade, linewidth=4, zorder=1)
        elif (line.high > line.low).any():
            axes.fill_between(line.rounds, line.low, line.high, color=colour, alpha=shade, linewidth=0, zorder=1)
        marker = "o" if len(line.rounds) <= 10 else ""
        axes.plot(line.rounds, line.mean, **looks[label], linewidth=1.4, marker=marker, markersize=2.6, zorder=3)
    axes.set_xlabel("Round", size=8.5, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.margins(x=0.03)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(which="both", labelsize=7.5, color=FAINT, labelcolor=INK, width=0.7)


def _scale(panels: Sequence[Axes], drawn: Panels) -> None:
    """A logarithmic scale where means differ by orders of magnitude, as when one algorithm diverges."""
    means = np.concatenate([line.mean for panel in drawn.values() for line in panel.values()])
    if means.min() > 0 and means.max() > 50 * means.min():
        for axes in panels:
            axes.set_yscale("log", nonpositive="clip")
        panels[0].set_ylim(means.min() / 1.6, means.max() * 1.6)


def _name_lines(
    figure: Figure,
    panels: Panels,
    looks: Mapping[str, dict[str, Any]],
    names: Mapping[str, Text],
    right: float,
    bottom: float,
    plot: float,
) -> None:
    """Names at the right, with a sample of the line, each as near to the end of its line as there is room."""
    from matplotlib.lines import Line2D

    def add(x: tuple[float, float], y: tuple[float, float], **style: Any) -> None:
        figure.add_artist(Line2D([(right + side) / width for side in x], [side / height for side in y], **style))

    width, height = figure.get_size_inches()
    axes, last = figure.axes[-1], list(panels.values())[-1]
    axes.get_ylim()  # limits are lay_out when they are asked for, and the places below depend on them
    to_share = axes.transData + axes.transAxes.inverted()
    ends: dict[str, float] = {}
    for drawn in panels.values():
        for label, line in drawn.items():
            share = float(to_share.transform((line.rounds[-1], line.mean[-1]))[1])
            ends[label] = bottom + plot * min(max(share, 0.0), 1.0)
    order = sorted(ends, key=lambda label: ends[label])
    places = spread([ends[label] for label in order], LINE, bottom, bottom + plot)
    for label, place in zip(order, places, strict=True):
        if label in last:  # otherwise its line ends in an earlier panel
            add((0.02, 0.16), (ends[label], place), color=looks[label]["color"], linewidth=0.6)
        add((0.16, 0.46), (place, place), **looks[label], linewidth=1.4)
        names[label].set_position(((right + 0.51) / width, place / height))


def _short(label: str) -> str:
    return label if len(label) <= 28 else label[:27] + "…"
