"""Draw the curves of a reproduction's rows in one picture: the global model against rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from fedloom.metrics import heading
from fedloom.record import Record
from fedloom.results.curve_numbers import monotone
from fedloom.results.figure_style import (
    FAINT,
    CaptionedFigure,
    add_legend,
    finish_axes,
    legend_size,
    line_style,
    new_figure,
    styled,
)
from fedloom.results.run_data import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = tuple[RunData, str]  # a run and a split


class Curves(Record):
    """What to draw for every row. With one split, rows whose names begin alike ("iid, …") share a panel."""

    splits: tuple[Literal["train", "validation", "test"], ...] = ("test",)
    """The splits to draw."""
    metrics: tuple[str, ...] = ("accuracy",)
    """The metrics to draw, a row of panels each."""
    best: bool = False
    """Draw the best value so far instead of each round's."""

    def panels(self, rows: Mapping[str, RunData]) -> dict[str, dict[str, Line]]:
        """Return panel → name of a line → where its values come from."""
        if len(self.splits) > 1:
            return {name: {split: (view, split) for split in self.splits} for name, view in rows.items()}
        found: dict[str, dict[str, Line]] = {}
        for name, view in rows.items():
            panel, _, rest = name.partition(", ")
            found.setdefault(panel if rest else "", {})[rest or name] = (view, self.splits[0])
        return found


@styled()
def draw(curves: Curves, rows: Mapping[str, RunData], title: str, target: float | None = None) -> CaptionedFigure:
    """Draw a column of panels per group and a row of panels per metric; of several seeds, the first."""
    panels = curves.panels(rows)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    width, height = legend_size(names)
    figure = new_figure(0.8 + 2.7 * len(panels) + width, max(0.6 + 2.1 * len(curves.metrics), height))
    grid = figure.subplots(len(curves.metrics), len(panels), sharex="col", sharey="row", squeeze=False)
    for place, metric in enumerate(curves.metrics):
        for axes, (panel, lines) in zip(grid[place], panels.items(), strict=True):
            for name, line in lines.items():
                _line(axes, line, metric, curves.best, name, names.index(name))
            if target is not None and metric == "accuracy":
                axes.axhline(target, color=FAINT, linewidth=0.7, linestyle=(0, (1, 2)))
            finish_axes(axes, panel if place == 0 else "", percent=metric == "accuracy")
        grid[place][0].set_ylabel(f"Best {metric} so far" if curves.best else heading(metric))
    for axes in grid[-1]:
        axes.set_xlabel("Round")
    add_legend(figure)
    return CaptionedFigure("curves", title, "The global model on the data that the server is measured on.", figure)


def _line(axes: Axes, line: Line, metric: str, best: bool, name: str, number: int) -> None:
    view, split = line
    rounds, values = view.server_values(*next(iter(view.cells)), metric, split)
    shown = monotone(values, view.metric(metric).higher_is_better) if best else values
    axes.plot(rounds, shown, **line_style(number), linewidth=1.2, label=name, marker="." if len(rounds) == 1 else "")
