"""The picture of a reproduction's curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedloom.papers.curve_figure import Curves, draw
from fedloom.results.run_data import RunData


@pytest.fixture
def run(comparison: Path) -> RunData:
    return RunData.read(comparison)


def test_rows_whose_names_begin_alike_share_a_panel(run: RunData) -> None:
    panels = Curves().panels({"iid, fast": run, "iid, slow": run, "other": run})
    assert {panel: list(lines) for panel, lines in panels.items()} == {"iid": ["fast", "slow"], "": ["other"]}
    panels = Curves(splits=("train", "test")).panels({"iid, fast": run})
    assert {panel: list(lines) for panel, lines in panels.items()} == {"iid, fast": ["train", "test"]}


def test_a_line_has_the_values_of_the_server_or_the_best_so_far(run: RunData) -> None:
    rounds, values = run.server_values("fedavg", 1, "accuracy")
    drawn = draw(Curves(), {"iid, fast": run}, "Digits", target=0.5)
    (axes,) = drawn.figure.axes
    assert axes.lines[0].get_xdata().tolist() == rounds.tolist()
    assert axes.lines[0].get_ydata().tolist() == values.tolist()
    assert set(axes.lines[1].get_ydata()) == {0.5}
    assert (axes.get_title(loc="left"), axes.get_ylabel(), axes.get_xlabel()) == ("iid", "Accuracy", "Round")
    (axes,) = draw(Curves(best=True), {"iid, fast": run}, "").figure.axes
    assert axes.lines[0].get_ydata().tolist() == np.maximum.accumulate(values).tolist()
    assert axes.get_ylabel() == "Best accuracy so far"


def test_it_has_the_style_of_all_figures(run: RunData) -> None:
    (axes,) = draw(Curves(), {"iid, fast": run}, "Digits").figure.axes
    assert [side for side, spine in axes.spines.items() if spine.get_visible()] == ["left", "bottom"]


def test_a_row_of_panels_for_each_metric_is_saved_in_three_formats(run: RunData, tmp_path: Path) -> None:
    curves = Curves(metrics=("accuracy", "loss"))
    assert len(draw(curves, {"a, x": run, "b, x": run}, "").figure.axes) == 4
    draw(curves, {"a, x": run}, "Digits").save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "curves.svg", "curves.pdf"}
