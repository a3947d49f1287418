"""The figure of a peer-to-peer graph: which clients exchange models."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fedloom.results.figure_style import COLOURS, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(graphs: Mapping[str, Tensor], path: Path) -> None:
    """Write a picture with one panel per graph; the path's ending gives the format: png, svg or pdf."""
    save_figure(circles(graphs), path)


def circles(graphs: Mapping[str, Tensor]) -> Figure:
    """Draw one panel per graph: clients on a circle, and a line between clients that exchange models."""
    columns = min(len(graphs), 3)
    rows = math.ceil(len(graphs) / columns)
    figure = new_figure(3.4 * columns, 3.7 * rows)
    for number, (label, graph) in enumerate(graphs.items(), 1):
        axes = figure.add_subplot(rows, columns, number, aspect="equal")
        clients = len(graph)
        angles = [2 * math.pi * client / clients for client in range(clients)]
        x, y = [math.sin(angle) for angle in angles], [math.cos(angle) for angle in angles]
        edges = [(i, j) for i in range(clients) for j in range(i) if graph[i, j]]
        for i, j in edges:
            alpha = max(0.15, min(1.0, 60 / len(edges)))
            axes.plot((x[i], x[j]), (y[i], y[j]), color=COLOURS[0], linewidth=0.8, alpha=alpha, zorder=1)
        size = max(10.0, min(260.0, 4000 / clients))
        axes.scatter(x, y, s=size, color="white", edgecolor=COLOURS[0], zorder=2)
        for i in range(clients) if clients <= 40 else ():
            axes.text(x[i], y[i], str(i), ha="center", va="center", fontsize=7, zorder=3)
        degree = graph.sum(1) - 1
        fewest, most = int(degree.min()), int(degree.max())
        neighbours = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        title = textwrap.wrap(f"{label}: {clients} clients, {neighbours} neighbours", 42)
        axes.set_title("\n".join(title), fontsize=9)
        axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2))
        axes.axis("off")
    return figure
