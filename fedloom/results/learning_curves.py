"""The figure of a metric against rounds: one panel per way of measuring, one line per algorithm."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.figure import shorten_all
from fedloom.data.split import SPLITS
from fedloom.errors import InputError, nearest
from fedloom.metrics import is_share
from fedloom.results.figure_style import FAINT, INK, finish_axes, new_figure, plot_line, styled
from fedloom.results.run_data import RunData
from fedloom.results.run_values import ClientValues, Curve, Floats, MetricInfo, Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

Panels = dict[str, dict[str, list[Stats]]]  # panel → label → statistics over clients by round, for each seed
Styles = Mapping[str, dict[str, Any]]  # label → colour and line style
TITLES = {
    "pre_fit": "Before local training",
    "post_fit": "After local training",
    "server": "Global model on the server",
}
MOST_BANDS = 20  # with more lines, bands around them would hide everything, and only the best lines can be followed
NEAR = 0.015  # of all that lines range over: nearer ones hide each other
MOST_LETTERS = 200  # of their names: more would be a second figure's worth of text
BEST = 12  # lines in colour and with a name, if there are too many
LONGEST = 80  # letters of a name: the figure is as wide as the longest one needs, but not without end
OTHERS: dict[str, Any] = {"color": "#c8c8c8", "linestyle": "solid", "linewidth": 0.6}
Edges = tuple[float, float, float]  # of the panels, in inches: right, bottom, height
# In inches. Text has a fixed size: a figure with more in it is larger.
PANEL, HEIGHT, LEFT, GAP, TOP, BOTTOM, LINE = 2.5, 2.1, 0.7, 0.2, 0.3, 0.5, 0.165


@dataclass(frozen=True)
class Band:
    """The mean of a metric in some rounds, and a band around it."""

    rounds: NDArray[np.int64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


Bands = Mapping[str, Mapping[str, Band]]  # panel → label → its line


def draw_run(run: RunData, styles: Styles, metric: str = "accuracy", split: str | None = None) -> Figure:
    """Draw a metric of a run against rounds, on the test split if it was measured there."""
    for one in (split,) if split else ("test", *SPLITS, "notes"):
        panels, undefined = _panels(run, metric, one)
        if panels:
            note = " Values that are not finite are left out." if undefined else ""
            titles = {panel: panel_title(run, panel) for panel in panels}
            return draw(panels, styles, metric, one, note, run.metric(metric).higher_is_better, titles)
    what, known = f"{metric} on {split or 'test'}", _measured(run)
    metrics = [one.rpartition(" on ")[0] for one in known]  # with " on test", all names look alike
    raise InputError(
        f"There is nothing to draw: no finite value of {what}. Measured: {', '.join(known) or 'nothing'}."
        + ("" if metric in metrics else nearest(metric, metrics))
    )


def panel_title(run: RunData, panel: str) -> str:
    """What a panel shows, and whether it is about some of the clients only."""
    united = panel == "server" and not run.server_holds("test")
    return ("Global model, all clients' tests" if united else TITLES[panel]) + run.drawn(panel)


def _panels(run: RunData, metric: str, split: str) -> tuple[Panels, int]:
    """The statistics to draw, and how many values are left out because they are not finite."""
    panels: Panels = {}
    undefined = 0
    for panel in TITLES:
        for label, seed in run.cells:
            values = panel_values(run, label, seed, panel, metric, split)
            undefined += values.undefined
            if len(values):
                panels.setdefault(panel, {}).setdefault(label, []).append(values.by_round())
    return panels, undefined


def panel_values(run: RunData, label: str, seed: int, panel: str, metric: str, split: str = "test") -> ClientValues:
    """The values of one cell that a panel shows: at its clients, or one a round if the server measured them."""
    if panel == "server":
        return _one_a_round(run.server_values(label, seed, metric, split))
    return run.client_values(label, seed, panel, metric, split)


def _one_a_round(curve: Curve) -> ClientValues:
    rounds, values = curve
    finite = np.isfinite(values)
    return ClientValues(rounds, np.zeros_like(rounds), values, int((~finite).sum())).keep(finite)


def _measured(run: RunData) -> list[str]:
    """What could be drawn instead."""
    rows = (row for cell in run.cells for row in run.rows("server_metrics", *cell))
    notes = (("notes", row["metric"]) for row in rows if row["split"] == "notes")
    wanted = [*product(("test", *SPLITS), run.metrics), *notes]
    return list(dict.fromkeys(f"{metric} on {split}" for split, metric in wanted if _panels(run, metric, split)[0]))


def draw(
    panels: Panels,
    styles: Styles,
    metric: str = "accuracy",
    split: str = "test",
    note: str = "",
    higher_is_better: bool = True,
    titles: Mapping[str, str] = TITLES,
) -> Figure:
    """Draw statistics of a metric against rounds; the names of the lines stand to the right of the last panel.

    If there are too many to follow, only the best ones at the end have a colour and a name.
    """
    with styled():
        return _draw(panels, styles, metric, split, note, higher_is_better, titles)


def _draw(
    panels: Panels,
    styles: Styles,
    metric: str,
    split: str,
    note: str,
    higher_is_better: bool,
    titles: Mapping[str, str],
) -> Figure:
    seeds = max(len(found) for panel in panels.values() for found in panel.values())
    bands = {
        name: {label: band(found, metric, seeds) for label, found in panel.items()} for name, panel in panels.items()
    }
    shown = [label for label in styles if any(label in drawn for drawn in bands.values())]
    crowded = len(shown) > MOST_BANDS
    if crowded:
        best = _best(bands, higher_is_better)
        note = f" In colour: the {BEST} that end best; the {len(shown) - BEST} others are in the tables.{note}"
        styles = {label: styles[label] if label in best else OTHERS for label in shown}
        shown = [label for label in shown if label in best]
    figure = new_figure(1, 1, arranged=False)
    names = {
        label: figure.text(0, 0, short, size=8, color=INK, va="center")
        for label, short in zip(shown, shorten_all(shown, LONGEST), strict=True)
    }
    right = LEFT + len(bands) * (PANEL + GAP) - GAP
    width = right + 0.61 + max(name.get_window_extent().width for name in names.values()) / figure.dpi
    said = (
        caption(seeds, set(bands), crowded)
        + _on_each_other(bands, shown, titles, MetricInfo(metric, True, True).percent)
        + note
    )
    lines = textwrap.wrap(said, int(width * 20))
    bottom, plot = BOTTOM + 0.13 * len(lines), max(HEIGHT, LINE * len(shown))
    height = bottom + plot + TOP
    figure.set_size_inches(width, height)
    figure.text(0.08 / width, 0.06 / height, "\n".join(lines), size=6.5, color=FAINT, va="bottom", linespacing=1.3)
    shade = (
        0.0 if crowded else 0.2 if seeds > 1 else 0.14 if len(shown) <= 4 else 0.09
    )  # wide bands over clients must not hide lines
    first: Axes | None = None
    percent = MetricInfo(metric, True, True).percent
    for place, (panel, drawn) in enumerate(bands.items()):
        corner = (LEFT + place * (PANEL + GAP)) / width, bottom / height
        axes = figure.add_axes((*corner, PANEL / width, plot / height), sharey=first, sharex=first)
        _draw_panel(axes, drawn, styles, shade)
        finish_axes(axes, titles[panel], percent, most_ticks=6)
        if first is None:
            axes.set_ylabel(f"{split.capitalize()} {metric}")
        else:
            axes.tick_params(labelleft=False)
        first = first or axes
    if not percent:  # a share reads best on a plain scale
        _scale(figure.axes, bands)
    _name_lines(figure, bands, styles, names, (right, bottom, plot))
    return figure


def _on_each_other(bands: Bands, shown: Sequence[str], titles: Mapping[str, str], percent: bool) -> str:
    """Name the lines that hide each other at the end, panel by panel: a reader would count fewer of them."""
    means = np.concatenate([line.mean for panel in bands.values() for line in panel.values()])
    scale = np.log if not percent and _differ_by_orders(means) else np.asarray
    near, found = NEAR * float(np.ptp(scale(means))), dict[str, list[str]]()
    short = dict(zip(shown, shorten_all(shown, LONGEST), strict=True))
    for panel, drawn in bands.items():
        groups: list[list[str]] = []
        for label in (label for label in shown if label in drawn):
            home = next((some for some in groups if _apart(drawn[some[0]], drawn[label], scale) < near), None)
            groups += [[label]] if home is None else []
            if home is not None:
                home.append(label)
        for group in (group for group in groups if len(group) > 1):
            found.setdefault(", ".join(short[label] for label in group), []).append(
                titles[panel][0].lower() + titles[panel][1:]
            )
    listed = "; ".join(f"{' and '.join(panels)}: {names}" for names, panels in found.items())
    if len(listed) > MOST_LETTERS:
        return " Some lines lie on each other in the second half: the tables tell them apart."
    return f" Lines that lie on each other in the second half, {listed}." if listed else ""


def _apart(one: Band, other: Band, scale: Callable[[Floats], Floats]) -> float:
    """Return how far two lines are from each other, on average over the second half of the rounds that both have."""
    rounds, here, there = np.intersect1d(one.rounds, other.rounds, return_indices=True)
    half = len(rounds) // 2
    return float(np.abs(scale(one.mean[here]) - scale(other.mean[there]))[half:].mean()) if len(rounds) > 1 else np.inf


def _best(bands: Bands, higher_is_better: bool) -> set[str]:
    """Return the labels whose lines end best, in the last of the panels with the most lines."""
    fullest = max(reversed(list(bands.values())), key=len)
    order = sorted(fullest, key=lambda label: float(fullest[label].mean[-1]), reverse=higher_is_better)
    return set(order[:BEST])


def band(seeds: Sequence[Stats], metric: str, most_seeds: int = 1) -> Band:
    """The mean over clients and seeds, ± one standard deviation over clients, or with a 95 % t interval over seeds.

    >>> found = band([Stats(*(np.array([value]) for value in (1, 0.75, 0.25, 0.5, 1.0)))], "accuracy")
    >>> [float(side[0]) for side in (found.mean, found.low, found.high)]
    [0.75, 0.5, 1.0]
    """
    # leave out rounds that some seeds have not reached: the mean over the others would be another curve
    index, mean, std = (np.concatenate([getattr(one, part) for one in seeds]) for part in ("index", "mean", "std"))
    rounds, counts = np.unique(index, return_counts=True)
    count = int(counts.max())
    rounds = rounds[counts == count]
    here = np.argsort(index, kind="stable")
    here = here[np.isin(index[here], rounds)]
    means = mean[here].reshape(-1, count)  # round × seed
    if most_seeds == 1:
        reach = std[here]
    elif count == 1:
        reach = np.zeros(len(rounds))
    else:
        from scipy.stats import t

        reach = t.ppf(0.975, count - 1) * means.std(1, ddof=1) / math.sqrt(count)
    low, high = means.mean(1) - reach, means.mean(1) + reach
    if is_share(metric):
        low, high = low.clip(0, 1), high.clip(0, 1)
    elif (means >= 0).all():
        low = low.clip(0)
    return Band(rounds, means.mean(1), low, high)


def spread_places(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to the wanted ones (ascending), at least `gap` apart and between `low` and `high`.

    >>> spread_places([1.0, 1.0, 5.0], gap=1, low=0, high=9)
    [0.5, 1.5, 5.0]
    """
    # after subtracting i · gap, "at least a gap apart" means "not falling": pool what falls, as in isotonic regression
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


def caption(seeds: int, panels: set[str], crowded: bool, known: int | None = None) -> str:
    """Say what lines and bands show; `known` is how many of the seeds there are at most, if not all."""
    if seeds > 1:
        means = "seeds" if panels == {"server"} else "clients and seeds"
        means += ", of the global model over seeds" if "server" in panels and len(panels) > 1 else ""
        bands = "Bands would hide the lines." if crowded else "Bands: 95 % t interval over seeds."
        bands = "One seed has no interval." if known == 1 else bands
        some = "" if known in (None, seeds) else f"up to {known} of "
        return f"Lines: mean over {means} ({some}{seeds} seeds). {bands}"
    if panels == {"server"}:
        return "One seed."
    bands = "Bands would hide the lines." if crowded else "Bands: ± one standard deviation over clients."
    but = "; the global model is one" if "server" in panels else ""
    return f"Lines: mean over clients{but}. {bands} One seed."


def _draw_panel(axes: Axes, drawn: dict[str, Band], styles: Styles, shade: float) -> None:
    for label, line in drawn.items():
        colour = styles[label]["color"]
        if not shade:  # too many lines for bands
            pass
        elif len(line.rounds) == 1:
            axes.vlines(line.rounds, line.low, line.high, color=colour, alpha=2 * shade, linewidth=4, zorder=1)
        elif (line.high > line.low).any():
            axes.fill_between(line.rounds, line.low, line.high, color=colour, alpha=shade, linewidth=0, zorder=1)
        plot_line(axes, line.rounds, line.mean, **styles[label], zorder=2 if styles[label] is OTHERS else 3)
    axes.set_xlabel("Round")
    axes.margins(x=0.03)
    axes.tick_params(which="both", width=0.7)


def _differ_by_orders(means: Floats) -> bool:
    return bool(means.min() > 0 and means.max() > 50 * means.min())


def _scale(panels: Sequence[Axes], bands: Bands) -> None:
    """Use a logarithmic scale if means differ by orders of magnitude, as when one algorithm diverges."""
    means = np.concatenate([line.mean for panel in bands.values() for line in panel.values()])
    if _differ_by_orders(means):
        for axes in panels:
            axes.set_yscale("log", nonpositive="clip")
        panels[0].set_ylim(means.min() / 1.6, means.max() * 1.6)


def _name_lines(figure: Figure, bands: Bands, styles: Styles, names: Mapping[str, Text], edges: Edges) -> None:
    """Put names at the right, each with a sample of its line and as near to the line's end as there is room."""
    from matplotlib.lines import Line2D

    def add(x: tuple[float, float], y: tuple[float, float], **style: Any) -> None:
        figure.add_artist(Line2D([(right + side) / width for side in x], [side / height for side in y], **style))

    (width, height), (right, bottom, plot) = figure.get_size_inches(), edges
    axes, last = figure.axes[-1], list(bands.values())[-1]
    axes.get_ylim()  # settles the limits, which the places below depend on
    to_share = axes.transData + axes.transAxes.inverted()
    ends: dict[str, float] = {}
    for drawn in bands.values():
        for label, line in drawn.items():
            if label not in names:
                continue
            share = float(to_share.transform((line.rounds[-1], line.mean[-1]))[1])
            ends[label] = bottom + plot * min(max(share, 0.0), 1.0)
    order = sorted(ends, key=lambda label: ends[label])
    places = spread_places([ends[label] for label in order], LINE, bottom, bottom + plot)
    for label, place in zip(order, places, strict=True):
        if label in last:  # otherwise its line ends in an earlier panel
            add((0.02, 0.16), (ends[label], place), color=styles[label]["color"], linewidth=0.6)
        add((0.16, 0.46), (place, place), **styles[label], linewidth=1.4)
        names[label].set_position(((right + 0.51) / width, place / height))
