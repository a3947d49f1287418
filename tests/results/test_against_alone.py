"""Every client's gain or loss against learning alone, in numbers that are computed here once more."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.experiment.store import Store
from fedloom.results import report
from fedloom.results.against_alone import Gain, against_alone, gains, learning_alone
from fedloom.results.badly_served import badly_served
from fedloom.results.run_data import RunData
from fedloom.results.table import Table
from tests.conftest import Logit, federation, two_classes
from tests.results.test_client_tables import with_data_of_every_seed

TESTED = {"anna": 100, "ben": 9, "chloe": 100, "dora": 0, "eve": 40}
Made = Callable[..., RunData]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two seeds and five clients."""
    folder = tmp_path_factory.mktemp("alone")
    data = two_classes(federation([20] * 5, names=tuple(TESTED)))
    algorithms = {"fedavg": fl.FedAvg(lr=0.1), "alone": fl.LocalOnly(lr=0.1)}
    task = fl.Task(Logit, loss="bce", metrics=["accuracy"])
    fl.run(data, task, algorithms, 1, seeds=(1, 2), out=folder, backend="serial")
    return folder


@pytest.fixture
def made(trained: Path, tmp_path: Path) -> Made:
    """A copy of that run with these values of clients in both seeds: of each algorithm, or one for all clients."""

    def make(metric: str = "accuracy", **values: list[tuple[float, float]]) -> RunData:
        shutil.copytree(trained, tmp_path / "run")
        with Store(tmp_path / "run") as store, store._transaction() as database:
            database.execute("DELETE FROM client_metrics WHERE phase = 'final' AND client = 3")  # dora has no tests
            for place, tested in enumerate(TESTED.values()):
                database.execute("UPDATE clients SET test = ? WHERE client = ?", (tested, place))
            where = "phase = 'final' AND metric = 'accuracy' AND client = ? AND cell = ?"
            for (label, seed), cell in RunData.read(tmp_path / "run").cells.items():
                for client, value in enumerate(values[label]):
                    change = f"UPDATE client_metrics SET value = ? WHERE {where}"
                    database.execute(change, (value[seed - 1], client, cell["id"]))
            for table in ("client_metrics", "metrics"):
                database.execute(f"UPDATE {table} SET metric = ? WHERE metric = 'accuracy'", (metric,))
            about = (metric in ("accuracy", "mae"), metric != "mae", metric)
            database.execute("UPDATE metrics SET is_mean = ?, higher_is_better = ? WHERE metric = ?", about)
        return RunData.read(tmp_path / "run")

    return make


def only(run: RunData) -> Table:
    (found,) = against_alone(run)
    return found


FAR = statistics.NormalDist().inv_cdf(0.995)  # one of five clients by chance in 5 of 100 comparisons
ALONE = [(0.9, 0.9), (1.0, 1.0), (0.8, 0.8), (0.5, 0.5), (0.95, 0.95)]
SHARED = [(0.99, 0.97), (0.0, 0.0), (0.9, 0.7), (0.5, 0.5), (0.2, 0.3)]


def test_each_difference_and_its_chance_are_those_computed_by_hand(made: Made) -> None:
    run = made(fedavg=SHARED, alone=ALONE)
    assert learning_alone(run) == ["alone"]
    found = gains(run, "fedavg", "alone", "accuracy")
    right = {0: 0.94, 1: 0.5, 2: 0.8, 4: 0.6}  # of both models, the mean over seeds
    by_seed = {0: (0.09, 0.07), 1: (-1.0, -1.0), 2: (0.1, -0.1), 4: (-0.75, -0.65)}
    assert found.keys() == right.keys()
    for client, gain in found.items():
        tested = [*TESTED.values()][client]
        assert gain.mean == pytest.approx(statistics.fmean(by_seed[client]))
        examples = 2 * right[client] * (1 - right[client]) / tested
        assert gain.chance == pytest.approx(FAR * math.sqrt(examples + statistics.stdev(by_seed[client]) ** 2 / 2))
    assert [client for client, gain in found.items() if gain.told_apart] == [1, 4]


def test_the_table_has_every_client_and_a_sentence_counts_them(made: Made) -> None:
    run = made(fedavg=SHARED, alone=ALONE)
    table = only(run)
    assert table.title == "Against learning alone: accuracy, final model (percentage points)"
    assert table.columns == ("client", "test examples", "fedavg", "told apart")
    assert [table.shown(row) for row in table.rows] == [
        ["anna", "100", "+8.00", ""],
        ["ben", "9", "−100.00", "fedavg (worse)"],
        ["chloe", "100", "+0.00", ""],
        ["dora", "0", "–", ""],
        ["eve", "40", "−70.00", "fedavg (worse)"],
    ]
    said = (
        "fedavg: better than alone for 0 of 5 clients, worse for 2 (ben, eve), not told apart for 3 (with 0 to 100 "
        "test examples)."
    )
    assert table.findings == (said,)
    assert table.note.startswith("The table has differences from alone, of the final model")
    assert "more than 2.6 standard deviations of what other test examples and other seeds would" in table.note
    assert "the mean over seeds" in table.note
    page = report.html(run, [], [table])
    assert page.count(f"<li>{said}</li>") == 1
    assert f"- {said}\n" in table.markdown()
    assert "worse for 2 (ben, eve)" in table.latex()
    assert "tables/against_alone.csv" in page


def test_those_who_lose_are_named_the_worst_first(made: Made) -> None:
    shared = [(0.3, 0.3), (0.9, 0.9), (0.2, 0.2), (0, 0), (0.9, 0.9)]
    alone = [(0.9, 0.9), (0.9, 0.9), (0.9, 0.9), (0, 0), (0.2, 0.2)]
    (said,) = only(made(fedavg=shared, alone=alone)).findings
    assert "better than alone for 1 of 5 clients, worse for 2 (chloe, anna), not told apart for 2 (with 0 to 9 " in said


def test_of_a_metric_where_lower_is_better_less_is_a_gain_that_nothing_tells_apart(made: Made) -> None:
    table = only(made("mae", fedavg=[(1.0, 2.0)] * 5, alone=[(3.5, 3.5)] * 5))
    assert [row[2] for row in table.rows] == [2.0, 2.0, 2.0, None, 2.0]
    assert table.title == "Against learning alone: mae, final model"
    assert "not told apart for 5 (with 0 to 100 test examples)" in table.findings[0]
    assert "it is not known how much few test examples change a client's mae" in table.note


def test_two_aurocs_vary_more_than_one(made: Made) -> None:
    run = made("auroc", fedavg=[(0.2, 0.2)] * 5, alone=[(0.8, 0.8)] * 5)
    counts: Mapping[str, Any] = {"classes": ["a", "b"], "counts": [[50, 50]] * 4 + [[20, 20]]}
    run = RunData(run.folder, run.cells, run.metrics, run.clients, {**run.facts, "labels": counts})
    found = gains(run, "fedavg", "alone", "auroc")
    assert found[4].chance == pytest.approx(FAR * math.sqrt(2 * 41 / (12 * 20 * 20)))  # Mann and Whitney's U, twice
    assert [client for client, gain in found.items() if gain.told_apart] == [0, 2, 4]
    assert "would change of two auroc values" in only(run).note


def test_harm_that_only_another_metric_shows_is_said_too(comparison: Path) -> None:
    run = RunData.read(comparison)
    by_name = {"accuracy": {0: Gain(-0.1, 0.2)}, "auroc": {0: Gain(-0.5, 0.2), 1: Gain(0.5, 0.2)}}
    run = replace(run, metrics={name: replace(run.metrics["accuracy"], name=name) for name in by_name})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.results.against_alone.gains", lambda run, label, alone, metric: by_name[metric])
        (table,) = against_alone(run)
    assert "worse for 0, not told apart for 4" in table.findings[0]
    assert f"By auroc, fedavg is also worse than alone for {run.client_name(0)}." in table.findings


def test_seeds_that_disagree_tell_nothing_apart(made: Made) -> None:
    shared = [(0.6, 0.9), *SHARED[1:]]
    assert not gains(made(fedavg=shared, alone=[(1.0, 1.0), *ALONE[1:]]), "fedavg", "alone", "accuracy")[0].told_apart


def test_among_many_clients_more_is_needed(made: Made) -> None:
    run = made(fedavg=SHARED, alone=ALONE)
    many = RunData(run.folder, run.cells, run.metrics, run.clients * 20, run.facts)
    few, more = (gains(one, "fedavg", "alone", "accuracy")[4].chance for one in (run, many))
    assert few is not None
    assert more == pytest.approx(few / FAR * statistics.NormalDist().inv_cdf(1 - 0.025 / 100))


@pytest.mark.parametrize(("of_nine", "named"), [(0.0, [4, 1]), (0.6, [4])])
def test_a_client_is_called_badly_served_for_its_own_model_only_if_it_is_told_apart(
    made: Made, of_nine: float, named: list[int]
) -> None:
    run = made(fedavg=[SHARED[0], (of_nine, of_nine), *SHARED[2:]], alone=ALONE)
    run = RunData(run.folder, run.cells, run.metrics, run.clients, {**run.facts, "labels": None})  # no guess is known
    assert [one.client for one in badly_served(run)["fedavg"]] == named


def test_clients_of_other_seeds_are_not_averaged(comparison: Path, tmp_path: Path) -> None:
    run = with_data_of_every_seed(comparison, tmp_path / "run", {"partition": {"name": "iid"}, "clients": 4})
    table = only(run)
    one, own = (run.client_values(label, 1, "final", "accuracy").values for label in ("fedavg", "local"))
    assert [row[2] for row in table.rows] == pytest.approx((one - own).tolist())
    assert "fedavg in seed 1: better than alone for" in table.findings[0]
    assert "single clients are those of seed 1" in table.note
    assert "the mean over seeds" not in table.note
    assert "of what other test examples would change" in table.note  # one seed says nothing about others


def test_only_a_run_in_which_somebody_learns_alone_has_the_table(made: Made, drawn: Path) -> None:
    run = made(fedavg=SHARED, alone=ALONE)
    assert not [*against_alone(RunData.read(drawn))]
    assert not [*against_alone(run.of_algorithms(["alone"]))]
    running = {cell: {**row, "status": "running"} for cell, row in run.cells.items() if cell[1] == 2}
    first = RunData(run.folder, {**run.cells, **running}, run.metrics, run.clients, run.facts)
    assert [row[2] for row in only(first).rows] == pytest.approx([0.09, -1.0, 0.1, None, -0.75])
    untrained = RunData(run.folder, run.cells, run.metrics, run.clients, {**run.facts, "rounds": 0})
    assert not [*against_alone(untrained)]
