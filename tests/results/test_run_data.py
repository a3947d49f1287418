"""A run folder as arrays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedloom as fl
from fedloom.errors import StoreError
from fedloom.experiment.store import Store
from fedloom.results import figures, tables
from fedloom.results.run_data import RunData
from tests.conftest import Dense, Logit, federation, two_classes


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a run folder"):
        RunData.read(tmp_path)


def test_labels_seeds_metrics_and_clients_come_from_the_folder(run: RunData) -> None:
    assert run.labels == ("fedavg", "local", "pooled")
    assert run.seeds == (1, 2)
    assert list(run.metrics) == ["accuracy", "loss"]  # the loss comes last
    assert run.main_metric == "accuracy"
    assert [run.client_name(client) for client in (0, 3, 4, 9)] == ["client-0", "client-3", "everyone", "9"]
    assert [run.is_pooled(label) for label in run.labels] == [False, False, True]
    assert list(run.data_fingerprints) == ["1", "2"]
    assert run.data_marks == {"data of all seeds": run.data_fingerprints["1"]}  # both seeds use the same data
    assert run.done
    assert run.finished_at == max(cell["finished"] for cell in run.cells.values())


def test_means_of_the_last_round_are_over_the_seeds_that_measured_a_client(run: RunData) -> None:
    found = run.last_round("fedavg", "post_fit", "accuracy")
    means = run.last_means("fedavg", "post_fit", "accuracy")
    for client in range(4):
        known = [dict(zip(one.clients.tolist(), one.values, strict=True)).get(client) for one in found.values()]
        known = [value for value in known if value is not None]
        assert means.get(client) == (pytest.approx(np.mean(known)) if known else None)
    assert run.last_means("fedavg", "universal", "no such metric") == {}


def test_a_pooled_model_has_seconds_and_no_bytes(run: RunData) -> None:
    costs = run.costs("pooled", 1)
    assert len(costs.seconds) == 5
    assert not costs.bytes_so_far.any()
    assert run.costs("fedavg", 1).bytes_so_far.all()
    stored = [dict(row, bytes_up=7, bytes_down=7) for row in run.rows("rounds", "pooled", 1)]  # as older versions did
    run._read["rounds", "pooled", 1] = stored
    assert not run.costs("pooled", 1).bytes_so_far.any()


def test_an_unknown_way_of_drawing_clients_is_not_guessed(tmp_path: Path) -> None:
    fl.run(federation([9, 8]), fl.Task(Dense), {"a": fl.FedAvg()}, rounds=1, out=tmp_path, backend="serial")
    read = RunData.read(tmp_path)
    assert read.sampling is None  # all clients take part
    other = RunData(tmp_path, read.cells, read.metrics, read.clients, {"description": {"cohort": {"unknown": 1}}})
    assert other.sampling is None


def test_the_pooled_model_is_measured_at_clients_like_the_others(run: RunData) -> None:
    """After round r it is what clients have before round r + 1; after the last one it is the final model."""
    after = run.client_values("pooled", 1, "post_fit", "accuracy")
    before = run.client_values("pooled", 1, "pre_fit", "accuracy")
    drawn = run.client_values("fedavg", 1, "post_fit", "accuracy")
    assert (after.rounds.tolist(), after.clients.tolist()) == (drawn.rounds.tolist(), drawn.clients.tolist())
    assert len(after) < len(before), "not everybody is drawn"
    known = dict(zip(zip(before.rounds.tolist(), before.clients.tolist(), strict=True), before.values, strict=True))
    for round, client, value in zip(after.rounds.tolist(), after.clients.tolist(), after.values, strict=True):
        assert round == 5 or value == known[round + 1, client]
    final = run.client_values("pooled", 1, "final", "accuracy")
    assert after.last_round().values.tolist() == final.values[after.last_round().clients].tolist()


def test_noise_of_differential_privacy_is_secret_and_masks_are_not_noise(run: RunData) -> None:
    tables = {"dp": {"epsilon": 1.0}, "example_dp": {"epsilon": 8.0}, "secure_aggregation": {"min_clients": 3}}
    found = {
        key: replace(run, facts={"description": {"privacy": {key: table}}}).has_secret_noise
        for key, table in tables.items()
    }
    assert found == {"dp": True, "example_dp": True, "secure_aggregation": False}
    assert not run.has_secret_noise


def test_a_class_is_named_in_tables_and_figures_and_numbered_in_files(tmp_path: Path) -> None:
    """A $ in a name starts no formula."""
    data = replace(two_classes(federation([40, 40], seed=3)), classes=("benign", "$x$ ill"))
    task = fl.Task(Logit, loss="bce", metrics=["recall_of_1", "f1"])
    fl.run(data, task, fl.FedAvg(lr=0.5), 2, out=tmp_path, backend="serial", seeds=(1, 2))
    run = RunData.read(tmp_path)
    assert [one.title for one in run.metrics.values()] == ["recall_of_1 ($x$ ill)", "f1", "loss"]
    titles = {table.name: table.title for table in tables.all_tables(run)}
    assert titles["overview_recall_of_1"] == "Results: recall_of_1 ($x$ ill)"
    drawn = figures.draw_all(run)
    assert any("($x$ ill)" in one.title for one in drawn)
    labels = {axes.get_ylabel() for one in drawn for axes in one.figure.axes}
    assert r"Test recall_of_1 (\$x\$ ill)" in labels
    unnamed = {**run.facts["labels"], "classes": ["0", "1"]}
    with Store(tmp_path) as store:
        store.set_fact("labels", unnamed)
    assert RunData.read(tmp_path).metric("recall_of_1").title == "recall_of_1"
