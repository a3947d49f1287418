"""The result at a glance: every seed, the mean and its interval, for a page or a sheet of paper, and for a phone."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedloom.data.figure import shorten, shorten_all
from fedloom.results import figure_style as style
from fedloom.results.comparisons import Comparison, main_comparison, universal_comparison
from fedloom.results.figure_style import FAINT, INK, CaptionedFigure
from fedloom.results.run_data import RunData
from fedloom.results.statistics import spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHONE = 3.45  # inches: a figure this wide fits into a report on a phone, with text that can be read
PHONE_LETTERS = 40  # of a name that fit across it


def at_a_glance(run: RunData) -> CaptionedFigure | None:
    """The main comparison, and the universal test if there is one."""
    main = main_comparison(run)
    if main is None:
        return None
    shown = [one for one in (main, universal_comparison(run, main.metric.name)) if one is not None]
    labels = [label for label in run.labels if any(label in one.values for one in shown)]
    colours = {label: look["color"] for label, look in style.line_styles(run.labels).items()}
    looks = {label: colours[label] for label in labels}
    seeds = "Dots: seeds. Bars: 95 % t interval over seeds. " if len(run.seeds) > 1 else "One seed. "
    better = "higher" if main.metric.higher_is_better else "lower"
    caption = f"{seeds}Strokes: mean. Axes do not start at zero; {better} is better."
    return CaptionedFigure("headline", "At a glance", caption, _side_by_side(shown, looks), _stacked(shown, looks))


def _side_by_side(shown: Sequence[Comparison], colours: dict[str, str]) -> Figure:
    """Panels beside each other, and the names of algorithms at the left."""
    row = 0.24 if len(colours) <= 20 else 0.17
    figure = style.new_figure(0.7 + 0.09 * max(map(len, colours)) + 2.9 * len(shown), 0.95 + row * len(colours))
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, one in zip(panels, shown, strict=True):
        _draw_panel(axes, one, colours)
    panels[0].set_yticks(range(len(colours)), list(colours))
    return figure


def _stacked(shown: Sequence[Comparison], colours: dict[str, str]) -> Figure:
    """Panels below each other, and each name above its row."""
    figure = style.new_figure(PHONE, len(shown) * (0.65 + 0.36 * len(colours)))
    for axes, one in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        _draw_panel(axes, one, colours)
        axes.set_ylim(len(colours) - 0.6, -0.8)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        for place, name in enumerate(shorten_all(list(colours), PHONE_LETTERS)):
            axes.text(0, place - 0.3, name, color=INK, va="bottom", transform=axes.get_yaxis_transform())
    return figure


def _draw_panel(axes: Axes, comparison: Comparison, colours: dict[str, str]) -> None:
    for place, (label, colour) in enumerate(colours.items()):
        _draw_seeds(axes, place, comparison, label, colour)
    title = "\n".join(textwrap.wrap(shorten(comparison.title, 144), 48))
    style.finish_axes(axes, title, comparison.metric.percent, most_ticks=0, values="x")
    axes.set_ylim(len(colours) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _draw_seeds(axes: Axes, place: int, comparison: Comparison, label: str, colour: str) -> None:
    values = list(comparison.values.get(label, {}).values())
    if not values:
        middle = {"ha": "center", "va": "center", "transform": axes.get_yaxis_transform()}
        axes.text(0.5, place, "no global model", color=FAINT, size=7, **middle)  # type: ignore[arg-type]
        return
    over_seeds = spread(values)
    if over_seeds.count > 1:
        ends = style.clip_share(over_seeds.interval, comparison.metric.share)  # the axis ends there
        axes.plot(ends, [place, place], color=colour, linewidth=5, alpha=0.25, solid_capstyle="butt")
    axes.scatter(values, [place] * len(values), s=9, color=colour, alpha=0.75, zorder=3, linewidths=0)
    axes.plot([over_seeds.mean], [place], marker="|", markersize=11, markeredgewidth=1.8, color=colour, zorder=4)
