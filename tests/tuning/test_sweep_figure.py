"""The figure of a sweep."""

from __future__ import annotations

from pathlib import Path

from fedloom.results.run_values import MetricInfo
from fedloom.tuning.sweep import SweepResult, Trial


def test_the_heat_map_has_a_cell_for_every_pair() -> None:
    tried = tuple(
        Trial({"x": x, "y": y}, label, {1: x * 0.1 + y * 0.01})
        for label in ("a", "b") for x in (1, 2, 3) for y in (4, 5)
    )  # fmt: skip
    drawn = SweepResult(Path(), MetricInfo("accuracy", True, True), "validation", tried).figure()
    assert drawn is not None
    axes = drawn.figure.axes[:2]
    assert [one.get_title(loc="left") for one in axes] == ["a", "b"]
    assert [text.get_text() for text in axes[0].texts] == ["14.00", "15.00", "24.00", "25.00", "34.00", "35.00"]


def test_every_algorithm_is_drawn_with_its_own_keys() -> None:
    tried = (
        *(Trial({"lr": lr, "mu": mu}, "a", {1: 0.5 + lr + mu}) for lr in (0.1, 0.2) for mu in (0.01, 0.02, 0.03)),
        *(Trial({"lr": lr, "tau": tau}, "b", {1: 0.5 + lr + tau}) for lr in (0.1, 0.2) for tau in (0.01, 0.02)),
        *(Trial({"tau": tau}, "c", {1: 0.5 + tau}) for tau in (0.01, 0.02)),
        Trial({"lr": 0.1}, "d", {1: 0.4}),
    )
    drawn = SweepResult(Path(), MetricInfo("accuracy", True, True), "validation", tried).figure()
    assert drawn is not None
    panels = drawn.figure.axes[:4]
    assert [one.get_ylabel() for one in panels] == ["lr", "lr", "tau", ""]
    assert [one.get_xlabel() for one in panels] == ["mu", "tau", "", ""]
    assert [len(one.texts) for one in panels] == [6, 4, 2, 1]
    assert not any("–" in text.get_text() for one in panels for text in one.texts)
    assert drawn.title == "Accuracy over lr and mu and tau"
    assert "Best over" not in drawn.caption


def test_a_line_is_drawn_only_for_algorithms_that_were_tried_with_the_key() -> None:
    tried = (*(Trial({"lr": 0.1, "mu": mu}, "a", {1: mu}) for mu in (0.1, 0.2)), Trial({"lr": 0.1}, "b", {1: 0.5}))
    drawn = SweepResult(Path(), MetricInfo("accuracy", True, True), "validation", tried).figure()
    assert drawn is not None
    assert [text.get_text() for text in drawn.figure.legends[0].get_texts()] == ["a"]
    assert drawn.caption.endswith("Not tried with mu: b.")
