"""A mean over clients does not hide clients at which a model is worse than guessing, or than their own models."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom as fl
from fedloom.data.describe import label_counts
from fedloom.experiment.store import OWN_MODELS, Store
from fedloom.results import report
from fedloom.results.badly_served import badly_served, in_short, in_words
from fedloom.results.report_warnings import about_numbers, cautions
from fedloom.results.run_data import RunData
from tests.conftest import Logit, federation, two_classes

METRICS = ["auroc", "recall"]


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which one of four clients has the labels the other way round."""
    folder = tmp_path_factory.mktemp("turned")
    data = two_classes(federation([200, 200, 200, 200], seed=3))
    labels = data.y.clone()
    labels[data.offsets[3] :] = 1 - labels[data.offsets[3] :]
    algorithms = {"local": fl.LocalOnly(lr=0.5), "fedavg": fl.FedAvg(lr=0.5)}
    task = fl.Task(Logit, loss="bce", metrics=METRICS)
    fl.run(replace(data, y=labels), task, algorithms, 3, out=folder, backend="serial")
    return folder


def changed(folder: Path, to: Path, **values: float) -> RunData:
    """A copy of a run in which `fedavg` ends with these values of a metric at client-3, and with 0.9 elsewhere."""
    shutil.copytree(folder, to)
    with Store(to) as store, store._transaction() as database:
        of_fedavg = "phase = 'final' AND cell IN (SELECT id FROM cells WHERE label = 'fedavg') AND metric = ?"
        for metric in METRICS:
            database.execute(f"UPDATE client_metrics SET value = 0.9 WHERE {of_fedavg}", (metric,))
        for metric, value in values.items():
            where = f"{of_fedavg} AND client = 3"
            database.execute(f"UPDATE client_metrics SET value = ? WHERE {where}", (value, metric))
    return RunData.read(to)


def test_a_client_where_the_model_is_worse_than_guessing_is_named_with_its_numbers(turned: Path) -> None:
    run = RunData.read(turned)
    (said,) = in_words(run)
    assert said.startswith(
        "fedavg serves some clients badly (final model), whatever the mean over clients says: client-3"
    )
    assert "guessing has 0.5, its own model 0." in said
    assert f"{run.clients[3]['test']} test examples" in said
    assert said in cautions(run)
    assert said in about_numbers(run)  # what the terminal shows
    (short,) = in_short(run)
    assert short == "Means hide clients that are served badly: fedavg at client-3. See the cautions for numbers."
    assert "fedavg at client-3" in report.html(run, [], [])


def test_without_models_of_clients_the_comparison_is_with_guessing(turned: Path) -> None:
    run = RunData.read(turned)
    without = replace(run, cells={cell: row for cell, row in run.cells.items() if cell[0] == "fedavg"})
    (said,) = in_words(without)
    assert "guessing has 0.5, 40 test examples" in said
    on_network = {name: value for name, value in without.facts.items() if name != "labels"}
    assert badly_served(replace(without, facts=on_network))["fedavg"][0].chance == 0.5


def test_guessing_is_about_the_examples_that_the_metric_is_measured_on() -> None:
    """Here all examples are half of each class, and the test examples are not."""
    labels = np.tile([0, 1], 200)
    data = fl.Federation.from_arrays(np.zeros((400, 1)), labels, client=np.arange(400) // 100, split=[0.5, 0, 0.5])
    held = label_counts(data)
    assert held is not None
    tested = [np.bincount(data.y[data.indices(client, "test")], minlength=2).tolist() for client in range(4)]
    assert held["counts"] == [[50, 50]] * 4
    assert held["tested"] == tested != [[25, 25]] * 4


def test_guesses_are_those_of_test_examples(turned: Path, tmp_path: Path) -> None:
    run = changed(turned, tmp_path / "made", auroc=0.9, recall=0.9)
    with Store(tmp_path / "made") as store, store._transaction() as database:
        database.execute("UPDATE client_metrics SET metric = 'accuracy' WHERE metric = 'auroc'")
        of_fedavg = "cell IN (SELECT id FROM cells WHERE label = 'fedavg')"
        database.execute(f"UPDATE client_metrics SET value = 0.6 WHERE {of_fedavg} AND metric = 'accuracy'")
    about = {"classes": ["a", "b"], "counts": [[190, 10]] * 4, "tested": [[20, 20]] * 3 + [[36, 4]]}
    run = RunData.read(tmp_path / "made")
    run = replace(
        run,
        metrics={"accuracy": replace(run.metrics["auroc"], name="accuracy")},
        facts={**run.facts, "labels": about},
        cells={cell: row for cell, row in run.cells.items() if cell[0] == "fedavg"},
    )
    assert [(one.client, one.chance) for one in badly_served(run)["fedavg"]] == [(3, 0.9)]
    (said,) = in_words(run)  # students take guessing for choosing among all classes alike
    assert "always predicting the client's most frequent label has 90.00 %" in said
    assert "guessing" not in said
    of_all = replace(run, facts={**run.facts, "labels": {"classes": ["a", "b"], "counts": [[190, 10]] * 4}})
    assert {one.chance for one in badly_served(of_all)["fedavg"]} == {0.95}  # a run of an earlier version


def test_few_test_examples_are_no_evidence(turned: Path) -> None:
    run = RunData.read(turned)
    assert list(in_words(replace(run, clients=tuple({**one, "test": 4} for one in run.clients)))) == []
    assert list(in_words(replace(run, clients=tuple({**one, "test": 0} for one in run.clients)))) == []


@pytest.mark.parametrize(
    ("values", "metrics"),
    [
        ({"auroc": 0.45}, []),  # chance alone gives this
        ({"auroc": 0.1}, ["auroc"]),
        ({"recall": 0.0}, ["recall"]),  # there is no guess to compare it with, but the client's own model finds most
        ({"auroc": 0.1, "recall": 0.0}, ["auroc"]),  # a client is named once
    ],
)
def test_a_client_is_named_with_the_first_metric_that_shows_it(
    turned: Path, tmp_path: Path, values: dict[str, float], metrics: list[str]
) -> None:
    run = changed(turned, tmp_path / "made", **values)
    with Store(tmp_path / "made") as store, store._transaction() as database:
        of_local = "phase = 'final' AND cell IN (SELECT id FROM cells WHERE label = 'local')"
        database.execute(f"UPDATE client_metrics SET value = 0.6 WHERE {of_local} AND metric = 'auroc'")
        database.execute(f"UPDATE client_metrics SET value = 0.9 WHERE {of_local} AND metric = 'recall'")
    assert [one.metric for one in badly_served(run).get("fedavg", [])] == metrics


def test_cells_that_are_not_finished_are_not_judged(turned: Path) -> None:
    run = RunData.read(turned)
    assert not badly_served(replace(run, cells={cell: {**row, "status": "running"} for cell, row in run.cells.items()}))


def test_many_clients_and_algorithms_do_not_flood(turned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunData.read(turned)
    (one,) = badly_served(run)["fedavg"]
    many: dict[str, Any] = {label: [one] * 5 for label in "abcde"}
    run = replace(run, cells={(label, 1): row for label, row in zip("abcde", [*run.cells.values()] * 3, strict=False)})
    monkeypatch.setattr("fedloom.results.badly_served.badly_served", lambda run: many)
    said = list(in_words(run))
    assert len(said) == 4
    assert all(text.count("client-3") == 3 and " and 2 more." in text for text in said[:3])
    assert said[3] == "d, e serve some clients badly, too: see the table of clients."
    assert next(in_short(run)).count("client-3") == 9


def test_an_algorithm_that_shares_is_not_the_clients_own(turned: Path) -> None:
    """Ditto's clients have models of their own, too, but these learn from others."""
    run = RunData.read(turned)
    assert "fedavg" in badly_served(replace(run, facts={**run.facts, OWN_MODELS: ["local", "fedavg"]}))
