"""The page shows what the report shows, and numbers that were computed by hand."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from fedloom.clock.clock import ClientTime, RoundTime
from fedloom.errors import InputError
from fedloom.experiment.store import Store
from fedloom.results import figure_style, learning_curves
from fedloom.results.comparisons import best_first, comparisons, main_comparison
from fedloom.results.run_data import RunData
from fedloom.training.evaluation import Measured
from fedloom.watch import views
from fedloom.watch.app import FILES
from fedloom.watch.live_run import MARKS, LiveRun
from tests.watch.growing_run import UNIVERSAL, GrowingRun

CONTROL = {"wish": "", "time": "", "running": True}


def unpacked(content: bytes) -> tuple[int, np.ndarray, np.ndarray]:
    first, rounds, clients, *_ = struct.unpack("<6I", content[:24])
    values = np.frombuffer(content, np.float32, rounds * clients, 24).reshape(rounds, clients)
    states = np.frombuffer(content, np.uint8, rounds * clients, 24 + 4 * rounds * clients).reshape(rounds, clients)
    return first, values, states


def test_the_curves_are_those_of_the_reports_figure(comparison: Path) -> None:
    run = RunData.read(comparison)
    for panel in ("post_fit", "pre_fit", "server"):
        found = views.curves(run, "accuracy", panel)
        shown = ["fedavg", "pooled"] if panel == "server" else list(run.labels)  # `local` has no global model
        assert [line["label"] for line in found["lines"]] == shown
        for line in found["lines"]:
            stats = [
                learning_curves.panel_values(run, line["label"], seed, panel, "accuracy").by_round()
                for seed in run.seeds
            ]
            band = learning_curves.band(stats, "accuracy", 2)
            assert line["x"]["rounds"] == band.rounds.tolist()
            for side in ("mean", "low", "high"):
                np.testing.assert_allclose(line[side], getattr(band, side), rtol=1e-5)
        assert "95 % t interval over seeds" in found["caption"]
        assert found["caption"].endswith("intervals in tables are not cut.")  # a band of shares ends at 100 %


def test_a_curve_has_known_means_bytes_and_seconds(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path, clients=["a", "b"]).add(2)
    run = RunData.read(tmp_path)
    (line, _) = views.curves(run, "accuracy", "post_fit", "bytes", each_seed=True)["lines"]
    by_seed = {
        seed: [np.mean([growing.accuracy(0, seed, client, round) for client in (0, 1)]) for round in (1, 2)]
        for seed in (1, 2)
    }
    np.testing.assert_allclose(line["mean"], np.mean(list(by_seed.values()), axis=0), rtol=1e-5)
    assert (line["count"], len(line["seeds"])) == (2, 2)
    np.testing.assert_allclose(line["seeds"][1]["mean"], by_seed[2], rtol=1e-5)
    assert line["x"] == line["seeds"][0]["x"] == {"rounds": [1, 2], "bytes": [600.0, 1200.0]}
    (line, _) = views.curves(run, "accuracy", "post_fit", "seconds")["lines"]
    assert line["x"] == {"rounds": [1, 2], "seconds": [0.5, 1.0]}
    assert (line["count"], line["seeds"]) == (2, [])
    (line, _) = views.curves(run, "accuracy", "post_fit", "virtual")["lines"]
    assert line["x"] == {"rounds": [1, 2]}  # this run has no clock


def marks(found: dict) -> str:
    return ",".join(";".join(one["mark"] for one in (line, *line["seeds"])) for line in found["lines"])


@pytest.mark.parametrize("axis", ["rounds", "bytes"])
def test_a_page_that_sends_its_marks_back_gets_only_the_points_that_follow(tmp_path: Path, axis: str) -> None:
    growing = GrowingRun(tmp_path).add(3)
    before = views.curves(RunData.read(tmp_path), "accuracy", "post_fit", axis)
    growing.add(2)
    run = RunData.read(tmp_path)
    whole = views.curves(run, "accuracy", "post_fit", axis)
    later = views.curves(run, "accuracy", "post_fit", axis, known=marks(before))
    assert [line["kept"] for line in later["lines"]] == [3, 3]
    for line, old, new in zip(whole["lines"], before["lines"], later["lines"], strict=True):
        assert {place: old["x"][place][:3] + new["x"][place] for place in line["x"]} == line["x"]
        assert len(new["mean"]) == 2
        for side in ("mean", "low", "high"):
            assert old[side][:3] + new[side] == line[side]
    assert [line["mean"] for line in views.curves(run, "accuracy", "post_fit", axis, known=marks(whole))["lines"]] == [
        [],
        [],
    ]


def test_a_seed_that_begins_leaves_the_line_of_finished_ones_as_it_is(tmp_path: Path) -> None:
    facts = {"rounds": 4}
    GrowingRun(tmp_path, labels=("fedavg",), seeds=(1,), facts=facts).add(4).end()
    second = GrowingRun(tmp_path, labels=("fedavg",), seeds=(2,), facts=facts).add(1)
    before = views.curves(RunData.read(tmp_path), "accuracy", "post_fit")
    (line,) = before["lines"]
    assert (line["x"]["rounds"], line["count"]) == ([1, 2, 3, 4], 1)
    assert line["low"] == line["mean"] == line["high"]  # one of two seeds has no interval
    assert [one["x"]["rounds"] for one in line["seeds"]] == [[1]]
    assert before["caption"].startswith("Lines: mean over clients and seeds (up to 1 of 2 seeds).")
    assert "Thin lines: seeds that are not done." in before["caption"]
    second.add(2)
    (line,) = views.curves(RunData.read(tmp_path), "accuracy", "post_fit", known=marks(before))["lines"]
    assert (line["kept"], line["mean"]) == (4, [])
    assert [(one["kept"], one["x"]["rounds"]) for one in line["seeds"]] == [(1, [2, 3])]
    second.add(1).end()
    found = views.curves(RunData.read(tmp_path), "accuracy", "post_fit", known=marks(before))
    (line,) = found["lines"]
    assert (line["kept"], line["count"], line["seeds"], len(line["mean"])) == (0, 2, [], 4)
    assert "(2 seeds)" in found["caption"]


def test_the_last_values_have_the_universal_test_of_the_report(comparison: Path) -> None:
    run = RunData.read(comparison)
    (wanted,) = (one for one in comparisons(run, "accuracy") if one.key == "universal")
    found = views.curves(run, "accuracy", "post_fit")
    assert found["universal"] == "after local training, universal test (drawn clients)"  # as in the terminal
    assert {line["label"]: line["universal"] for line in found["lines"]} == pytest.approx(
        {label: np.mean(list(values.values())) for label, values in wanted.values.items()}
    )


def test_the_last_values_have_the_final_models_of_the_report(comparison: Path) -> None:
    run = RunData.read(comparison)
    (wanted,) = (one for one in comparisons(run, "accuracy") if one.key == "test")
    found = views.curves(run, "accuracy", "pre_fit")
    assert found["final"] == "final model"
    assert {line["label"]: line["final"] for line in found["lines"]} == pytest.approx(
        {label: np.mean(list(values.values())) for label, values in wanted.values.items()}
    )


def test_the_last_values_of_a_finished_run_have_the_order_of_its_report(comparison: Path) -> None:
    run = RunData.read(comparison)
    main = main_comparison(run)
    assert main is not None
    for panel in ("pre_fit", "post_fit", "server"):
        found = views.curves(run, "accuracy", panel)
        lines = [line["label"] for line in found["lines"]]
        ranked = [label for label in best_first(run, main) if label in lines]
        assert found["order"] == [*ranked, *(label for label in lines if label not in ranked)]
        assert ("Algorithms without this number stand last." in found["about"]) == (len(ranked) < len(lines))
        assert f"by what the report compares: {main.title}." in found["about"]


def test_the_order_of_last_values_is_said_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowingRun, "accuracy", lambda _, algorithm, *__: 0.5 + 0.1 * algorithm)
    GrowingRun(tmp_path, labels=["a", "b"]).add(2)
    found = views.curves(RunData.read(tmp_path), "accuracy", "pre_fit")
    assert found["order"] == ["b", "a"]
    assert found["about"] == (
        "The best algorithm first, by the last round of these curves. The report compares the final models, which are "
        "measured at the end."
    )


def test_clients_show_the_final_model_once_it_is_measured(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path).add(2)
    live = LiveRun(tmp_path)
    found = views.clients(live, "fedavg", 1, "accuracy", "final")
    assert found["columns"]["value"] == views.clients(live, "fedavg", 1, "accuracy", "pre_fit")["columns"]["value"]
    assert found["about"] == "accuracy: before local training. The final model is measured at the end."
    tested = {"test": Measured(30, {"loss": 30.0, "accuracy": 15.0})}
    growing.add(1, clients={"final": dict.fromkeys(range(3), tested)})
    found = views.clients(LiveRun(tmp_path), "fedavg", 1, "accuracy", "final")
    assert (found["columns"]["value"], found["about"]) == ([0.5, 0.5, 0.5], "accuracy: the final model.")


def test_the_universal_test_appears_when_a_cell_is_done_and_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = GrowingRun(tmp_path, facts=UNIVERSAL).add(2)
    live, asked, read = LiveRun(tmp_path), [], Store.summary
    monkeypatch.setattr(Store, "summary", lambda store, cell: asked.append(cell) or read(store, cell))

    def shown() -> tuple[str, list[float | None]]:
        found = views.curves(live.data(), "accuracy", "post_fit")
        return found["universal"], [line["universal"] for line in found["lines"]]

    assert (shown(), asked) == (("", [None, None]), [])  # a run that goes on costs nothing
    growing.add_universal(0, 1, accuracy=0.75)
    title = "after local training, universal test"
    assert shown() == shown() == (title, [pytest.approx(0.75), None])
    growing.add_universal(0, 2, accuracy=0.25)
    assert shown() == (title, [pytest.approx(0.5), None])
    growing.add_universal(1, 1, accuracy=0.125)
    assert shown() == (title, [pytest.approx(0.5), pytest.approx(0.125)])
    assert asked == [growing.cells[cell] for cell in (("fedavg", 1), ("fedavg", 2), ("local", 1))]


def test_wide_intervals_of_two_seeds_do_not_hide_the_lines(tmp_path: Path) -> None:
    GrowingRun(tmp_path, labels=("a", "b", "c", "d")).add(2).end()
    assert views.curves(RunData.read(tmp_path), "accuracy", "post_fit")["crowded"]
    GrowingRun(tmp_path / "three", labels=("a", "b", "c")).add(2).end()
    assert not views.curves(RunData.read(tmp_path / "three"), "accuracy", "post_fit")["crowded"]


def test_a_line_that_has_changed_is_sent_whole(tmp_path: Path) -> None:
    GrowingRun(tmp_path, labels=("fedavg",), seeds=(1,)).add(3)
    before = views.curves(RunData.read(tmp_path), "accuracy", "post_fit")
    GrowingRun(tmp_path, labels=("fedavg",), seeds=(2,)).add(1)  # another seed begins: points are means over both
    run = RunData.read(tmp_path)
    found = views.curves(run, "accuracy", "post_fit", known=marks(before))
    assert found == views.curves(run, "accuracy", "post_fit")
    assert found["lines"][0]["x"]["rounds"] == [1]


@pytest.mark.parametrize("hostile", ["x", "3", "3.", "-1.0", "999999999999.1", "3.0,4.0,5.0", "٣.1", "9" * 5000])
def test_marks_that_the_page_never_got_change_nothing(tmp_path: Path, hostile: str) -> None:
    GrowingRun(tmp_path).add(3)
    run = RunData.read(tmp_path)
    assert views.curves(run, "accuracy", "post_fit", known=hostile) == views.curves(run, "accuracy", "post_fit")


def test_the_overview_says_how_far_the_run_is_and_how_long_it_takes(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path, rounds=10).add(4)
    found = views.overview(RunData.read(tmp_path), CONTROL)
    assert (found["rounds"], found["clients"], found["seeds"]) == (10, 3, (1, 2))
    assert {cell["rounds_done"] for cell in found["cells"]} == {4}
    assert found["bytes_up"] == 4 * 4 * 3 * 100
    assert found["panels"] == {"post_fit": "After local training", "pre_fit": "Before local training"}
    # the process that wrote it holds no lock, as after a crash
    assert (found["status"], found["seconds_left"]) == ("interrupted", None)
    with figure_of_lock(tmp_path):
        running = views.overview(RunData.read(tmp_path), CONTROL)
    # four cells side by side, six rounds of half a second each
    assert (running["status"], running["seconds_left"]) == ("running", 4 * 6 * 0.5 / 4)
    growing.end()
    ended = views.overview(RunData.read(tmp_path), CONTROL)
    assert (ended["status"], ended["seconds_left"], ended["control"]["paused"]) == ("done", None, None)
    json.dumps(ended, allow_nan=False)


def test_runs_with_the_same_name_are_called_by_their_folders(tmp_path: Path) -> None:
    def made(folder: str, name: str) -> RunData:
        GrowingRun(tmp_path / folder, facts={"description": {"name": name, "metrics": ["accuracy"]}}).add(1)
        return RunData.read(tmp_path / folder)

    even, skewed, other = made("even", "seven"), made("skewed", "seven"), made("b/even", "other")
    assert views.names([]) == []
    assert views.names([even]) == ["seven"]
    assert views.names([even, other]) == ["seven", "other"]
    assert views.names([even, skewed]) == ["even", "skewed"]
    assert views.names([even, skewed, other]) == [str(run.folder) for run in (even, skewed, other)]


def figure_of_lock(folder: Path):  # type: ignore[no-untyped-def]
    from fedloom.files import locked

    return locked(folder, "busy")


def test_lines_have_the_reports_colours_and_dashes(tmp_path: Path) -> None:
    labels = [f"algorithm-{number}" for number in range(10)]
    GrowingRun(tmp_path, labels, (1,), ["a"]).add(1)
    found = views.overview(RunData.read(tmp_path), CONTROL)["labels"]
    styles = figure_style.line_styles(labels)
    assert [one["colour"] for one in found] == [styles[label]["color"] for label in labels]
    assert found[0]["dashes"] == []
    assert found[1]["dashes"] == [1.6 * part for part in styles[labels[1]]["linestyle"][1]]
    assert len({one["dark"] for one in found[:8]}) == 8


def test_spent_epsilon_stands_beside_its_budget(tmp_path: Path) -> None:
    description = {"name": "dp", "metrics": ["accuracy"], "privacy": {"dp": {"epsilon": 8.0}}, "cohort": {}}
    growing = GrowingRun(tmp_path, ["fedavg"], (1,), facts={"description": description})
    growing.add(1, notes={"epsilon": 1.5, "diversity": 3.0}).add(1, notes={"epsilon": 2.5})
    (found,) = views.overview(RunData.read(tmp_path), CONTROL)["epsilon"]
    assert (found["spent"], found["budget"], found["word"]) == (2.5, 8.0, "ε (± 1 client)")


def test_the_table_of_clients_counts_rounds_bytes_and_answers_that_did_not_count(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path).add(2, left_out=(1,))
    found = views.clients(LiveRun(tmp_path), "fedavg", 2, "accuracy", "post_fit")
    assert found["names"] == ["cork", "kerry", "clare"]
    columns = found["columns"]
    assert columns["took_part"] == [2, 2, 2]
    assert columns["not_counted"] == [0, 2, 0]
    assert (columns["bytes_up"], columns["bytes_down"]) == ([200] * 3, [400] * 3)
    assert (columns["last_round"], columns["measured"]) == ([2] * 3, [2] * 3)
    np.testing.assert_allclose(columns["value"], [growing.accuracy(0, 2, client, 2) for client in range(3)], rtol=1e-5)
    assert None not in columns["test"]
    with Store(tmp_path) as store:  # every seed draws its own clients: those of the second have other sizes
        for seed in (1, 2):
            store.set_fact(f"data of seed {seed}", f"data {seed}")
        store.set_fact("description", {**(store.fact("description") or {}), "data": {"partition": "iid"}})
    other, first = (views.clients(LiveRun(tmp_path), "fedavg", seed, "accuracy", "post_fit") for seed in (2, 1))
    assert other["columns"]["test"] == [None] * 3
    assert first["columns"]["test"] == columns["test"]


def test_the_matrix_has_a_value_and_a_state_for_each_pair_and_grows_by_new_rounds(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path).add(1).add(1, left_out=(2,))
    live = LiveRun(tmp_path)
    first, values, states = unpacked(views.matrix(live, "fedavg", 1, "accuracy", "post_fit"))
    assert (first, states.tolist()) == (1, [[1, 1, 1], [1, 1, 2]])
    wanted = [[growing.accuracy(0, 1, client, round) for client in range(3)] for round in (1, 2)]
    np.testing.assert_allclose(values, wanted, rtol=1e-5)
    growing.add(1, outliers=(0,), absences={1: "late", 2: "refused"}, clients={})
    first, values, states = unpacked(views.matrix(live, "fedavg", 1, "accuracy", "post_fit", after=2))
    assert (first, states.tolist()) == (3, [[3, 4, 7]])
    assert np.isnan(values).all()
    first, values, states = unpacked(views.matrix(live, "fedavg", 1, "accuracy", "post_fit", after=3))
    assert (first, states.shape) == (4, (0, 3))


def test_a_matrix_with_too_many_pairs_shows_the_last_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GrowingRun(tmp_path).add(5)
    monkeypatch.setattr(views, "MOST_CELLS", 6)
    first, values, _ = unpacked(views.matrix(LiveRun(tmp_path), "fedavg", 1, "accuracy", "post_fit"))
    assert (first, values.shape) == (4, (2, 3))


def test_the_distribution_is_of_the_last_measured_round_up_to_the_chosen_one(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path).add(3).add(1, clients={})
    run = RunData.read(tmp_path)
    for wanted, found in ((None, 3), (4, 3), (2, 2)):
        line = views.distribution(run, "accuracy", "post_fit", 1, wanted)["lines"][1]
        assert (line["label"], line["round"], line["clients"]) == ("local", found, [0, 1, 2])
        expected = [growing.accuracy(1, 1, client, found) for client in range(3)]
        np.testing.assert_allclose(line["values"], expected, rtol=1e-5)


def test_the_pooled_baseline_has_no_client_of_its_own_in_the_table(comparison: Path) -> None:
    live = LiveRun(comparison)
    found = views.clients(live, "pooled", 1, "accuracy", "pre_fit")
    for column in ("took_part", "last_round", "not_counted", "bytes_up", "bytes_down"):
        assert found["columns"][column] == [None] * 4  # not 0: every example leaves
    assert {one["label"] for one in views.overview(live.data(), CONTROL)["labels"] if one["pooled"]} == {"pooled"}
    _, _, states = unpacked(views.matrix(live, "pooled", 1, "accuracy", "pre_fit"))
    assert not states.any()
    assert views.settings(live.data())["data"].keys() == {"data of all seeds"}


def test_the_harm_that_a_finished_run_did_is_what_the_report_says_at_the_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "in_short", lambda run: iter(["Means hide cork."]))
    growing = GrowingRun(tmp_path).add(1)
    assert views.settings(LiveRun(tmp_path).data())["harm"] == []
    growing.end()
    assert views.settings(LiveRun(tmp_path).data())["harm"] == ["Means hide cork."]


def test_the_pooled_baseline_has_no_traffic(comparison: Path) -> None:
    run = RunData.read(comparison)
    shown = views.overview(run, CONTROL)
    for way in ("bytes_up", "bytes_down"):
        assert shown[way] == sum(int(getattr(run.costs("fedavg", seed), way).sum()) for seed in run.seeds) > 0
    lines = {line["label"]: line for line in views.curves(run, "accuracy", "post_fit", "bytes")["lines"]}
    assert not any(lines["pooled"]["x"]["bytes"])
    assert all(lines["fedavg"]["x"]["bytes"])


def test_an_undefined_value_is_null_and_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert views._rounded(np.array([1.0, math.nan, math.inf])) == [1.0, None, None]
    GrowingRun(tmp_path).add(1)
    live = LiveRun(tmp_path)
    with pytest.raises(InputError, match="There is no cell other with seed 1"):
        views.clients(live, "other", 1, "accuracy", "post_fit")
    with pytest.raises(InputError, match=r"There is no phase 'nose'\. Known: final, pre_fit, post_fit"):
        views.clients(live, "fedavg", 1, "accuracy", "nose")
    with pytest.raises(InputError, match="There is no panel 'nose'"):
        views.curves(live.data(), "accuracy", "nose")
    with pytest.raises(InputError, match="There is no axis 'nose'"):
        views.curves(live.data(), "accuracy", "post_fit", "nose")


def test_shades_are_the_reports() -> None:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    (shades,) = re.findall(r'SHADES = "(.*?)"', FILES["matrix.js"].read_text())
    assert [to_hex(colormaps["cividis"](step / 31))[1:] for step in range(32)] == shades.split()


def test_virtual_time_and_what_the_clock_did_to_clients_are_shown(tmp_path: Path) -> None:
    def passed(round: int, *statuses: str) -> RoundTime:
        times = tuple(ClientTime(client, what, 0.0, 1.0, 0.5, round) for client, what in enumerate(statuses))
        return RoundTime(100.0 * (round - 1), 100.0 * round, 3, times)

    run = GrowingRun(tmp_path, ["fedavg"], (1,))
    run.add(1, time=passed(1, "counted", "late", "vanished")).add(1, time=passed(2, "counted", "surplus", "left"))
    live = LiveRun(tmp_path)
    (line,) = views.curves(live.data(), "accuracy", "post_fit", "virtual")["lines"]
    assert line["x"]["virtual"] == [100.0, 200.0]
    _, _, states = unpacked(views.matrix(live, "fedavg", 1, "accuracy", "post_fit"))
    words = ["", "took part", *(words for words, _ in MARKS.values())]
    assert [[words[state] for state in row] for row in states] == [
        ["took part", "too late", "went away"],
        ["took part", "faster ones sufficed", "went away"],
    ]
