"""Every figure, small, medium and large, looks as it did when somebody last looked at it.

`FEDLOOM_REDRAW=1 pytest tests/results/test_golden_figures.py -m slow` draws the pictures in `golden/` again: look at
each of them before you commit it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.data import figure as data_figure
from fedloom.papers import curve_figure
from fedloom.results import evolution_figure, figures, topology_figure
from fedloom.results.figure_style import styled
from fedloom.results.run_data import RunData
from fedloom.results.run_values import MetricInfo
from fedloom.tuning.sweep import SweepResult, Trial
from tests.results.drawn_runs import SIZES, algorithm_labels, write_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent / "golden"
DRAWN_WITH = "3.11"  # other versions of matplotlib draw letters a little differently
DOTS = 40  # per inch: enough to see what moved, and small in the repository
OF_A_RUN = (
    *("headline", "comparison", "global_model", "sausage_rounds", "sausage_users", "pooled_curve", "bytes"),
    *("time", "round_time", "clients", "labels", "reconstruction", "poisoning"),
)


@pytest.fixture(scope="module", autouse=True)
def no_fonts_of_this_machine() -> Iterator[None]:
    """Draw with matplotlib's own font alone, so that pictures are the same on machines with and without others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_figure, "FONTS", ())
        data_figure.font_families.cache_clear()
        yield
    data_figure.font_families.cache_clear()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunData]:
    return lru_cache(lambda size: write_run(tmp_path_factory.mktemp(size), size, clock=True))


@pytest.fixture(scope="module")
def of_a_run(runs: Callable[[str], RunData]) -> Callable[[str], dict[str, Figure]]:
    return lru_cache(lambda size: {each.name: each.figure for each in figures.draw_all(runs(size))})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OF_A_RUN)
def test_the_figures_of_a_report(name: str, size: str, of_a_run: Callable[[str], dict[str, Figure]]) -> None:
    assert set(of_a_run(size)) == set(OF_A_RUN)
    compare(of_a_run(size)[name], f"{name}-{size}")


@pytest.mark.parametrize("size", SIZES)
def test_the_figure_of_an_evolution(size: str, runs: Callable[[str], RunData]) -> None:
    compare(evolution_figure.draw(runs(size)), f"generations-{size}")


@pytest.mark.parametrize("size", SIZES)
def test_the_figure_of_a_reproduction(size: str, runs: Callable[[str], RunData]) -> None:
    rows = {f"{group}, {label}": runs(size) for group in ("iid", "shards") for label in algorithm_labels(size)}
    with styled():
        compare(curve_figure.draw(curve_figure.Curves(), rows, "curves", 0.7).figure, f"curves-{size}")


@pytest.mark.parametrize("size", SIZES)
def test_the_figure_of_a_graph(size: str) -> None:
    clients = SIZES[size][1]
    ring = torch.eye(clients) + torch.eye(clients).roll(1, 0) + torch.eye(clients).roll(-1, 0)
    graphs = {"ring": ring, "a label of forty letters, as in the others": torch.ones(clients, clients)}
    with styled():
        compare(topology_figure.circles(graphs), f"graph-{size}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keys", [("train.lr",), ("train.lr", "train.batch_size")], ids=["line", "heat_map"])
def test_the_figures_of_a_sweep(size: str, keys: tuple[str, ...]) -> None:
    many = {"small": 2, "medium": 4, "large": 10}[size]
    labels = algorithm_labels("medium")[: {"small": 1, "medium": 3, "large": 7}[size]]
    trials = []
    for number, label in enumerate(labels):
        for place in range(many ** len(keys)):
            setting = {key: 10.0 ** (place // many**digit % many - 4) for digit, key in enumerate(keys)}
            values = {seed: 0.9 - 0.02 * number - 0.003 * (place - 4) ** 2 % 0.5 + 0.01 * seed for seed in (1, 2)}
            trials.append(Trial(setting, label, values))
    drawn = SweepResult(Path(), MetricInfo("accuracy", True, True), "validation data", tuple(trials)).figure()
    assert drawn is not None
    compare(drawn.figure, f"sweep_{len(keys)}-{size}")


def compare(figure: Figure, name: str) -> None:
    """Compare a figure with its picture, or draw the picture again if that is asked for."""
    path = GOLDEN / f"{name}.png"
    with styled():
        figure.savefig(path.with_suffix(".new.png"), dpi=DOTS)
    drawn = Image.open(path.with_suffix(".new.png")).convert("RGB")
    path.with_suffix(".new.png").unlink()
    if os.environ.get("FEDLOOM_REDRAW"):
        drawn.quantize(256).save(path, optimize=True)
    if not matplotlib.__version__.startswith(DRAWN_WITH):
        pytest.skip(f"The pictures were drawn with matplotlib {DRAWN_WITH}.")
    golden = Image.open(path).convert("RGB")
    assert drawn.size == golden.size
    apart = np.abs(np.asarray(drawn, dtype=float) - np.asarray(golden, dtype=float)).max(axis=2)
    # few colours are kept, so all may be a little off; what moved is far off
    assert (apart > 60).mean() < 0.0005, f"{name}: {(apart > 60).mean():.2%} of the figure looks different"
