"""Runs that are not measured in every round: all algorithms count after the same rounds, the pooled model too."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

import fedloom as fl
from fedloom.experiment.experiment_file import EvaluateTable
from fedloom.federation.sampling import Sampling
from fedloom.results import headline
from fedloom.results.comparisons import comparisons
from fedloom.results.figures import _at_rounds, heat_map
from fedloom.results.run_data import RunData
from fedloom.results.tables import fairness, targets
from tests.conftest import Logit, federation, two_classes
from tests.results.helpers import named

ALGORITHMS = {"pooled": fl.Pooled(lr=0.1), "fedavg": fl.FedAvg(lr=0.1)}
MEASURED = [1, 3, 6]


def trained(out: Path, rounds: int = 6, every: int = 3, **settings: object) -> RunData:
    evaluate = EvaluateTable(every=every, target={"accuracy": 0.001}, **settings)  # type: ignore[arg-type]
    data, task = two_classes(federation([30, 40, 20, 30], seed=2)), fl.Task(Logit, loss="bce")
    cohort = Sampling(count=2)
    fl.run(data, task, ALGORITHMS, rounds, seeds=[1, 2], cohort=cohort, evaluate=evaluate, out=out, backend="serial")
    return RunData.read(out)


@pytest.mark.parametrize("clients", ["all", "cohort"])
def test_the_pooled_model_is_measured_after_the_rounds_of_the_others_at_their_clients(
    tmp_path: Path, clients: str
) -> None:
    run, every_round = trained(tmp_path / "a", clients=clients), trained(tmp_path / "b", every=1, clients=clients)
    for seed in run.seeds:
        for phase in ("pre_fit", "post_fit", "final"):
            ours, theirs = (run.client_values(label, seed, phase, "loss") for label in ("pooled", "fedavg"))
            assert [*zip(ours.rounds, ours.clients, strict=True)] == [*zip(theirs.rounds, theirs.clients, strict=True)]
            all_rounds = every_round.client_values("pooled", seed, phase, "loss")
            here = all_rounds.keep(np.isin(all_rounds.rounds, ours.rounds))
            assert ours.values.tolist() == here.values.tolist()  # the same models at the same clients
        assert headline.curve(run, "pooled", seed, "accuracy")[0].tolist() == MEASURED


@pytest.mark.parametrize("rule", ["best", "last:2"])
def test_the_headline_of_the_pooled_model_is_about_measured_rounds(tmp_path: Path, rule: str) -> None:
    run = trained(tmp_path, headline=rule, clients="all")
    for cell in (one for one in run.result.runs if one.algorithm == "pooled"):
        with sqlite3.connect(tmp_path / "run.db") as database:
            query = """SELECT t.round, avg(value) FROM client_metrics t JOIN cells ON cells.id = t.cell
                WHERE label = 'pooled' AND seed = ? AND phase = 'pre_fit' AND metric = 'loss' AND split = 'test'
                GROUP BY t.round"""
            before = dict(database.execute(query, (cell.seed,)).fetchall())
        assert sorted(before) == [1, 2, 3, 4, 6]
        shown = {"best": min, "last:2": lambda values: sum(values[-2:]) / 2}[rule]
        assert cell.headline["pre_fit_test_loss"] == pytest.approx(shown([before[round] for round in MEASURED]))
        after = [before[2], before[4], cell.final["test_loss"]]
        assert cell.headline["post_fit_test_loss"] == pytest.approx(shown(after))
        assert cell.final["pre_fit_test_loss"] == pytest.approx(before[6])


def test_a_run_that_gets_more_rounds_still_knows_the_pooled_model_after_its_former_end(tmp_path: Path) -> None:
    trained(tmp_path, rounds=5)
    run = trained(tmp_path, rounds=12, every=3)
    curves = [headline.curve(run, label, 1, "accuracy")[0].tolist() for label in ALGORITHMS]
    assert curves == [[1, 3, 5, 6, 9, 12]] * 2


def test_tables_say_where_rows_are_not_about_the_same_rounds(tmp_path: Path) -> None:
    run = trained(tmp_path)
    for table in (*targets(run), *fairness(run)):
        assert "different rounds" not in table.note
    (table,) = targets(run)
    assert [row[-1] for row in table.rows] == [1.0, 1.0]
    with sqlite3.connect(tmp_path / "run.db") as database:  # as earlier versions measured
        database.execute("DELETE FROM client_metrics WHERE phase = 'pre_fit' AND round IN (2, 4)")
    old = RunData.read(tmp_path)
    assert headline.curve(old, "pooled", 1, "accuracy")[0].tolist() == [6]
    for table in (*targets(old), *fairness(old)):
        assert "measured after different rounds (pooled after 6; fedavg after 1, 3, 6)" in table.note
    overview_note = named(RunData.read(tmp_path), "overview_accuracy").note
    assert "different rounds" not in overview_note  # final numbers are about the last one
    (table,) = targets(old)
    assert [row[-1] for row in table.rows] == [None, None]  # no ratio of rounds that nobody can compare


def test_the_last_rounds_are_called_measured_rounds_if_others_were_not(tmp_path: Path) -> None:
    """The last three of rounds 1, 3 and 6 are not rounds 4 to 6."""
    (sparse,), (dense,) = fairness(trained(tmp_path / "a")), fairness(trained(tmp_path / "b", every=1))
    assert "last 3 measured rounds" in sparse.columns
    assert "the mean of the last 3 rounds that were measured" in sparse.note
    assert "last 6 rounds" in dense.columns
    ways = [
        comparisons(trained(tmp_path / f"last {every}", every=every, headline="last:2"), "accuracy") for every in (1, 3)
    ]
    for some, said in zip(ways, ("mean of the last 2 rounds", "mean of the last 2 measured rounds"), strict=True):
        assert {one.way.rpartition(", ")[2] for one in some if "mean of" in one.way} == {said}


def test_the_map_of_clients_has_a_column_where_a_round_was_measured(tmp_path: Path) -> None:
    drawn = heat_map(trained(tmp_path), "accuracy")
    assert drawn is not None
    for axes in drawn.figure.axes[:2]:
        assert axes.get_xlim() == (0.5, 6.5)
        assert axes.get_xticks().tolist() == MEASURED
    values = np.array([[0.1, 0.3, 0.6]])
    columns = _at_rounds(np.array(MEASURED), np.array(MEASURED), values)
    # round 1 until 2, round 3 until 4.5, round 6 until 6.5, in halves
    assert columns.tolist() == [[0.1] * 3 + [0.3] * 5 + [0.6] * 4]
    columns = _at_rounds(np.array(MEASURED), np.array([6]), values[:, 2:])  # another panel has the other rounds
    assert np.isnan(columns[0, :8]).all()
    assert columns[0, 8:].tolist() == [0.6] * 4
    consecutive = np.array([2, 3, 4])
    assert _at_rounds(consecutive, consecutive, values).tolist() == values.tolist()
