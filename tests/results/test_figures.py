"""The figures of a run show what its tables hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import fedloom as fl
from fedloom.results import figures
from fedloom.results.figure_style import lay_out, line_styles, styled
from fedloom.results.learning_curves import panel_title
from fedloom.results.run_data import RunData
from fedloom.results.tables import all_tables
from tests.conftest import Logit, federation, two_classes
from tests.results.drawn_runs import write_run


def test_progress_names_every_figure_before_it_is_drawn(run: RunData) -> None:
    lines: list[str] = []
    drawn = figures.draw_all(run, progress=lines.append)
    assert len(drawn) == 9
    assert len(lines) == 13  # two are about an audit and two about virtual time, and there was neither
    assert lines[0] == "Drawing figure 1 of 13: the result"


def test_the_headline_shows_every_seed_and_the_mean(run: RunData) -> None:
    drawn = figures.at_a_glance(run)
    assert drawn is not None
    axes = drawn.figure.axes[0]
    dots = [np.asarray(dots.get_offsets())[:, 0].tolist() for dots in axes.collections]
    finals = [
        [cell.final["server_test_accuracy"] for cell in run.result.runs if cell.algorithm == label]
        for label in ("fedavg", "pooled")
    ]
    assert dots == finals
    assert [text.get_text() for text in axes.texts] == ["no global model"]
    assert "higher is better" in drawn.caption


def test_bytes_are_megabytes_so_far(run: RunData) -> None:
    drawn = figures.against_bytes(run, "accuracy")
    assert drawn is not None
    (line,) = (line for line in drawn.figure.axes[0].lines if line.get_label() == "fedavg")
    expected = np.mean([run.costs("fedavg", seed).bytes_so_far for seed in (1, 2)], axis=0) / 1e6
    assert np.asarray(line.get_xdata()) == pytest.approx(expected)


def test_a_heat_map_has_the_mean_over_seeds_and_gaps_where_nothing_was_measured(run: RunData) -> None:
    clients, rounds, values = figures._mean_grid(run, "fedavg", "accuracy") or (None, None, None)
    assert values is not None
    assert (clients.tolist(), rounds.tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4, 5])
    for client in range(4):
        for round in range(1, 6):
            found = [run.client_values("fedavg", seed, "post_fit", "accuracy") for seed in (1, 2)]
            known = [one.values[(one.clients == client) & (one.rounds == round)] for one in found]
            mean = np.mean(np.concatenate(known)) if len(np.concatenate(known)) else np.nan
            assert values[client, round - 1] == pytest.approx(mean, nan_ok=True)


def test_many_clients_are_thinned_out_evenly() -> None:
    shown = figures._evenly(np.arange(1000))
    assert len(shown) == figures.MOST_ROWS
    assert (shown[0], shown[-1]) == (0, 999)


@pytest.mark.parametrize("make", [figures.pooled_curve, figures.label_distribution], ids=["pooled", "labels"])
def test_a_figure_without_numbers_is_left_out(make: Callable[[RunData], object], run: RunData) -> None:
    assert make(run) is not None
    elsewhere = {"labels": {"classes": ["alive", "dead"], "counts": [], "tested": [], "server": [3, 4]}}  # on a network
    for facts in ({}, elsewhere):
        assert make(RunData(run.folder, {}, run.metrics, run.clients, facts)) is None


def test_an_algorithm_has_one_colour_in_all_figures(run: RunData) -> None:
    drawn = {each.name: each.figure for each in figures.draw_all(run)}
    colours = {label: style["color"] for label, style in line_styles(run.labels).items()}
    assert len(set(colours.values())) == len(run.labels)
    for axes, label in zip(drawn["sausage_rounds"].axes, run.labels, strict=False):
        assert axes.get_title(loc="left") == label
        assert colours[label] in {line.get_color() for line in axes.lines}
    lines = {str(line.get_label()).split()[0]: line.get_color() for line in drawn["bytes"].axes[0].lines}
    assert lines.items() <= colours.items()


def test_before_and_after_is_filled_from_the_lowest_to_the_highest_or_by_the_deviation(run: RunData) -> None:
    stats = [run.client_values("fedavg", seed, "post_fit", "accuracy").by_round() for seed in (1, 2)]
    for fill, low in (("min-max", [s.low for s in stats]), ("std", [s.mean - s.std for s in stats])):
        drawn = figures.before_and_after(run, "accuracy", "rounds", fill)
        assert drawn is not None
        band = drawn.figure.axes[0].collections[1].get_paths()[0].vertices  # the second: after local training
        for round in range(1, 6):
            lowest = min(y for x, y in np.asarray(band) if x == round)
            assert lowest == pytest.approx(np.clip(np.mean(low, axis=0)[round - 1], 0, 1))


def test_page_and_paper_have_the_same_numbers(run: RunData) -> None:
    """What is drawn and what is tabulated comes from the same series."""
    drawn = figures.comparison(run, "accuracy")
    assert drawn is not None
    (line,) = (
        line for line in drawn.figure.axes[1].lines if line.get_color() == line_styles(run.labels)["local"]["color"]
    )
    stats = [run.client_values("local", seed, "post_fit", "accuracy").by_round().mean for seed in (1, 2)]
    assert np.asarray(line.get_ydata()) == pytest.approx(np.mean(stats, axis=0))


def test_clients_have_no_order_so_no_line_connects_them(run: RunData) -> None:
    drawn = figures.before_and_after(run, "accuracy", "clients", "min-max")
    assert drawn is not None
    for axes in (axes for axes in drawn.figure.axes if axes.get_visible()):
        assert {line.get_linestyle() for line in axes.lines} == {"None"}
        assert len(axes.collections) == 2  # bars: before and after local training


@pytest.mark.parametrize("against", ["rounds", "clients"])
def test_the_legend_explains_lines_and_what_is_shaded(run: RunData, against: str) -> None:
    drawn = figures.before_and_after(run, "accuracy", against, "std")
    assert drawn is not None
    (legend,) = drawn.figure.legends
    over = "clients" if against == "rounds" else "rounds"
    assert [text.get_text() for text in legend.get_texts()] == [
        "before local training (pre_fit)",
        "after local training (post_fit), in the algorithm's colour",
        f"before: ± one standard deviation over {over}",
        f"after: ± one standard deviation over {over}",
    ]


def test_rounds_are_whole_and_shares_are_in_per_cent_in_all_figures(run: RunData) -> None:
    for drawn in figures.draw_all(run):
        drawn.figure.draw_without_rendering()
        for axes in drawn.figure.axes:
            if axes.get_xlabel() == "Round" or drawn.name in ("clients", "sausage_rounds"):
                assert all(tick == int(tick) for tick in axes.get_xticks())
            if "ccuracy" in axes.get_ylabel():
                assert all(tick.get_text().endswith(" %") for tick in axes.get_yticklabels())


@pytest.mark.slow
def test_long_labels_are_whole_at_every_resolution(tmp_path: Path) -> None:
    large = write_run(tmp_path, "large")  # labels of 40 letters
    with styled():
        drawn = figures.at_a_glance(large)
        assert drawn is not None
        figure = lay_out(drawn).figure
        for dots in (72, 96, 180, 200):  # 72: an SVG file
            figure.set_dpi(dots)
            figure.draw_without_rendering()
            assert min(label.get_window_extent().x0 for label in figure.axes[0].get_yticklabels()) >= 0


def test_few_clients_have_long_names_in_two_lines(run: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunData, "client_name", lambda self, client: f"Hospital {client} of the Northern Region")
    drawn = figures.heat_map(run, "accuracy")
    assert drawn is not None
    names = [label.get_text() for label in drawn.figure.axes[0].get_yticklabels()]
    assert names == [f"Hospital {client} of the\nNorthern Region" for client in range(len(run.clients))]
    across = figures.before_and_after(run, "accuracy", "clients", "min-max")
    assert across is not None
    assert len(across.figure.axes[-1].get_xticks()) == len(run.clients)  # every client is named


@pytest.mark.slow
def test_many_clients_with_long_names_have_different_names_that_do_not_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, "large")
    monkeypatch.setattr(RunData, "client_name", lambda _, client: f"東京大学医学部附属病院 {client} with a long name")
    with styled():
        drawn = [figures.before_and_after(run, "accuracy", "clients", "min-max"), figures.label_distribution(run)]
        drawn.append(figures.heat_map(run, "accuracy"))
        across, *down = (lay_out(one).figure for one in drawn if one is not None)
        labels = [text for text in across.axes[-1].get_xticklabels() if text.get_text()]
        boxes = [text.get_window_extent() for text in labels]
    assert len(boxes) > 1
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))
    for figure in down:
        texts = [text.get_text() for text in figure.axes[0].get_yticklabels()]
        assert len(texts) == len({*texts}) > 5
    shares = [text.get_text() for text in down[0].axes[-1].get_yticklabels()]
    assert all(text.endswith(" %") for text in shares)


@pytest.mark.parametrize(("share", "beyond"), [(0.0, "neither"), (0.05, "neither"), (0.01, "min")])
def test_a_colour_bar_has_an_arrow_only_if_a_value_is_beyond_it(
    share: float, beyond: str, run: RunData, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.ones((1000, 1))
    values[: int(1000 * share)] = 0
    monkeypatch.setattr(figures, "_mean_grid", lambda *_: (np.arange(1000) % 4, np.arange(1), values))
    with styled():
        drawn = figures.heat_map(run, "accuracy")
    assert drawn is not None
    bars = [axes._colorbar for axes in drawn.figure.axes if hasattr(axes, "_colorbar")]
    assert [bar.extend for bar in bars] == [beyond]


def test_figures_and_tables_say_what_is_about_the_drawn_clients_only(drawn: Path, run: RunData) -> None:
    found = {figure.name: figure for figure in figures.draw_all(RunData.read(drawn))}
    titles = [axes.get_title(loc="left") or axes.get_title() for axes in found["comparison"].figure.axes]
    assert "After local training (drawn clients)" in titles
    for name in ("comparison", "sausage_rounds"):
        assert found[name].caption.endswith("over the clients that were drawn in each round, not over all clients.")
    assert (
        "A cell is the mean over those of the 2 seeds that drew the client in that round." in found["clients"].caption
    )
    assert "the mean over the drawn clients" in found["bytes"].caption
    everybody = replace(run, facts={**run.facts, "description": {**run.description, "cohort": {}}})
    assert not any("drawn" in figure.caption for figure in figures.draw_comparison(everybody))
    names = {table.name: table for table in all_tables(RunData.read(drawn))}
    assert names["summary_accuracy_post_fit"].title.endswith("after local training (drawn clients)")
    assert (
        "the final model (the client's own, where the algorithm gives it one) on each client's own test"
        in names["fairness"].note
    )
    assert names["differences_after_training"].title.startswith(
        "Paired differences over the same seeds: accuracy, after"
    )
    assert "(drawn clients)" in panel_title(RunData.read(drawn), "post_fit")


def test_the_natural_partition_has_the_same_labels_in_every_seed(run: RunData) -> None:
    """With all splits together, nothing about them is drawn."""
    facts = {
        **run.facts,
        "data of seed 1": "a",
        "data of seed 2": "b",
        "labels": {"classes": [0, 1], "counts": [[1, 2]] * 4},
    }
    for partition, own in ((None, False), ({"name": "dirichlet"}, True)):
        data = {"source": "csv", **({"partition": partition} if partition else {})}
        described = {**facts, "description": {**run.description, "data": data}}
        figure = figures.label_distribution(replace(run, facts=described))
        assert figure is not None
        assert ("Every seed draws its own" in figure.caption) == own


def test_panels_keep_their_height_below_long_titles_and_above_slanted_names(tmp_path: Path) -> None:
    names = [f"University Hospital of the Far Town No. {number}" for number in range(6)]
    data = two_classes(federation([20] * 6, names=tuple(names)))
    algorithms = {f"a very long label of forty characters {number}": fl.FedAvg(lr=0.1) for number in range(6)}
    fl.run(data, fl.Task(Logit, loss="bce"), algorithms, 2, out=tmp_path, backend="serial")
    drawn = figures.before_and_after(RunData.read(tmp_path), "accuracy", "clients", "min-max")
    assert drawn is not None
    drawn.figure.draw_without_rendering()
    width = drawn.figure.bbox.width
    for axes in drawn.figure.axes[:6]:
        assert axes.get_window_extent().height > drawn.figure.dpi  # an inch
        assert axes.title.get_window_extent().x1 <= width
