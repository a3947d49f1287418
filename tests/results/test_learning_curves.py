from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from fedloom.errors import InputError
from fedloom.results.learning_curves import COLOURS, curve, curves, draw, line_style, spread

Rows = list[dict[str, Any]]


def client_rows(
    labels: list[str], rounds: int = 5, seeds: int = 1, clients: int = 3, metric: str = "accuracy", split: str = "test"
) -> Rows:
    """Client c has c hundredths more than client 0, and each round, label and seed add a little."""
    return [
        {
            "algorithm": label,
            "seed": seed,
            "round": round,
            "client": str(client),
            "phase": phase,
            "split": split,
            "metric": metric,
            "value": 0.5 + 0.4 * (1 - 1 / round) + 0.01 * client - 0.01 * number + 0.002 * seed,
            "examples": 10,
        }
        for number, label in enumerate(labels)
        for seed in range(1, seeds + 1)
        for round in range(1, rounds + 1)
        for phase in ("pre_fit", "post_fit", "final")
        for client in range(clients)
    ]


def server_rows(labels: list[str], rounds: int = 5, metric: str = "accuracy") -> Rows:
    rows = client_rows(labels, rounds, clients=1, metric=metric)
    return [{k: v for k, v in row.items() if k not in ("client", "phase")} for row in rows if row["phase"] == "pre_fit"]


def names(count: int) -> list[str]:
    return [f"algorithm_{number}" for number in range(count)]


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def bands(axes: Axes) -> list[PolyCollection]:
    return [found for found in axes.collections if isinstance(found, PolyCollection)]


def texts(figure: Figure) -> dict[str, Text]:
    return {text.get_text(): text for text in figure.texts}


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".PNG"])
def test_the_ending_says_the_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    curves(client_rows(names(2)), server_rows(names(2)), path)
    if suffix == ".svg":
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
        assert "<dc:date>" not in path.read_text()
    else:
        assert path.read_bytes().startswith(b"%PDF" if suffix == ".pdf" else b"\x89PNG")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must end in \.png, \.svg, \.pdf\. Got 'picture\.bmp'"):
        curves(client_rows(names(1)), [], tmp_path / "picture.bmp")


def test_there_is_a_panel_for_what_was_measured() -> None:
    both = ["Before local training", "After local training"]
    assert titles(draw(client_rows(names(2)), [])) == both
    assert titles(draw(client_rows(names(2)), server_rows(names(1)))) == [*both, "Global model on the server"]
    assert titles(draw([], server_rows(names(1)))) == ["Global model on the server"]
    only = [row for row in client_rows(names(2)) if row["phase"] == "post_fit"]
    assert titles(draw(only, [])) == ["After local training"]


def test_lines_are_the_mean_over_clients() -> None:
    figure = draw(client_rows(["mine"], rounds=4), [])
    (line,) = figure.axes[0].lines
    assert np.asarray(line.get_xdata()).tolist() == [1, 2, 3, 4]
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx(
        [0.502 + 0.4 * (1 - 1 / round) + 0.01 for round in range(1, 5)]
    )


def test_an_algorithm_has_the_same_look_in_every_panel_and_picture() -> None:
    labels = names(7)
    figure = draw(client_rows(labels), server_rows(labels[3:]))
    last = figure.axes[2].lines
    assert [to_hex(line.get_color()).upper() for line in figure.axes[0].lines] == list(COLOURS[:7])
    assert [line.get_color() for line in last] == [line.get_color() for line in figure.axes[1].lines[3:]]
    loss = draw([*client_rows(labels), *client_rows(labels[5:], metric="loss")], [], "loss")
    assert [line.get_color() for line in loss.axes[0].lines] == [line.get_color() for line in last[2:]]


def test_forty_algorithms_look_different() -> None:
    looks = [line_style(number) for number in range(40)]
    assert len({(found["color"], str(found["linestyle"])) for found in looks}) == 40
    assert len({found["color"] for found in looks[:8]}) == 8


def test_with_one_seed_the_band_is_one_deviation_over_clients_and_the_caption_says_so() -> None:
    figure = draw(client_rows(names(1), clients=5), server_rows(names(1)))
    assert [len(bands(axes)) for axes in figure.axes] == [1, 1, 0]
    assert "Lines: mean over clients. Bands: ± one standard deviation over clients. One seed." in texts(figure)
    found = curve({1: {1: [0.1, 0.2, 0.6]}}, "accuracy")
    assert found.high[0] - found.mean[0] == pytest.approx(np.std([0.1, 0.2, 0.6]))


def test_with_several_seeds_the_band_is_a_t_interval_and_the_caption_says_so() -> None:
    figure = draw(client_rows(names(2), seeds=4), [])
    assert [len(bands(axes)) for axes in figure.axes] == [2, 2]
    assert "Lines: mean over clients and seeds (4 seeds). Bands: 95 % t interval over seeds." in texts(figure)
    found = curve({1: {1: [0.4, 0.6], 2: [0.6], 3: [0.7, 0.7]}}, "accuracy", seeds=3)
    assert found.mean[0] == pytest.approx(0.6)
    assert found.high[0] - found.mean[0] == pytest.approx(4.302653 * 0.1 / 3**0.5)  # t with 2 degrees of freedom


def test_an_algorithm_with_one_seed_among_others_with_several_has_no_band() -> None:
    found = curve({1: {1: [0.2, 0.6]}}, "accuracy", seeds=3)
    assert found.low[0] == found.mean[0] == found.high[0]


def test_shares_stay_between_0_and_1_and_losses_above_0() -> None:
    wide = {1: {1: [0.0, 0.05, 1.0, 1.0, 1.0]}}
    assert curve(wide, "accuracy").high[0] == curve(wide, "top_5").high[0] == curve(wide, "auroc").high[0] == 1
    assert curve(wide, "loss").high[0] > 1
    assert curve({1: {1: [0.0, 0.0, 9.0]}}, "loss").low[0] == 0
    assert curve({1: {1: [-1.0, -3.0]}}, "loss").low[0] == -3


def test_rounds_that_not_all_seeds_reached_are_left_out() -> None:
    found = curve({1: {1: [0.1], 2: [0.3]}, 2: {1: [0.2], 2: [0.4]}, 3: {1: [0.9]}}, "accuracy", seeds=2)
    assert found.rounds.tolist() == [1, 2]
    assert found.mean.tolist() == pytest.approx([0.2, 0.3])


def test_values_that_are_not_finite_are_left_out_and_the_caption_says_so() -> None:
    rows = client_rows(names(1), metric="auroc")
    rows[0]["value"], rows[1]["value"] = None, float("inf")
    figure = draw(rows, [], "auroc")
    assert np.asarray(figure.axes[0].lines[0].get_ydata())[0] == pytest.approx(rows[2]["value"])
    assert any("Values that are not finite are left out." in text.replace("\n", " ") for text in texts(figure))


def test_a_metric_that_was_not_measured_is_named_with_those_that_were() -> None:
    with pytest.raises(
        InputError, match=r"no finite value of acuracy on test\. Measured: accuracy on test.*Did you mean"
    ):
        draw(client_rows(names(1)), [], "acuracy")
    with pytest.raises(InputError, match="Measured: nothing"):
        draw([], [])


def test_losses_that_differ_by_orders_of_magnitude_get_a_logarithmic_scale() -> None:
    rows = client_rows(names(2), metric="loss")
    assert draw(rows, [], "loss").axes[0].get_yscale() == "linear"
    for row in rows[len(rows) // 2 :]:
        row["value"] *= 1000
    assert {axes.get_yscale() for axes in draw(rows, [], "loss").axes} == {"log"}


@pytest.mark.parametrize("rounds", [1, 5, 64])
@pytest.mark.parametrize("count", [1, 4, 7, 24])
@pytest.mark.parametrize("server", [False, True])
def test_no_text_overlaps_another_or_leaves_the_picture(count: int, rounds: int, server: bool) -> None:
    labels = [*names(count)[:-1], "a label of somebody who likes long labels"]
    figure = draw(client_rows(labels, rounds), server_rows(labels[: count // 2 + 1], rounds) if server else [])
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    found = list(figure.texts)
    for axes in figure.axes:
        found += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]  # type: ignore[attr-defined]
        found += [label for label in (*axes.get_xticklabels(), *axes.get_yticklabels()) if _inside(axes, label)]
    boxes = {id(text): (text.get_text(), text.get_window_extent()) for text in found if text.get_text()}
    assert sum(label[:20] == text[:20] for label in labels for text, _ in boxes.values()) == count
    page = figure.bbox
    for text, box in boxes.values():
        assert page.x0 <= box.x0, text
        assert box.x1 <= page.x1, text
        assert page.y0 <= box.y0, text
        assert box.y1 <= page.y1, text
    for (one, a), (other, b) in itertools.combinations(boxes.values(), 2):
        assert not a.overlaps(b), (one, other)


def _inside(axes: Axes, label: Text) -> bool:
    """Ticks beyond the limits are kept by matplotlib but not drawn; those of shared axes are hidden."""
    low, high = axes.get_xlim() if label in axes.get_xticklabels() else axes.get_ylim()
    place = label.get_position()[0 if label in axes.get_xticklabels() else 1]
    return label.get_visible() and low <= place <= high


def test_labels_are_taken_as_they_are_written() -> None:
    assert "mu=$0.1$ & x_1^2" in texts(draw(client_rows(["mu=$0.1$ & x_1^2"]), []))


@given(st.lists(st.floats(0, 10), max_size=12), st.floats(0.01, 0.8))
def test_places_are_apart_in_order_and_inside(wanted: list[float], gap: float) -> None:
    wanted = sorted(wanted)
    places = spread(wanted, gap, 0, 10)
    assert all(later - earlier >= gap - 1e-9 for earlier, later in itertools.pairwise(places))
    assert all(-1e-9 <= place <= 10 + 1e-9 for place in places)
    if all(later - earlier >= gap for earlier, later in itertools.pairwise(wanted)):
        assert places == pytest.approx(wanted)


def test_drawing_leaves_no_trace(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    curves(client_rows(names(2)), [], tmp_path / "a.png")
    assert dict(matplotlib.rcParams) == before
    row = {**client_rows(names(1))[0], "value": 1.0}
    program = (
        "import sys; from fedloom.results.learning_curves import curves; assert 'matplotlib' not in sys.modules;"
        f"curves([{row!r}], [], {str(tmp_path / 'b.png')!r}); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
