"""The one style of all figures: colours, text as text in SVG, panels with common axes, readable numbers."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fedloom.data.figure import readable_names, save, shorten_all
from fedloom.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
MOST_PANELS = 12  # algorithms beyond these are only in the tables
# Okabe and Ito's colours differ for all common kinds of colour vision. Tol's wine replaces their yellow, pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#882255")
DASHES: tuple[Any, ...] = (
    *("solid", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2.5))),
    *((0, (6, 1.5, 1.2, 1.5, 1.2, 1.5)), (0, (2.5, 1)), (0, (1, 3)), (0, (9, 1.5, 3, 1.5))),
)
TITLE_LETTERS = 26  # in a line over a panel
LEGEND_ROWS = 20  # names in a column of a legend
INK, FAINT, GRID = "#222222", "#808080", "#e4e4e4"
BEFORE_TRAINING: dict[str, Any] = {"color": "#6b6b6b", "linestyle": (0, (4, 1.5))}
STYLE_FILE = Path(__file__).parent / "templates" / "figures.mplstyle"


@contextmanager
def styled() -> Iterator[None]:
    """A `with` block in which matplotlib draws in this style."""
    import matplotlib

    with matplotlib.rc_context(fname=STYLE_FILE), readable_names():
        yield


def line_styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Label → the colour and line style of this algorithm."""
    return {label: line_style(number) for number, label in enumerate(labels)}


def line_style(number: int) -> dict[str, Any]:
    """The colour and line style of the algorithm with this number; the first 72 all differ."""
    # there are 8 colours and 9 line styles, and no number but 1 divides both
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)]}


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure with its file name, title and caption."""

    name: str
    title: str
    caption: str
    figure: Figure
    on_phones: Figure | None = None  # the same, as a report shows it on a narrow screen

    @cached_property
    def svg(self) -> str:
        """The figure as an `<svg>` element."""
        return svg(self.figure)

    def save(self, folder: Path) -> list[Path]:
        """Write the figure as PNG, as SVG with real text, and as PDF with its fonts; return the paths."""
        png, svg, pdf = (folder / f"{self.name}{ending}" for ending in FORMATS)
        with styled():
            save(self.figure, png, dpi=180)
            save(self.figure, pdf, metadata={"CreationDate": None})
        svg.write_text('<?xml version="1.0" encoding="utf-8"?>\n' + self.svg, encoding="utf-8")
        return [png, svg, pdf]


def svg(figure: Figure) -> str:
    """A figure as an `<svg>` element."""
    out = io.StringIO()
    with styled():
        save(figure, out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the path ends with: PNG, SVG or PDF."""
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise InputError(f"The name of a picture must end in {', '.join(FORMATS)}. Got '{path.name}' instead.")
    with styled():
        save(figure, path, dpi=200, metadata={"Date": None} if ending == ".svg" else None)


def lay_out(drawn: CaptionedFigure) -> CaptionedFigure:
    """Arrange the figure's parts once. Otherwise every format arranges them again, which takes longer than drawing."""
    for figure in (drawn.figure, drawn.on_phones):
        if figure is not None and figure.get_layout_engine() is not None:
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
    return drawn


def new_figure(width: float, height: float, *, arranged: bool = True) -> Figure:
    """An empty figure, its size in inches. It is not one of pyplot's: no global state, no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # room at the edges: text is a little wider in some formats than in others, and widest at the 72 dots of an SVG file
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06) if arranged else None
    figure = Figure(figsize=(width, height), layout=layout, dpi=72)
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
        if place >= columns:  # the panel above is the last one of its column: it needs the labels of the axis
            axes[place - columns].tick_params(labelbottom=True)
    for row in grid[1:]:
        row[0].set_ylabel(" ")
    return figure, axes


def plot_line(axes: Axes, x: Any, y: Any, **style: Any) -> None:
    """Draw a line, with a marker at each point if there are few."""
    few = {"marker": "o", "markersize": 2.6} if len(x) <= 10 else {}
    axes.plot(x, y, **{"linewidth": 1.4, **few, **style})


def finish_axes(axes: Axes, title: str, percent: bool, most_ticks: int = 5, values: Literal["x", "y"] = "y") -> None:
    """Set the title, a quiet grid for the axis of the values, and ticks that suit the numbers.

    `most_ticks` keeps the other axis to a few whole numbers; 0 leaves it as it is.
    """
    axes.set_title(title, loc="left")
    axes.grid(axis=values, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    if most_ticks:
        whole_numbers(axes, most_ticks)
    show_percent(axes.yaxis if values == "y" else axes.xaxis, percent)


def whole_numbers(axes: Axes, most_ticks: int = 5) -> None:
    """Label a few whole numbers on the axis of rounds: there is no round 2.5."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(most_ticks, integer=True, min_n_ticks=1))


def panel_titles(labels: Sequence[str]) -> dict[str, str]:
    """Label → its title, in at most three lines that fit a panel; shortened titles stay different."""
    short = shorten_all(labels, 3 * TITLE_LETTERS - 6)  # 6: where all are alike, they are numbered
    return {label: _in_lines(title) for label, title in zip(labels, short, strict=True)}


def _in_lines(title: str) -> str:
    lines = textwrap.wrap(title, TITLE_LETTERS)
    if len(lines) > 3:  # between words there are too few places for a new line
        lines = [title[start : start + TITLE_LETTERS] for start in range(0, len(title), TITLE_LETTERS)]
    return "\n".join(lines)


def show_percent(axis: Any, percent: bool) -> None:
    """Label the ticks of an axis in per cent, if its numbers are shares."""
    if percent:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], min_n_ticks=3))
        # rounded labels would look uneven, such as 98.8, 99 and 99.2 for steps of a quarter
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.6g} %"))


def legend_size(labels: Sequence[str]) -> tuple[float, float]:
    """The width and height in inches of a legend with these names."""
    columns = math.ceil(len(labels) / LEGEND_ROWS)
    return columns * (0.55 + 0.066 * max(map(len, labels))), 0.4 + 0.165 * math.ceil(len(labels) / columns)


def add_legend(figure: Figure) -> None:
    """Name every line once, to the right of all panels, in columns if there are many."""
    lines = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = math.ceil(len(lines) / LEGEND_ROWS)
    figure.legend(lines.values(), lines.keys(), loc="outside right center", frameon=False, ncols=columns)


def draw_grid(axes: Axes, values: Any, low: float, high: float, light_is_good: bool, **settings: Any) -> Any:
    """Draw numbers as colours, the better the lighter, and return the image."""
    axes.spines[:].set_visible(False)
    settings |= {"cmap": "cividis" if light_is_good else "cividis_r", "vmin": low, "vmax": max(high, low + 1e-9)}
    return axes.imshow(values, aspect="auto", interpolation="nearest", **settings)


def add_colour_bar(figure: Figure, image: Any, axes: Any, label: str, **settings: Any) -> Any:
    """Explain the colours of an image in a bar beside it, and return the bar's axis."""
    bar = figure.colorbar(image, ax=axes, **settings)
    bar.set_label(label, color=INK)
    return bar.ax.yaxis


def clip_share(values: ArrayLike, percent: bool) -> Any:
    """Keep shares between 0 and 1."""
    return np.clip(values, 0, 1) if percent else values
