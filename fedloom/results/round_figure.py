"""The figure of one round in virtual time: a bar for each client that was asked."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.results import figure_style as style
from fedloom.results.figure_style import CaptionedFigure
from fedloom.results.run_data import RunData

COLOURS = {"counted": "#0072b2", "late": "#d55e00", "surplus": "#999999", "vanished": "#cc79a7", "left": "#a65628"}
MEANINGS = {
    "counted": "counted",
    "late": "after the deadline",
    "surplus": "enough others were faster",
    "vanished": "vanished",
    "left": "no longer available",
}
MOST_BARS, MOST_PANELS = 40, 4


def draw(run: RunData) -> CaptionedFigure | None:
    """Draw the round of median length of each algorithm's first seed, if the run has a virtual clock."""
    found = {label: rows for label in run.labels if (rows := _round(run, label))}
    shown = dict(list(found.items())[:MOST_PANELS])
    if not shown:
        return None
    bars = max(len(rows) for rows in shown.values())
    figure = style.new_figure(6.6, 0.7 + len(shown) * (0.4 + max(0.5, 0.075 * bars)))
    panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    titles = style.panel_titles(list(shown))
    for axes, (label, rows) in zip(panels, shown.items(), strict=True):
        for place, row in enumerate(rows):
            width = row["ended"] - row["began"]
            axes.barh(place, width, left=row["began"], height=0.8, color=COLOURS[row["status"]])
        times = run.times(label, run.seeds[0])
        here = np.searchsorted(times.rounds, rows[0]["round"])
        for moment in (times.began[here], times.ended[here]):
            axes.axvline(moment, color=style.INK, linewidth=0.7)
        axes.set_title(f"{titles[label]}, round {rows[0]['round']}", loc="left")
        axes.set_yticks([])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_ylabel("Clients")
    panels[-1].set_xlabel("Virtual seconds")
    used = [status for status in COLOURS if any(row["status"] == status for rows in shown.values() for row in rows)]
    handles = [_patch(COLOURS[status]) for status in used]
    meanings = [MEANINGS[status] for status in used]
    figure.legend(handles, meanings, loc="outside lower center", frameon=False, ncols=len(used))
    caption = (
        "Bars: the time of each client that was asked, from its start to its answer, or until it was given up. "
        "Lines: begin and end of the round. Each algorithm's round of median length is shown, of the first seed. If it "
        f"asked more than {MOST_BARS} clients, the figure has {MOST_BARS} of them, from the first to the last to end."
    )
    return CaptionedFigure("round_time", "One round, client by client", caption, figure)


def _round(run: RunData, label: str) -> list[dict[str, Any]]:
    """What clients did in the round of median length, in the order of their ends."""
    times = run.times(label, run.seeds[0])
    if not len(times.rounds):
        return []
    rows = run.rows("client_times", label, run.seeds[0])
    asked = np.unique([row["round"] for row in rows])
    lengths = {int(round): times.ended[place] - times.began[place] for place, round in enumerate(times.rounds)}
    usual = sorted(asked.tolist(), key=lambda round: (lengths[round], round))
    chosen = usual[len(usual) // 2] if usual else None
    ordered = sorted((row for row in rows if row["round"] == chosen), key=lambda row: row["ended"])
    shown = np.linspace(0, len(ordered) - 1, min(len(ordered), MOST_BARS)).astype(int)
    return [ordered[place] for place in shown]


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour)
