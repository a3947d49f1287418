"""The figure of a sweep: a heat map over two keys for each algorithm, or a line over one key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.results import figure_style as style
from fedloom.results.figure_style import CaptionedFigure
from fedloom.results.table import show
from fedloom.tuning.search_space import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedloom.tuning.sweep import SweepResult, Trial


@dataclass(frozen=True)
class Panel:
    """A heat map of one algorithm: its keys, and the values of each that it was tried with."""

    label: str
    keys: tuple[str, ...]  # down, then across; there may be only one, or none
    rows: list[str]
    columns: list[str]

    @classmethod
    def of(cls, sweep: SweepResult, label: str) -> Panel:
        """The first two keys that this algorithm was tried with several values of."""
        keys = tuple(_varied(sweep, label)[:2])
        rows, columns = ([*(_values(sweep, key, label) for key in keys), [""], [""]])[:2]
        return cls(label, keys, rows, columns)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches, with room for the title."""
        return max(1.9, 0.62 * len(self.columns)), 0.6 + 0.34 * len(self.rows)

    def place(self, trial: Trial) -> tuple[int, ...]:
        """The row and the column of a setting."""
        ticks = zip(self.keys, (self.rows, self.columns), strict=False)
        return (*(values.index(short(trial.setting[key])) for key, values in ticks), 0, 0)[:2]


def draw(sweep: SweepResult) -> CaptionedFigure | None:
    """Draw every algorithm with the settings that it was tried with; None if nothing was varied."""
    keys = [key for key in sweep.keys if len(_values(sweep, key)) > 1]
    if not keys:
        return None
    with style.styled():
        return style.lay_out(_heat_maps(sweep, keys) if len(keys) > 1 else _lines(sweep, keys[0]))


def _labels(sweep: SweepResult) -> list[str]:
    return sorted({trial.label for trial in sweep.trials})


def _values(sweep: SweepResult, key: str, label: str | None = None) -> list[str]:
    """The distinct values of a key, of one algorithm or of all, in order: numbers by size, others as they come."""
    trials = (trial for trial in sweep.trials if label in (None, trial.label))
    values = [trial.setting[key] for trial in trials if key in trial.setting]
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return list(dict.fromkeys(short(value) for value in (sorted(values) if numeric else values)))


def _varied(sweep: SweepResult, label: str) -> list[str]:
    """The keys that an algorithm was tried with several values of."""
    return [key for key in sweep.keys if len(_values(sweep, key, label)) > 1]


def _heat_maps(sweep: SweepResult, keys: Sequence[str]) -> CaptionedFigure:
    panels = [Panel.of(sweep, label) for label in _labels(sweep)]
    beside = min(len(panels), max(1, int(12 / max(panel.size[0] for panel in panels))))  # panels in a row
    rows = math.ceil(len(panels) / beside)
    widths = [max(panel.size[0] for panel in panels[column::beside]) for column in range(beside)]
    heights = [max(panel.size[1] for panel in panels[row * beside : (row + 1) * beside]) for row in range(rows)]
    alike = all((panel.keys[:1], panel.rows) == (panels[0].keys[:1], panels[0].rows) for panel in panels)
    figure = style.new_figure(0.9 + sum(widths) + (0 if alike else 0.4 * (beside - 1)), 0.6 + sum(heights))
    settings: dict[str, Any] = {"width_ratios": widths, "height_ratios": heights, "sharey": alike, "squeeze": False}
    axes = list(figure.subplots(rows, beside, **settings).flat)
    for spare in axes[len(panels) :]:
        spare.set_visible(False)
    titles = style.panel_titles([panel.label for panel in panels])
    for here, panel in zip(axes, panels, strict=False):
        image = _draw_panel(here, sweep, panel)
        here.set_title(titles[panel.label], loc="left")
        if here is axes[0] or not alike:
            here.set_ylabel("".join(panel.keys[:1]))
    metric = sweep.metric
    style.show_percent(style.add_colour_bar(figure, image, axes, f"Validation {metric.name}", pad=0.02), metric.percent)
    unit = ", in per cent" if metric.percent else ""
    caption = f"Mean over seeds of {metric.name}{unit} of {sweep.measured}; – was not tried or failed."
    shown = [key for key in keys if any(key in panel.keys for panel in panels)]
    hidden = [key for key in keys if any(key in _varied(sweep, panel.label)[2:] for panel in panels)]
    caption += f" Best over {', '.join(hidden)}." if hidden else ""
    return CaptionedFigure("sweep", f"{metric.capital_title} over {' and '.join(shown)}", caption, figure)


def _draw_panel(axes: Axes, sweep: SweepResult, panel: Panel) -> Any:
    """Draw the means of one algorithm, in the colours that all panels share, and return the image."""
    measured = [trial for trial in sweep.trials if trial.values]
    means = [trial.spread.mean for trial in measured] or [0.0, 1.0]
    low, high, light_is_good = min(means), max(means), sweep.metric.higher_is_better
    grid = np.full((len(panel.rows), len(panel.columns)), np.nan)
    for trial in reversed([trial for trial in measured if trial.label == panel.label]):  # the best one stays
        grid[panel.place(trial)] = trial.spread.mean
    image = style.draw_grid(axes, grid, low, high, light_is_good)
    for (row, column), value in np.ndenumerate(grid):
        dark = (value - low) / (high - low or 1) < 0.55
        ink = style.INK if not math.isfinite(value) or dark != light_is_good else "white"
        text = show(float(value), sweep.metric.deviation_format)
        axes.text(column, row, text, ha="center", va="center", size=6.5, color=ink)
    axes.set_xticks(range(len(panel.columns)), panel.columns)
    axes.set_yticks(range(len(panel.rows)), panel.rows)
    axes.tick_params(bottom=len(panel.keys) > 1, left=len(panel.keys) > 0)
    axes.set_xlabel("".join(panel.keys[1:]))
    return image


def _lines(sweep: SweepResult, key: str) -> CaptionedFigure:
    everybody = _labels(sweep)
    labels = [label for label in everybody if _values(sweep, key, label)]
    width, height = style.legend_size(labels)
    figure = style.new_figure(4.3 + width, max(2.7, height))
    axes = figure.add_subplot()
    ticks = _values(sweep, key)
    for number, label in enumerate(labels):
        trials = [trial for trial in sweep.trials if trial.label == label and trial.values and key in trial.setting]
        found = dict(sorted((ticks.index(short(trial.setting[key])), trial.spread) for trial in trials))
        look, over = style.line_style(number), list(found.values())
        means = [one.mean for one in over]
        axes.plot(list(found), means, **look, marker="o", markersize=3, linewidth=1.4, label=label)
        if all(one.count > 1 for one in over):
            low, high = [one.low for one in over], [one.high for one in over]
            axes.fill_between(list(found), low, high, color=look["color"], alpha=0.15, linewidth=0)
    slanted: dict[str, Any] = {"rotation": 40, "ha": "right"} if sum(map(len, ticks)) > 40 else {}
    axes.set_xticks(range(len(ticks)), ticks, **slanted)
    axes.set_xlabel(key)
    axes.set_ylabel(f"Validation {sweep.metric.name}")
    axes.grid(axis="y", color=style.GRID, linewidth=0.6)
    style.show_percent(axes.yaxis, sweep.metric.percent)
    if len(everybody) > 1:
        style.add_legend(figure)
    metric = sweep.metric.capital_title
    caption = f"{metric} of {sweep.measured}: mean and, for several seeds, 95 % t interval."
    without = [label for label in everybody if label not in labels]
    caption += f" Not tried with {key}: {', '.join(without)}." if without else ""
    return CaptionedFigure("sweep", f"{metric} over {key}", caption, figure)
