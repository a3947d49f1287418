"""The numbers that algorithms are compared by."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedloom as fl
from fedloom.experiment.store import Store
from fedloom.results import client_tables
from fedloom.results.comparisons import (
    Comparison,
    after_training_comparison,
    at_clients,
    comparisons,
    main_comparison,
    universal_comparison,
)
from fedloom.results.export import scalars
from fedloom.results.report_warnings import cautions
from fedloom.results.run_data import RunData
from fedloom.results.run_values import MetricInfo
from fedloom.results.summary import table as on_screen
from fedloom.results.table import show
from fedloom.results.tables import fairness
from tests.conftest import Dense, Logit, federation, two_classes


def test_titles_say_how_the_number_was_chosen() -> None:
    accuracy = MetricInfo("accuracy", True, True)
    assert Comparison("test", accuracy, {}).title == "accuracy, final model, own test"
    assert Comparison("post_fit_test", accuracy, {}, "best").way.endswith("best round (chosen on the same data)")
    assert Comparison("server_test", accuracy, {}, "last:3").way.endswith("mean of the last 3 rounds")


def test_the_main_comparison_is_the_global_model_on_test_data(run: RunData) -> None:
    main, universal = main_comparison(run), universal_comparison(run, "accuracy")
    assert main is not None
    assert universal is not None
    assert (main.key, main.metric.name, universal.key) == ("server_test", "accuracy", "universal")
    assert set(main.values) == {"fedavg", "pooled"}  # what has no global model is not on the server
    finals = {cell.seed: cell.final["universal_accuracy"] for cell in run.result.runs if cell.algorithm == "local"}
    assert universal.values["local"] == finals


def test_without_test_data_at_the_server_the_final_model_leads(tmp_path: Path) -> None:
    algorithms = {"fedavg": fl.FedAvg(lr=0.1), "local": fl.LocalOnly(lr=0.1), "pooled": fl.Pooled(lr=0.1)}
    data = two_classes(federation([30, 40], seed=2))
    fl.run(data, fl.Task(Logit, loss="bce"), algorithms, 2, out=tmp_path, backend="serial")
    main = main_comparison(RunData.read(tmp_path))
    assert main is not None
    assert main.title == "accuracy, final model, own test"  # what `predict` and `export` give
    assert set(main.values) == set(algorithms)


def test_the_best_round_and_the_last_rounds_of_the_pooled_model_are_at_clients(run: RunData) -> None:
    stats = run.client_values("pooled", 1, "post_fit", "accuracy").by_round()
    found = [at_clients(run, "pooled", 1, "post_fit_test", "accuracy", rule) for rule in ("final", "best", "last:2")]
    assert found == pytest.approx([stats.mean[-1], stats.mean.max(), stats.mean[-2:].mean()])


def test_where_only_the_cohort_is_measured_the_pooled_model_is_shown_for_it_too(tmp_path: Path) -> None:
    data = two_classes(federation([30, 40, 25, 35], seed=2))
    task = fl.Task(Logit, loss="bce", metrics=["accuracy", "auroc"])
    algorithms = {"fedavg": fl.FedAvg(lr=0.1), "pooled": fl.Pooled(lr=0.1)}
    cohort, evaluate = fl.Sampling(count=2), fl.Evaluation(clients="cohort")
    fl.run(data, task, algorithms, 3, cohort=cohort, evaluate=evaluate, out=tmp_path, backend="serial")
    run = RunData.read(tmp_path)
    for phase in ("pre_fit", "post_fit", "final"):
        ours, theirs = (run.client_values(label, 1, phase, "accuracy") for label in ("pooled", "fedavg"))
        assert len(ours) == len(theirs) > 0
        assert ours.clients.tolist() == theirs.clients.tolist(), phase
    # scores of the drawn clients alone are not known of the pooled model: it has no column where others are about them
    assert {m.key: set(m.values) for m in comparisons(run, "auroc")} == {
        **{key: {"fedavg", "pooled"} for key in ("post_fit_test", "pre_fit_test", "test")},
        "pooled_test": {"fedavg"},
        "pooled_post_fit_test": {"fedavg"},
        "pooled_pre_fit_test": {"fedavg"},
    }
    for cell in run.result.runs:
        assert "pooled_test_auroc" in cell.final
    assert at_clients(run, "pooled", 1, "pooled_test", "auroc", "final") is None


def test_without_one_model_there_is_no_number_on_all_tests_pooled(tmp_path: Path) -> None:
    """Each client's own model on its own tests says nothing about all tests, and would hide what sharing gains."""
    data = two_classes(federation([30, 40, 25], seed=2))
    algorithms = {
        "fedavg": fl.FedAvg(lr=0.1),
        "pooled": fl.Pooled(lr=0.1),
        "local": fl.LocalOnly(lr=0.1),
        "peer": fl.Peer(lr=0.1),
        "ditto": fl.Ditto(lr=0.1),
    }
    task = fl.Task(Logit, loss="bce", metrics=["accuracy", "auroc"])
    result = fl.run(data, task, algorithms, 2, out=tmp_path, backend="serial")
    for cell in result.runs:
        shared = cell.algorithm in ("fedavg", "pooled")
        assert "test_accuracy" in cell.final
        for key in ("pooled_test_accuracy", "pooled_pre_fit_test_accuracy", "pooled_test_auroc"):
            assert (key in cell.final) == shared, (cell.algorithm, key)
    assert not any(scalar.tag.startswith("pooled/final") for scalar in scalars(RunData.read(tmp_path), "local", 1))
    found = {one.way: set(one.values) for one in comparisons(RunData.read(tmp_path), "auroc")}
    assert found["final model, all tests pooled"] == {"fedavg", "pooled"}
    assert found["after local training, own tests pooled"] >= {"fedavg", "local", "peer", "ditto"}


def test_titles_say_where_numbers_are_about_the_drawn_clients_only(drawn: Path, run: RunData) -> None:
    found = {one.key: one.way for one in comparisons(RunData.read(drawn), "accuracy")}
    assert found == {
        "test": "final model, own test",
        "post_fit_test": "after local training, own test (drawn clients)",
        "pre_fit_test": "before local training, own test",
        "universal": "after local training, universal test (drawn clients)",
    }
    everybody = replace(run, facts={**run.facts, "description": {**run.description, "cohort": {}}})
    assert not any(one.drawn for one in comparisons(everybody, "accuracy"))


def test_after_local_training_only_the_same_clients_are_compared(drawn: Path, tmp_path: Path) -> None:
    compared = after_training_comparison(RunData.read(drawn), "accuracy")
    assert compared is not None
    assert {label: set(values) for label, values in compared.values.items()} == {"fedavg": {1, 2}, "fedprox": {1, 2}}
    folder = tmp_path / "made"
    shutil.copytree(drawn, folder)
    with Store(folder) as store, store._transaction() as database:  # in seed 1, fedprox has one client less
        cell = "cell = (SELECT id FROM cells WHERE label = 'fedprox' AND seed = 1)"
        lost = f"SELECT MIN(client) FROM client_metrics WHERE {cell} AND phase = 'post_fit' AND round = 3"
        database.execute(f"DELETE FROM client_metrics WHERE {cell} AND phase = 'post_fit' AND client = ({lost})")
    compared = after_training_comparison(RunData.read(folder), "accuracy")
    assert compared is not None
    assert {label: set(values) for label, values in compared.values.items()} == {"fedavg": {2}, "fedprox": {2}}


def test_a_metric_that_no_client_defines_is_named_where_another_one_leads(tmp_path: Path) -> None:
    def nothing(outputs: object, labels: object) -> float:
        return float("nan")

    data = two_classes(federation([30, 40], seed=2))
    task = fl.Task(Logit, loss="bce", metrics=[nothing, "accuracy"])
    result = fl.run(data, task, fl.FedAvg(lr=0.1), 1, out=tmp_path, backend="serial")
    assert "Undefined or withheld at every client: nothing." in str(on_screen(result).caption)
    assert any(text.startswith("nothing is undefined at every client") for text in cautions(RunData.read(tmp_path)))


def test_algorithms_are_compared_at_the_clients_where_all_have_a_value(tmp_path: Path) -> None:
    def precision(outputs: np.ndarray, labels: np.ndarray) -> float:  # undefined where nothing is predicted
        chosen = labels[outputs.reshape(-1) > 0]
        return float(chosen.mean()) if len(chosen) else float("nan")

    data = two_classes(federation([30, 40, 25], seed=2))
    task = fl.Task(Logit, loss="bce", metrics=[precision])
    algorithms = {"slow": fl.FedAvg(lr=1e-3), "fast": fl.FedAvg(lr=0.1)}
    fl.run(data, task, algorithms, 1, seeds=[0], out=tmp_path, backend="serial")
    with Store(tmp_path) as store, store._transaction() as database:
        cell = "cell = (SELECT id FROM cells WHERE label = 'slow') AND phase = 'final' AND client = 1"
        database.execute(f"UPDATE client_metrics SET value = NULL WHERE {cell} AND metric = 'precision'")
        other = cell.replace("slow", "fast")
        database.execute(f"UPDATE client_metrics SET value = 0.25 WHERE {other} AND metric = 'precision'")
    run = RunData.read(tmp_path)
    main = main_comparison(run)
    assert main is not None
    at = {label: run.client_values(label, 0, "final", "precision") for label in algorithms}
    assert {label: known.clients.tolist() for label, known in at.items()} == {"slow": [0, 2], "fast": [0, 1, 2]}
    shared = at["fast"].values[[0, 2]].mean()
    assert main.values == {"slow": {0: at["slow"].values.mean()}, "fast": {0: shared}}
    assert main.common == {0: 2}
    assert "where all algorithms have a value" in main.title
    found = " ".join(cautions(run))
    assert "Comparisons are over the clients at which all algorithms have a value: 2 (seed 0)" in found
    assert "lack a class" not in found
    screen = on_screen(run.result)
    assert [*screen.columns[-1].cells] == [show(value, "percent") for value in (at["slow"].values.mean(), shared)]
    assert "precision is undefined at other clients with one algorithm than with another" in str(screen.caption)
    assert "undefined at 1 of 3" not in str(screen.caption)
    (fair,) = fairness(run)
    assert fair.title.startswith("Fairness, last rounds")
    assert (
        "Jain's index are over the clients where all algorithms have a value; the curve is over whatever" in fair.note
    )
    assert [row[1] for row in fair.rows] == [at["slow"].values.min(), at["fast"].values[[0, 2]].min()]


def test_tables_over_clients_are_about_those_where_all_algorithms_have_a_value(tmp_path: Path) -> None:
    data, task = two_classes(federation([30, 40, 25], seed=2)), fl.Task(Logit, loss="bce", metrics=["auroc"])
    algorithms = {"one": fl.FedAvg(lr=0.1), "two": fl.LocalOnly(lr=0.2)}
    evaluate = fl.Evaluation(universal=True)
    fl.run(data, task, algorithms, 1, seeds=[0], out=tmp_path, backend="serial", evaluate=evaluate)
    with Store(tmp_path) as store, store._transaction() as database:
        cell = "cell = (SELECT id FROM cells WHERE label = 'one') AND client = 1"
        database.execute(f"UPDATE client_metrics SET value = NULL WHERE {cell} AND metric = 'auroc'")
    run, of_its_own = RunData.read(tmp_path), "Each row is over the clients where that algorithm has a value in"
    known = run.client_values("two", 0, "post_fit", "auroc").values
    (after,) = (table for table in client_tables.summary(run, "auroc") if table.name.endswith("post_fit"))
    assert after.title.endswith("(clients where all algorithms have a value)")
    assert [after.rows[0][2], after.rows[3][2]] == [known[[0, 2]].mean(), known[[0, 2]].max()]
    universal = next(one for one in comparisons(run, "auroc") if one.key == "universal")
    assert universal.values["two"] == {0: run.client_values("two", 0, "universal", "auroc").values[[0, 2]].mean()}
    (table,) = client_tables.universal_test(run, "auroc")
    average = next(row for row in table.rows if row[0] == "Average")
    assert average[2] == universal.values["two"][0]
    assert "below the clients are over the clients where all algorithms have a value" in table.note
    assert all(row[2] is not None for row in table.rows)  # a client's own number stays
    tables = {table.name: table for table in client_tables.all_tables(run, "auroc")}
    assert of_its_own in tables["round_stats_auroc"].note
    assert of_its_own not in tables["user_stats_auroc"].note
    (by_loss,) = client_tables.long_table(run, "loss", "round", int)
    assert of_its_own not in by_loss.note


def test_tables_over_the_same_clients_say_nothing_of_others(tmp_path: Path) -> None:
    data, task = two_classes(federation([30, 40, 25], seed=2)), fl.Task(Logit, loss="bce", metrics=["auroc"])
    algorithms = {"one": fl.FedAvg(lr=0.1), "all": fl.Pooled(lr=0.1)}
    evaluate = fl.Evaluation(universal=True)
    fl.run(data, task, algorithms, 1, seeds=[0], out=tmp_path, backend="serial", evaluate=evaluate)
    run = RunData.read(tmp_path)
    found = [*client_tables.all_tables(run, "auroc"), *fairness(run)]
    assert {"universal_test_auroc", "round_stats_auroc", "fairness"} <= {table.name for table in found}
    assert not any("where all" in f"{table.title} {table.note}" for table in found)


def test_algorithms_that_measured_other_clients_lack_nothing_there(tmp_path: Path) -> None:
    data, task = two_classes(federation([30, 40, 25], seed=2)), fl.Task(Logit, loss="bce", metrics=["precision"])
    algorithms = {"one": fl.FedAvg(lr=0.1), "two": fl.FedAvg(lr=0.2)}
    fl.run(data, task, algorithms, 1, seeds=[0], out=tmp_path, backend="serial")
    with Store(tmp_path) as store, store._transaction() as database:
        cell = "cell = (SELECT id FROM cells WHERE label = '{}') AND phase = 'final' AND client = {}"
        database.execute(f"DELETE FROM client_metrics WHERE {cell.format('two', 1)}")  # it drew others
        database.execute(
            f"UPDATE client_metrics SET value = NULL WHERE {cell.format('one', 1)} AND metric = 'precision'"
        )
    main = main_comparison(RunData.read(tmp_path))
    assert main is not None
    assert main.common == {}
    with Store(tmp_path) as store, store._transaction() as database:  # no finite loss anywhere, and a value that lacks
        database.execute(
            f"UPDATE client_metrics SET value = NULL WHERE {cell.format('one', '0')} AND metric = 'precision'"
        )
        database.execute("UPDATE client_metrics SET value = NULL WHERE metric = 'loss' AND phase = 'final'")
    assert main_comparison(RunData.read(tmp_path)) is not None


def test_a_run_that_only_validates_is_compared_by_that(tmp_path: Path) -> None:
    evaluate = fl.Evaluation(splits=("validation",))
    algorithms = {"slow": fl.FedAvg(lr=0.01), "fast": fl.FedAvg(lr=0.3)}
    result = fl.run(
        federation([30] * 3), fl.Task(Dense), algorithms, 1, seeds=2, backend="serial", out=tmp_path, evaluate=evaluate
    )
    run = RunData.read(tmp_path)
    (one,) = comparisons(run, "accuracy")
    assert one.way == "final model, own validation data"
    for cell in result.runs:
        assert one.values[cell.algorithm][cell.seed] == cell.final["validation_accuracy"]
    shown = on_screen(result)
    assert shown.caption == "Means over clients, each on its own validation split: nothing was tested."
