"""Learning curves: what is drawn, where, and with which band."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from fedloom.experiment.store import Store
from fedloom.results.figure_style import COLOURS, CaptionedFigure, line_style
from fedloom.results.learning_curves import OTHERS, Panels, band, draw, draw_run, spread_places
from fedloom.results.run_data import RunData
from fedloom.results.run_values import Stats, grouped


def stats(rounds: int, values: Callable[[int], Sequence[float]]) -> Stats:
    """Statistics over the clients' values in each round."""
    numbers = [(round, value) for round in range(1, rounds + 1) for value in values(round)]
    return grouped(np.array([round for round, _ in numbers]), np.array([value for _, value in numbers], dtype=float))


def panels(labels: list[str], rounds: int = 5, seeds: int = 1, clients: int = 3, server: Sequence[str] = ()) -> Panels:
    """Client c has c hundredths more than client 0, and each round, label and seed add a little."""

    def one(number: int, seed: int, count: int) -> Stats:
        return stats(
            rounds,
            lambda round: [
                0.5 + 0.4 * (1 - 1 / round) + 0.01 * client - 0.01 * number + 0.002 * seed for client in range(count)
            ],
        )

    found = {
        phase: {label: [one(n, seed, clients) for seed in range(1, seeds + 1)] for n, label in enumerate(labels)}
        for phase in ("pre_fit", "post_fit")
    }
    found["server"] = {label: [one(n, 1, 1)] for n, label in enumerate(server)}
    return {name: panel for name, panel in found.items() if panel}


def drawn(found: Panels, labels: Sequence[str] | None = None, metric: str = "accuracy", **more: Any) -> Figure:
    known = labels or list(dict.fromkeys(label for panel in found.values() for label in panel))
    return draw(found, {label: line_style(number) for number, label in enumerate(known)}, metric, **more)


def seeds_of(values: dict[int, dict[int, list[float]]]) -> list[Stats]:
    """Round → seed → one value per client, as statistics of each seed."""
    seeds = dict.fromkeys(seed for found in values.values() for seed in found)
    return [
        grouped(
            np.array([round for round, found in values.items() for _ in found.get(seed, ())]),
            np.array([value for found in values.values() for value in found.get(seed, ())]),
        )
        for seed in seeds
    ]


def names(count: int) -> list[str]:
    return [f"algorithm_{number}" for number in range(count)]


def test_lines_that_hide_each_other_are_named() -> None:
    """Readers count the lines that they see."""

    def line(*values: float) -> list[Stats]:
        return [stats(len(values), lambda round: [values[round - 1]] * 2)]

    late = {"a": line(0.1, 0.2, 0.9, 0.9), "b": line(0.5, 0.6, 0.9, 0.905), "c": line(0.1, 0.2, 0.6, 0.8)}
    apart = {"a": line(0.1, 0.2, 0.9, 0.9), "b": line(0.1, 0.2, 0.8, 0.7), "c": line(0.1, 0.2, 0.6, 0.8)}

    def said(found: Panels, metric: str = "accuracy") -> str:
        return " ".join(" ".join(text.get_text().split()) for text in drawn(found, metric=metric).texts)

    both = said({"pre_fit": apart, "post_fit": late})
    assert "Lines that lie on each other in the second half, after local training: a, b." in both
    assert "second half, before local training and after local training: a, b." in said(
        {"pre_fit": late, "post_fit": late}
    )
    assert "lie on each other" not in said({"post_fit": apart})
    many = {f"{name} with a very long name, as in a sweep of {name}": late["a"] for name in "abcdefgh"}
    assert "Some lines lie on each other in the second half: the tables" in said({"post_fit": many})
    losses = {"a": line(0.1, 0.02), "b": line(0.1, 0.03), "c": line(900.0, 900.0)}  # far apart on a logarithmic scale
    assert "lie on each other" not in said({"post_fit": losses}, "loss")


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def bands(axes: Axes) -> list[PolyCollection]:
    return [found for found in axes.collections if isinstance(found, PolyCollection)]


def texts(figure: Figure) -> dict[str, Text]:
    return {text.get_text(): text for text in figure.texts}


def test_there_is_a_panel_for_what_was_measured() -> None:
    both = ["Before local training", "After local training"]
    assert titles(drawn(panels(names(2)))) == both
    assert titles(drawn(panels(names(2), server=names(1)))) == [*both, "Global model on the server"]
    assert titles(drawn(panels([], server=names(1)))) == ["Global model on the server"]
    assert titles(drawn({"post_fit": panels(names(2))["post_fit"]})) == ["After local training"]


def test_lines_are_the_mean_over_clients() -> None:
    figure = drawn(panels(["mine"], rounds=4))
    (line,) = figure.axes[0].lines
    assert np.asarray(line.get_xdata()).tolist() == [1, 2, 3, 4]
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx(
        [0.502 + 0.4 * (1 - 1 / round) + 0.01 for round in range(1, 5)]
    )


def test_an_algorithm_has_the_same_look_in_every_panel_and_picture() -> None:
    labels = names(7)
    figure = drawn(panels(labels, server=labels[3:]), labels)
    last = figure.axes[2].lines
    assert [to_hex(line.get_color()).upper() for line in figure.axes[0].lines] == list(COLOURS[:7])
    assert [line.get_color() for line in last] == [line.get_color() for line in figure.axes[1].lines[3:]]
    few = drawn(panels(labels[5:]), labels)
    assert [line.get_color() for line in few.axes[0].lines] == [line.get_color() for line in last[2:]]


@pytest.mark.parametrize("higher", [True, False])
def test_of_many_lines_the_best_are_in_colour_and_named_and_the_others_grey(higher: bool) -> None:
    labels = names(60)  # the first ends highest
    figure = drawn(panels(labels, server=labels[:30]), labels, higher_is_better=higher)
    best = labels[:12] if higher else labels[-12:]
    assert {text for text in texts(figure) if text.startswith("algorithm")} == {*best}
    grey = to_hex(OTHERS["color"])
    assert [to_hex(line.get_color()) != grey for line in figure.axes[0].lines] == [label in best for label in labels]
    caption = " ".join(texts(figure)).replace("\n", " ")
    assert "In colour: the 12 that end best; the 48 others are in the tables." in caption
    few = drawn(panels(labels[:20]), labels[:20])
    assert {*labels[:20]} <= texts(few).keys()
    assert "In colour" not in " ".join(texts(few))


def test_with_one_seed_the_band_is_one_deviation_over_clients_and_the_caption_says_so() -> None:
    figure = drawn(panels(names(1), clients=5, server=names(1)))
    assert [len(bands(axes)) for axes in figure.axes] == [1, 1, 0]
    said = " ".join(texts(figure)).replace("\n", " ")
    assert "Lines: mean over clients; the global model is one. Bands: ± one standard deviation over clients." in said
    found = band(seeds_of({1: {1: [0.1, 0.2, 0.6]}}), "accuracy")
    assert found.high[0] - found.mean[0] == pytest.approx(np.std([0.1, 0.2, 0.6]))


def test_with_several_seeds_the_band_is_a_t_interval_and_the_caption_says_so() -> None:
    figure = drawn(panels(names(2), seeds=4))
    assert [len(bands(axes)) for axes in figure.axes] == [2, 2]
    assert "Lines: mean over clients and seeds (4 seeds). Bands: 95 % t interval over seeds." in texts(figure)
    found = band(seeds_of({1: {1: [0.4, 0.6], 2: [0.6], 3: [0.7, 0.7]}}), "accuracy", most_seeds=3)
    assert found.mean[0] == pytest.approx(0.6)
    assert found.high[0] - found.mean[0] == pytest.approx(4.302653 * 0.1 / 3**0.5)  # t with 2 degrees of freedom


def test_an_algorithm_with_one_seed_among_others_with_several_has_no_band() -> None:
    found = band(seeds_of({1: {1: [0.2, 0.6]}}), "accuracy", most_seeds=3)
    assert found.low[0] == found.mean[0] == found.high[0]


def test_shares_stay_between_0_and_1_and_losses_above_0() -> None:
    wide = {1: {1: [0.0, 0.05, 1.0, 1.0, 1.0]}}
    assert (
        band(seeds_of(wide), "accuracy").high[0]
        == band(seeds_of(wide), "top_5").high[0]
        == band(seeds_of(wide), "auroc").high[0]
        == 1
    )
    assert band(seeds_of(wide), "loss").high[0] > 1
    assert band(seeds_of({1: {1: [0.0, 0.0, 9.0]}}), "loss").low[0] == 0
    assert band(seeds_of({1: {1: [-1.0, -3.0]}}), "loss").low[0] == -3


def test_rounds_that_not_all_seeds_reached_are_left_out() -> None:
    found = band(seeds_of({1: {1: [0.1], 2: [0.3]}, 2: {1: [0.2], 2: [0.4]}, 3: {1: [0.9]}}), "accuracy", most_seeds=2)
    assert found.rounds.tolist() == [1, 2]
    assert found.mean.tolist() == pytest.approx([0.2, 0.3])


def test_values_that_are_not_finite_are_left_out_and_the_caption_says_so(comparison: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    shutil.copytree(comparison, folder)
    undefined = "phase = 'pre_fit' AND round = 2 AND client = 1 AND metric = 'accuracy'"
    with Store(folder) as store, store._transaction() as database:
        database.execute(f"UPDATE client_metrics SET value = NULL WHERE {undefined}")
    run = RunData.read(folder)
    styles = {label: line_style(number) for number, label in enumerate(run.labels)}
    figure = draw_run(run, styles)
    values = [run.client_values("fedavg", seed, "pre_fit", "accuracy") for seed in (1, 2)]
    expected = np.mean([one.by_round().mean[1] for one in values])
    assert np.asarray(figure.axes[0].lines[0].get_ydata())[1] == pytest.approx(expected)
    left_out = "Values that are not finite are left out."
    assert any(left_out in text.replace("\n", " ") for text in texts(figure))
    whole = draw_run(RunData.read(comparison), styles)
    assert not any(left_out in text.replace("\n", " ") for text in texts(whole))


def test_a_run_is_drawn_on_its_test_split_with_the_pooled_model_beside_the_others(run: RunData) -> None:
    figure = draw_run(run, {label: line_style(number) for number, label in enumerate(run.labels)})
    assert [len(axes.lines) for axes in figure.axes] == [3, 3, 2]  # one algorithm has no global model
    assert figure.axes[0].get_ylabel() == "Test accuracy"
    train = draw_run(run, {label: line_style(0) for label in run.labels}, "loss", "train")
    assert train.axes[0].get_ylabel() == "Train loss"


def test_a_metric_that_was_not_measured_is_named_with_those_that_were(run: RunData) -> None:
    with pytest.raises(
        InputError, match=r"no finite value of acuracy on test\. Measured: accuracy on test.*Did you mean 'accuracy'"
    ):
        draw_run(run, {}, "acuracy")
    with pytest.raises(InputError) as error:
        draw_run(run, {}, "nope")
    assert "Did you mean" not in str(error.value)
    with pytest.raises(InputError, match="Measured: nothing"):
        draw_run(replace(run, cells={}), {})


def test_losses_that_differ_by_orders_of_magnitude_get_a_logarithmic_scale() -> None:
    found = panels(names(2))
    assert drawn(found, metric="loss").axes[0].get_yscale() == "linear"
    for panel in found.values():
        panel["algorithm_1"] = [replace(one, mean=one.mean * 1000) for one in panel["algorithm_1"]]
    assert {axes.get_yscale() for axes in drawn(found, metric="loss").axes} == {"log"}


@pytest.mark.parametrize("rounds", [1, 5, 64])
@pytest.mark.parametrize("count", [1, 4, 7, 24])
@pytest.mark.parametrize("server", [False, True])
def test_no_text_overlaps_another_or_leaves_the_picture(count: int, rounds: int, server: bool) -> None:
    labels = [*names(count)[:-1], "a label of somebody who likes long labels"]
    figure = drawn(panels(labels, rounds, server=labels[: count // 2 + 1] if server else []), labels)
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    found = list(figure.texts)
    for axes in figure.axes:
        found += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]  # type: ignore[attr-defined]
        found += [label for label in (*axes.get_xticklabels(), *axes.get_yticklabels()) if _inside(axes, label)]
    boxes = {id(text): (text.get_text(), text.get_window_extent()) for text in found if text.get_text()}
    assert sum(label[:20] == text[:20] for label in labels for text, _ in boxes.values()) == (
        count if count <= 20 else 12
    )
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
    figure = drawn(panels(["mu=$0.1$ & x_1^2"]))
    assert ">mu=$0.1$ &amp; x_1^2<" in CaptionedFigure("name", "", "", figure).svg


def test_long_labels_are_whole_and_those_that_must_be_shortened_stay_different() -> None:
    long = [f"FedProx-with-a-rather-long-label-mu-0.1-{number}-and-more" for number in (1, 2)]
    assert {*long} <= texts(drawn(panels(long))).keys()
    too_long = [f"{'x' * 200}-{number}" for number in range(3)]
    shown = [text for text in texts(drawn(panels(too_long))) if text.startswith("xxx")]
    assert len({*shown}) == 3
    assert max(map(len, shown)) <= 80


@given(st.lists(st.floats(0, 10), max_size=12), st.floats(0.01, 0.8))
def test_places_are_apart_in_order_and_inside(wanted: list[float], gap: float) -> None:
    wanted = sorted(wanted)
    places = spread_places(wanted, gap, 0, 10)
    assert all(later - earlier >= gap - 1e-9 for earlier, later in itertools.pairwise(places))
    assert all(-1e-9 <= place <= 10 + 1e-9 for place in places)
    if all(later - earlier >= gap for earlier, later in itertools.pairwise(wanted)):
        assert places == pytest.approx(wanted)


@pytest.mark.slow
def test_drawing_leaves_no_trace(comparison: Path, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    drawn(panels(names(2)))
    assert dict(matplotlib.rcParams) == before
    program = (
        "import sys; from fedloom.results.result import Result; import fedloom.results.learning_curves;"
        "assert 'matplotlib' not in sys.modules;"
        f"Result.read({str(comparison)!r}).plot(path={str(tmp_path / 'b.png')!r});"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
    assert (tmp_path / "b.png").is_file()
