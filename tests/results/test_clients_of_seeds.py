"""What is said about clients is true of all seeds, or says which seeds it is about."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom as fl
from fedloom.experiment.progress import Progress
from fedloom.experiment.store import Store
from fedloom.experiment.worker_groups import WorkerGroup
from fedloom.results.badly_served import BadlyServed, in_short
from fedloom.results.clients_of_seeds import about_data
from fedloom.results.report_warnings import cautions
from fedloom.results.run_data import RunData
from fedloom.results.summary import table as on_screen
from tests.conftest import federation

# of each seed, how many examples of each of two classes each client has
HELD = {
    1: ((60, 0), (20, 20), (50, 50)),  # the first one has one label
    2: ((30, 30), (0, 1), (50, 50)),  # the second one has one label, one training example and nothing to test with
    3: ((30, 30), (60, 60), (60, 60)),
}
ALGORITHMS = {"fedavg": fl.FedAvg(lr=0.1), "scaffold": fl.Scaffold(lr=0.1)}


class Notes(Progress):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def drawn(seed: int) -> fl.Federation:
    labels = [np.repeat([0, 1], counts) for counts in HELD[seed]]
    y = np.concatenate(labels)
    x = np.random.default_rng(seed).normal(size=(len(y), 2)) + y[:, None]
    client = np.repeat(np.arange(len(labels)), [len(one) for one in labels])
    return fl.Federation.from_arrays(x.astype(np.float32), y, client=client, seed=seed)


@pytest.mark.parametrize("sizes", [(60, 760), (860, 760)])
def test_the_calibration_error_of_few_test_examples_is_doubted(sizes: tuple[int, ...], tmp_path: Path) -> None:
    task = fl.Task("logistic", args={"features": 16, "classes": 3}, metrics=["accuracy", "calibration_error"])
    result = fl.run(federation(sizes), task, fl.FedAvg(lr=0.1), 1, out=tmp_path / "run", backend="serial")
    run = RunData.read(result.folder)
    tested = [client["test"] for client in run.clients]
    assert (tested[0] < 150) == (sizes[0] == 60)
    assert tested[1] >= 150
    found = [text for text in cautions(run) if text.startswith("calibration_error is mostly too large")]
    assert len(found) == (sizes[0] == 60)
    for text in found:
        assert "at 1 of 2 clients (client-0), which have fewer than 150 test examples for its 15 bins" in text
        assert text.endswith("Look at the pooled number, which is from the examples of all clients at once.")


@pytest.fixture(scope="module")
def said_and_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    progress, folder = Notes(), tmp_path_factory.mktemp("runs") / "own-clients"
    task = fl.Task("logistic", args={"features": 2, "classes": 2}, metrics=["auroc", "accuracy"])
    fl.run(drawn, task, ALGORITHMS, 1, seeds=[1, 2, 3], out=folder, backend="serial", progress=progress)
    return progress.notes, folder


@pytest.fixture
def own(said_and_run: tuple[list[str], Path]) -> RunData:
    return RunData.read(said_and_run[1])


def beginning(run: RunData, words: str) -> str:
    (said,) = (text for text in cautions(run) if text.startswith(words))
    return said


def test_a_report_says_in_which_seeds_clients_have_too_little(own: RunData) -> None:
    assert not own.same_clients
    assert beginning(own, "Clients with only one label").endswith(": 1 of 3 in seeds 1 and 2.")
    assert beginning(own, "Clients with only one training example").endswith(": 1 of 3 in seed 2.")
    without = "Means over clients are without those that have no test examples: 1 of 3 in seed 2."
    assert without in cautions(own)
    assert without in about_data(own)
    assert beginning(own, "Clients with fewer than 10 test examples").endswith(": 1 of 3 in seed 1.")


def test_a_metric_that_clients_of_some_seeds_lack_is_named_with_these_seeds(own: RunData) -> None:
    assert beginning(own, "auroc is undefined at 1 of 3 clients in seed 1, because").endswith("leave them out.")
    assert "auroc is undefined at 1 of 3 clients in seed 1: means" in str(on_screen(own.result, "auroc").caption)


def test_a_metric_may_be_undefined_in_other_seeds_than_the_first(own: RunData, tmp_path: Path) -> None:
    with Store(shutil.copytree(own.folder, tmp_path / "run")) as store, store._transaction() as database:
        gone = "metric = 'auroc' AND cell IN (SELECT id FROM cells WHERE seed = {}) AND client = {}"
        database.execute(f"UPDATE client_metrics SET value = NULL WHERE {gone.format(3, 2)}")
    run = RunData.read(tmp_path / "run")
    assert "auroc is undefined at 1 of 3 clients in seeds 1 and 3, because" in beginning(run, "auroc is undefined")
    with Store(run.folder) as store, store._transaction() as database:
        database.execute("UPDATE client_metrics SET value = NULL WHERE metric = 'auroc'")
        database.execute(f"UPDATE client_metrics SET value = 0.5 WHERE {gone.format(3, 2)}")
    said = cautions(RunData.read(run.folder))  # nobody has it in the first seed
    assert not any("auroc is undefined at every client" in text for text in said)
    assert any(text.startswith("auroc is undefined at 3 of 3 clients in seed 1, 2 of 3 clients") for text in said)


def test_sizes_are_those_of_all_seeds(own: RunData) -> None:
    assert "clients have 1 to 72 training examples: a part" in beginning(own, "Algorithms weigh clients")


def test_a_run_says_which_seeds_it_is_about(said_and_run: tuple[list[str], Path]) -> None:
    notes, _ = said_and_run
    for said in (
        "Caution: 1 of 3 clients has only one label in seed 1: 0.",
        "Caution: 1 of 3 clients has no test examples in seed 2: 1.",
    ):
        assert said in notes
    assert any("clients have 24 to 60 training examples in seed 1: a part" in text for text in notes)


def test_the_clients_of_a_run_are_those_of_its_first_seed_whichever_is_built_first(tmp_path: Path) -> None:
    folder, group = tmp_path / "run", WorkerGroup.get

    def second_first(self: WorkerGroup, seed: int) -> Any:  # as where groups of workers run side by side
        group(self, 2)
        return group(self, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerGroup, "get", second_first)
        task = fl.Task("logistic", args={"features": 2, "classes": 2})
        fl.run(drawn, task, fl.FedAvg(lr=0.1), 1, seeds=[1, 2], out=folder, backend="serial")
    run = RunData.read(folder)
    assert [row["train"] for row in run.clients] == [36, 24, 60]
    assert run.facts["labels"]["counts"][0] == [60, 0]


def test_the_short_form_says_whose_clients_are_served_badly(own: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"fedavg": [BadlyServed(0, "accuracy", 0.1, 9.0, 0.5, None)]}
    monkeypatch.setattr("fedloom.results.badly_served.badly_served", lambda run: found)
    assert next(in_short(own)).startswith("Means hide clients that are served badly in seed 1: fedavg at 0.")


def test_a_run_of_an_earlier_version_is_about_its_first_seed(own: RunData, tmp_path: Path) -> None:
    with Store(shutil.copytree(own.folder, tmp_path / "run")) as store:
        store.set_fact("cautions about the data", ["1 of 3 clients has only one label: 0."])
        for seed in HELD:
            store.set_fact(f"clients of seed {seed}", None)
    found = cautions(RunData.read(tmp_path / "run"))
    assert "In seed 1: 1 of 3 clients has only one label: 0." in found
    assert "1 of 3 clients has fewer than 10 test examples in seed 1: their own numbers are coarse." in found
