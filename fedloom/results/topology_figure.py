"""A picture of who hears whom."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor


def draw(graphs: Mapping[str, Tensor], path: Path) -> None:
    """One panel for each graph: clients on a circle, a line between those who hear each other."""
    columns = min(len(graphs), 3)
    rows = math.ceil(len(graphs) / columns)
    figure = Figure(figsize=(3.4 * columns, 3.7 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (label, graph) in enumerate(graphs.items(), 1):
        axes = figure.add_subplot(rows, columns, number, aspect="equal")
        clients = len(graph)
        places = [(math.sin(2 * math.pi * i / clients), math.cos(2 * math.pi * i / clients)) for i in range(clients)]
        edges = [(i, j) for i in range(clients) for j in range(i) if graph[i, j]]
        for i, j in edges:
            ends = zip(places[i], places[j], strict=True)
            axes.plot(*ends, color="#0072B2", linewidth=0.8, alpha=max(0.15, min(1.0, 60 / len(edges))), zorder=1)
        size = max(10.0, min(260.0, 4000 / clients))
        across, up = zip(*places, strict=True)
        axes.scatter(across, up, s=size, color="white", edgecolor="#0072B2", zorder=2)
        if clients <= 40:
            for i, (x, y) in enumerate(places):
                axes.text(x, y, str(i), ha="center", va="center", fontsize=7, zorder=3)
        degree = graph.sum(1) - 1
        spread = (
            f"{int(degree.min())}" if degree.min() == degree.max() else f"{int(degree.min())} to {int(degree.max())}"
        )
        axes.set_title(f"{label}: {clients} clients, {spread} neighbours", fontsize=9)
        axes.set_xlim(-1.2, 1.2)
        axes.set_ylim(-1.2, 1.2)
        axes.axis("off")
    figure.savefig(path, dpi=150)
