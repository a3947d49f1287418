"""The table on the screen."""

from __future__ import annotations

import io
import statistics
from dataclasses import replace

import pytest
from rich.console import Console

from fedloom.results.result import CellResult, Result
from fedloom.results.run_data import RunData
from fedloom.results.summary import in_short
from fedloom.results.summary import table as on_screen
from tests.results.helpers import named


def headers(result: Result) -> list[object]:
    return [column.header for column in on_screen(result).columns]


def test_columns_are_what_was_measured(run: RunData) -> None:
    made = on_screen(run.result)
    common = ["algorithm", "rounds", "global model, all tests", "before local training"]
    drawn = ["after local training (drawn clients)", "after local training, universal test (drawn clients)"]
    assert headers(run.result) == [*common, *drawn, "final model"]  # in the order of time
    assert list(made.columns[0].cells) == ["fedavg", "local", "pooled"]
    assert list(made.columns[2].cells)[1] == "–"  # no global model
    assert str(made.title).endswith("accuracy, mean of 2 seeds")
    assert "The universal test is the test splits of all clients." in str(made.caption)


def test_names_of_algorithms_are_whole_in_80_columns(run: RunData) -> None:
    made = on_screen(run.result)
    made.add_row("central-selective-weighted", *["100.00 %"] * (len(made.columns) - 1))
    out = io.StringIO()
    Console(file=out, width=80).print(made)
    assert "central-selective-weighted" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_unfinished_cells_and_the_rule_are_named(run: RunData) -> None:
    def stop(cell: CellResult) -> CellResult:
        return replace(cell, status="stopped", rounds=3) if (cell.algorithm, cell.seed) == ("local", 2) else cell

    made = on_screen(replace(run.result, runs=tuple(map(stop, run.result.runs)), rule="last:2"))
    assert list(made.columns[1].cells) == ["5", "5 (1 of 2 seeds, 1 stopped)", "5"]
    assert str(made.title).endswith("accuracy, mean of the seeds that are finished")
    assert str(made.caption).endswith("Mean of the last 2 measured rounds.")


def row(result: Result, name: str) -> dict[object, object]:
    made = on_screen(result)
    place = list(made.columns[0].cells).index(name)
    return {column.header: list(column.cells)[place] for column in made.columns}


def test_seeds_that_are_not_finished_are_not_averaged_with_others(run: RunData) -> None:
    def changed(statuses: dict[int, tuple[str, int]]) -> Result:
        cells = (cell for cell in run.result.runs if cell.algorithm == "fedavg")
        mine = {
            cell.seed: replace(cell, status=statuses[cell.seed][0], rounds=statuses[cell.seed][1]) for cell in cells
        }
        runs = (mine[cell.seed] if cell.algorithm == "fedavg" else cell for cell in run.result.runs)
        return replace(run.result, runs=tuple(runs))

    alone = {cell.seed: f"{100 * cell.final['test_accuracy']:.2f} %" for cell in run.result.runs[:4:3]}
    assert len(set(alone.values())) == 2
    found = row(changed({1: ("done", 5), 2: ("interrupted", 3)}), "fedavg")
    assert (found["rounds"], found["final model"]) == ("5 (1 of 2 seeds, 1 interrupted)", alone[1])
    nothing = changed({1: ("stopped", 4), 2: ("stopped", 3)})
    for seed, rounds in ((1, 4), (2, 3)):
        found = row(nothing, f"fedavg, seed {seed}")
        assert (found["rounds"], found["final model"]) == (f"{rounds} (stopped)", alone[seed])
    waiting = changed({1: ("running", 4), 2: ("waiting", 0)})
    assert list(on_screen(waiting).columns[0].cells) == ["fedavg, seed 1", "local", "pooled"]
    one_seed = nothing.only(seed=1)
    assert row(one_seed, "fedavg")["rounds"] == "4 (stopped)"
    assert "mean" not in str(on_screen(one_seed).title)


def test_all_columns_of_a_table_are_about_the_same_clients(run: RunData) -> None:
    """After local training: those that were drawn in the last round, the pooled model's column included."""
    expected = []
    for seed in (1, 2):
        drawn = run.client_values("fedavg", seed, "post_fit", "accuracy").last_round().clients
        assert drawn.tolist() == run.client_values("local", seed, "post_fit", "accuracy").last_round().clients.tolist()
        expected.append(run.client_values("pooled", seed, "final", "accuracy").values[drawn].mean())
    mean = statistics.fmean(expected)
    summary = named(run, "summary_accuracy_post_fit")
    assert summary.rows[0][summary.columns.index("pooled")] == pytest.approx(mean)
    rows = named(run, "comparison_accuracy").rows
    (row,) = (r for r in rows if r[:2] == ("after local training, own test (drawn clients)", "pooled"))
    assert row[2] == pytest.approx(mean)
    screen = on_screen(run.result)
    (column,) = (column for column in screen.columns if column.header == "after local training (drawn clients)")
    assert list(column.cells)[2] == f"{100 * mean:.2f} %"


def test_a_caption_says_that_drawn_clients_are_other_clients(run: RunData) -> None:
    assert "are means over different clients" in str(on_screen(run.result).caption)


def test_clients_that_a_mean_leaves_out_are_named(run: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "undefined" not in str(on_screen(run.result).caption)
    monkeypatch.setattr("fedloom.results.summary.undefined_at", lambda run, metric: "1 of 4 clients in seed 2")
    said = " accuracy is undefined at 1 of 4 clients in seed 2: means leave them out."
    assert str(on_screen(run.result).caption).endswith(said)


@pytest.mark.parametrize(
    ("tied", "said"), [([], "fedavg: "), (["b"], "fedavg and b: "), (["b", "c"], "fedavg and 2 more: ")]
)
def test_a_list_of_runs_names_all_of_the_best(
    run: RunData, monkeypatch: pytest.MonkeyPatch, tied: list[str], said: str
) -> None:
    monkeypatch.setattr("fedloom.results.summary.best_labels", lambda *_: ["fedavg", *tied])
    assert in_short(run).startswith(said)
