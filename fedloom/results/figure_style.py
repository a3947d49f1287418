"""How figures are made: one style, real text in SVG, panels with common axes, numbers people can read."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.results.learning_curves import FAINT, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 12  # algorithms beyond these are in the tables
STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched, copied and read aloud
    "svg.hashsalt": "fedloom",
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure with what it shows."""

    name: str
    title: str
    caption: str
    figure: Figure

    @cached_property
    def svg(self) -> str:
        """As the text of an `<svg>` element."""
        import matplotlib

        out = io.StringIO()
        with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
            self.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        return re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)

    def save(self, folder: Path) -> list[Path]:
        """As PNG and SVG."""
        picture, drawing = folder / f"{self.name}.png", folder / f"{self.name}.svg"
        self.figure.savefig(picture, dpi=180)
        drawing.write_text('<?xml version="1.0" encoding="utf-8"?>\n' + self.svg, encoding="utf-8")
        return [picture, drawing]


def lay_out(drawn: CaptionedFigure) -> CaptionedFigure:
    """Lay it out once: otherwise every format does so again, which takes longer than drawing."""
    if drawn.figure.get_layout_engine() is not None:
        drawn.figure.draw_without_rendering()
        drawn.figure.set_layout_engine("none")
    return drawn


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # room at the edges: text is a little wider in some formats than in others
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure = Figure(figsize=(width, height), layout=layout)  # not pyplot's: no global state, no window
    FigureCanvasAgg(figure)
    return figure


def panel_grid(labels: Sequence[str], height: float) -> tuple[Figure, list[Axes]]:
    """One panel per algorithm, at most four in a row, with common axes."""
    shown = labels[:MOST_PANELS]
    columns = min(4, len(shown)) if len(shown) != 5 else 3
    rows = math.ceil(len(shown) / columns)
    figure = new_figure(0.9 + 1.95 * columns, 0.5 + height * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for place, spare in enumerate(axes[len(shown) :], len(shown)):
        spare.set_visible(False)
        above = axes[place - columns] if place >= columns else None
        if above is not None:  # its column ends earlier: its own axis must be readable
            above.tick_params(labelbottom=True)
    for row in grid[1:]:
        row[0].set_ylabel(" ")
    return figure, axes


def finish_axes(axes: Axes, title: str, percent: bool, whole: bool = True) -> None:
    """A title, a quiet grid, and ticks that suit the numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    show_percent(axes.yaxis, percent)


def show_percent(axis: Any, percent: bool) -> None:
    """Shares as percentages."""
    if percent:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))


def share_legend(figure: Figure) -> None:
    """Which line is before local training and which after."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [], [], color="#6b6b6b", linestyle=(0, (4, 1.5)), linewidth=1.4, label="before local training (pre_fit)"
        ),
        Line2D([], [], color=INK, linewidth=1.4, label="after local training (post_fit), in the algorithm's colour"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False)


def clip(values: Any, percent: bool) -> Any:
    """Shares stay between 0 and 1."""
    return np.clip(values, 0, 1) if percent else values


def short(text: str, length: int) -> str:
    """Names of many clients often differ at their end only, so the middle is left out; $ is no formula here."""
    cut = text if len(text) <= length else f"{text[: length // 2]}…{text[-(length // 2 - 1) :]}"
    return cut.replace("$", r"\$")
