"""Tables of single clients hold what the database holds."""

from __future__ import annotations

import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedloom.experiment.store import Store
from fedloom.results.client_tables import average
from fedloom.results.figures import draw_all
from fedloom.results.report import html
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from fedloom.results.run_values import grouped
from fedloom.results.table import STATISTICS
from tests.results.helpers import named


def test_statistics_are_averaged_over_the_rounds_that_all_seeds_have() -> None:
    one = grouped(np.array([1, 1, 2]), np.array([0.0, 1.0, 5.0]))
    other = grouped(np.array([1, 3]), np.array([2.0, 7.0]))
    found = average([one, other])
    assert found is not None
    assert (found.index.tolist(), found.mean.tolist(), found.high.tolist()) == ([1], [1.25], [1.5])
    assert average([one, grouped(np.array([9]), np.array([1.0]))]) is None
    assert average([]) is None


def test_round_and_user_statistics_are_those_of_the_clients(run: RunData) -> None:
    rows = Result.read(run.folder).rows("clients")

    def values(**wanted: object) -> list[float]:
        return [row["value"] for row in rows if all(row[key] == value for key, value in wanted.items())]

    common = {"algorithm": "fedavg", "phase": "pre_fit", "split": "test", "metric": "accuracy"}
    per_seed = [values(round=3, seed=seed, **common) for seed in (1, 2)]
    expected = [
        statistics.fmean(map(statistics.fmean, per_seed)),
        statistics.fmean(map(statistics.pstdev, per_seed)),
        statistics.fmean(map(min, per_seed)),
        statistics.fmean(map(max, per_seed)),
    ]
    (row,) = (r for r in named(run, "round_stats_accuracy").rows if r[:3] == ("fedavg", "pre_fit", 3))
    assert row[3:] == pytest.approx(expected)
    per_seed = [values(client="client-2", seed=seed, **common) for seed in (1, 2)]
    (row,) = (r for r in named(run, "user_stats_accuracy").rows if r[:3] == ("fedavg", "pre_fit", "client-2"))
    assert row[3] == pytest.approx(statistics.fmean(map(statistics.fmean, per_seed)))
    assert row[6] == pytest.approx(statistics.fmean(map(max, per_seed)))


def test_the_universal_test_has_a_row_for_every_user_and_one_number_for_the_pooled_model(run: RunData) -> None:
    table = named(run, "universal_test_accuracy")
    assert "The last average comes later" in table.note  # the final model is what clients have after it
    assert table.columns == ("user", "seeds", "fedavg", "local", "pooled")
    names = [row[0] for row in table.rows]
    assert names == [f"client-{n}" for n in range(4)] + list(STATISTICS)
    assert all(row[4] is None for row in table.rows if row[0] != "Average")
    (average,) = (row for row in table.rows if row[0] == "Average")
    finals = [cell.final["universal_accuracy"] for cell in run.result.runs if cell.algorithm == "pooled"]
    assert average[4] == pytest.approx(statistics.fmean(finals))
    local = [cell.final["universal_accuracy"] for cell in run.result.runs if cell.algorithm == "local"]
    assert average[3] == pytest.approx(statistics.fmean(local))
    alone = run.client_values("local", 1, "universal", "accuracy")
    assert len(alone) == 3  # those who took part in the last round


def test_the_universal_test_says_how_many_seeds_are_behind_each_row(run: RunData) -> None:
    table = named(run, "universal_test_accuracy")
    per_seed = [run.client_values("fedavg", seed, "universal", "accuracy").clients.tolist() for seed in (1, 2)]
    drew = [sum(client in clients for clients in per_seed) for client in range(4)]
    assert {*drew} == {1, 2}
    assert [row[1] for row in table.rows] == [*drew, 2, 2, 2, 2]
    assert "A client's row is the mean over the seeds that measured the client then." in table.note
    assert "The rows below the clients are computed for each of 2 seeds, then averaged over seeds." in table.note
    assert table.csv().startswith("user,seeds,fedavg,local,pooled\n")
    assert "| user | seeds | fedavg |" in table.markdown()
    assert "user & seeds & fedavg" in table.latex()
    assert re.search(r"<th[^>]*>(<[^>]*>|\s)*seeds<", html(run, [], [table]))


def test_a_table_whose_rows_all_have_every_seed_has_no_column_for_it(run: RunData) -> None:
    assert "seeds" not in named(run, "clients_accuracy").columns
    alone = replace(run, cells={cell: row for cell, row in run.cells.items() if cell[1] == 1})
    table = named(alone, "universal_test_accuracy")
    assert "seeds" not in table.columns
    assert table.note.endswith("One seed.")


def test_rows_of_a_client_that_a_seed_did_not_measure_say_so(comparison: Path, tmp_path: Path) -> None:
    with Store(shutil.copytree(comparison, tmp_path / "run")) as store:
        (cell,) = (one["id"] for one in store.cells() if (one["label"], one["seed"]) == ("local", 2))
        with store._transaction() as database:
            database.execute("DELETE FROM client_metrics WHERE cell = ? AND client = 1", (cell,))
    table = named(RunData.read(tmp_path / "run"), "clients_accuracy")
    assert [row[1] for row in table.rows] == [2, "1 to 2", 2, 2]
    assert table.note.endswith("test split: the mean over the seeds that have a value there.")


def test_averages_over_seeds_name_the_algorithms_that_have_fewer(comparison: Path, tmp_path: Path) -> None:
    with Store(shutil.copytree(comparison, tmp_path / "run")) as store:
        (cell,) = (one["id"] for one in store.cells() if (one["label"], one["seed"]) == ("local", 2))
        with store._transaction() as database:
            database.execute("DELETE FROM client_metrics WHERE cell = ?", (cell,))
    run = RunData.read(tmp_path / "run")
    said = "for each seed, then averaged over the seeds that an algorithm has (fedavg 2, local 1, pooled 2)."
    for name in ("summary_accuracy_post_fit", "universal_test_accuracy", "round_stats_accuracy"):
        assert said in named(run, name).note
    assert [row[1] for row in named(run, "universal_test_accuracy").rows][-4:] == ["1 to 2"] * 4


def test_every_client_has_a_row_with_what_it_holds_and_how_it_fares(run: RunData) -> None:
    table = named(run, "clients_accuracy")
    assert table.columns == ("client", "train", "validation", "test", "fedavg", "local", "pooled")
    assert [row[:4] for row in table.rows] == [
        ("client-0", 12, 4, 4),
        ("client-1", 9, 3, 3),
        ("client-2", 18, 6, 6),
        ("client-3", 15, 5, 5),
    ]
    for label in ("fedavg", "local", "pooled"):  # the model that predict and export give
        finals = [run.client_values(label, seed, "final", "accuracy").values[2] for seed in (1, 2)]
        assert table.rows[2][table.columns.index(label)] == pytest.approx(statistics.fmean(finals))


def with_data_of_every_seed(comparison: Path, folder: Path, data: object) -> RunData:
    """The small comparison, as if its second seed had other data; `data` describes where it came from."""
    with Store(shutil.copytree(comparison, folder)) as store:
        store.set_fact("data of seed 2", "other data")
        store.set_fact("description", {**store.fact("description"), "data": data})
    return RunData.read(folder)


def test_clients_that_differ_between_seeds_are_not_averaged(comparison: Path, tmp_path: Path) -> None:
    run = with_data_of_every_seed(comparison, tmp_path / "run", {"partition": {"name": "iid"}, "clients": 4})
    assert not run.same_clients
    first = run.client_values("local", 1, "final", "accuracy").last_round()
    alone = {run.client_name(int(client)): value for client, value in zip(first.clients, first.values, strict=True)}
    table = named(run, "clients_accuracy")
    place = table.columns.index("local")
    assert {row[0]: row[place] for row in table.rows if row[place] is not None} == pytest.approx(alone)
    per_client = run.client_values("local", 1, "post_fit", "accuracy").by_client().mean
    rows = [row for row in named(run, "user_stats_accuracy").rows if row[:2] == ("local", "post_fit")]
    assert [row[3] for row in rows] == pytest.approx(per_client)
    for name in ("clients_accuracy", "user_stats_accuracy", "universal_test_accuracy"):
        assert "single clients are those of seed 1" in named(run, name).note
    assert "the mean over seeds" not in named(run, "clients_accuracy").note
    same = named(RunData.read(comparison), "clients_accuracy")
    assert same.title == "Every client: accuracy, final model"
    assert same.note.endswith("on the client's own test split: the mean over seeds.")
    drawn = {figure.name: figure.caption for figure in draw_all(run)}
    for name in ("sausage_users", "clients"):
        assert "single clients are those of seed 1" in drawn[name]
        assert ", averaged over seeds" not in drawn[name]
    assert ", averaged over seeds" in drawn["sausage_rounds"]
    assert "single clients" not in named(run, "summary_accuracy_post_fit").note


@pytest.mark.parametrize(
    ("data", "same"),
    [
        ({"partition": "natural"}, True),
        ({}, True),
        ({"clients": 4}, False),
        ({"partition": {"name": "natural"}, "server": 0.1}, False),
        ("a fingerprint", False),
    ],
)
def test_clients_that_the_data_names_are_the_same_in_every_seed(
    comparison: Path, tmp_path: Path, data: object, same: bool
) -> None:
    assert with_data_of_every_seed(comparison, tmp_path / "run", data).same_clients == same
