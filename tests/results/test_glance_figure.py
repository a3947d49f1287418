"""The result at a glance shows the same on a wide screen and on a phone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedloom.results.figure_style import lay_out, styled
from fedloom.results.glance_figure import PHONE, at_a_glance
from fedloom.results.run_data import RunData


def test_a_phone_shows_the_same_numbers_below_each_other(run: RunData) -> None:
    drawn = at_a_glance(run)
    assert drawn is not None
    assert drawn.on_phones is not None
    wide, narrow = drawn.figure.axes, drawn.on_phones.axes
    dots = [
        [np.asarray(dots.get_offsets())[:, 0].tolist() for axes in one for dots in axes.collections]
        for one in (wide, narrow)
    ]
    assert dots[0] == dots[1] != []
    assert [axes.get_title("left") for axes in wide] == [axes.get_title("left") for axes in narrow]
    names = [text.get_text() for text in narrow[0].texts]
    assert [*run.labels] == [name for name in names if name != "no global model"]


def test_names_of_any_length_fit_a_phone(run: RunData) -> None:
    labels = dict(zip(run.labels, (f"{letter} long name " * 8 for letter in "abc"), strict=True))
    renamed = replace(run, cells={(labels[label], seed): cell for (label, seed), cell in run.cells.items()})
    cells = tuple(replace(cell, algorithm=labels[cell.algorithm]) for cell in run.result.runs)
    renamed.__dict__["result"] = replace(run.result, runs=cells)
    with styled():
        drawn = at_a_glance(renamed)
        assert drawn is not None
        figure = lay_out(drawn).on_phones
        assert figure is not None
        right = max(text.get_window_extent().x1 for axes in figure.axes for text in axes.texts)
    assert right <= PHONE * figure.dpi
