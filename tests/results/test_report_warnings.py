"""Cautions are about what really happened."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom as fl
from fedloom.experiment.experiment_file import parse
from fedloom.experiment.plan import Plan
from fedloom.experiment.run import run_plan
from fedloom.experiment.store import Store
from fedloom.results import report_warnings
from fedloom.results.report_warnings import about_numbers, cautions
from fedloom.results.run_data import RunData
from fedloom.results.run_values import ClientValues
from tests.conftest import Logit, federation, two_classes
from tests.results.helpers import named, with_labels


def with_cells(run: RunData, **changes: Any) -> RunData:
    """The same run with the first cell changed."""
    first = next(iter(run.cells))
    return replace(run, cells={**run.cells, first: {**run.cells[first], **changes}})


def with_description(run: RunData, **changes: Any) -> RunData:
    return replace(run, facts={**run.facts, "description": {**run.description, **changes}})


def test_the_small_comparison_has_few_seeds_one_partition_and_small_test_splits(run: RunData) -> None:
    found = cautions(run)
    assert any(text.startswith("2 seeds: intervals rest on few numbers") for text in found)
    assert any(text.startswith("All seeds share one partition and one split: ") for text in found)
    assert any(
        "which clients take part and the order of batches, and say nothing about other data" in text for text in found
    )
    fixed = {"task": {**run.description["task"], "seed": 1}}
    (said,) = [text for text in cautions(with_description(run, cohort={}, **fixed)) if text.startswith("All seeds")]
    assert said == (
        "All seeds share one partition, one split and one set of initial weights: intervals are about the order of "
        'batches, and say nothing about other data. Set seed = "run" in [data] and [task] to vary this too.'
    )
    (said,) = [
        text
        for text in cautions(with_description(run, cohort={}, privacy={"dp": {"epsilon": 1.0}}, **fixed))
        if text.startswith("All seeds")
    ]
    assert "intervals are about the noise of differential privacy and the order of batches, and say nothing" in said
    other_data = {f"data of seed {seed}": f"data {seed}" for seed in run.seeds}
    varied = with_description(replace(run, facts={**run.facts, **other_data}), cohort={}, **fixed)
    (said,) = [text for text in cautions(varied) if text.startswith("All seeds")]
    assert said == (
        "All seeds share one set of initial weights: intervals are about other splits and the order of batches. "
        'Set seed = "run" in [task] to vary this too.'
    )
    by_column = cautions(with_description(run, data={"split_column": "part"}))
    assert any("The column 'part' fixes the split." in text for text in by_column)
    assert "4 of 4 clients have fewer than 10 test examples: their own numbers are coarse." in found
    sizes = [{**client, "test": 5 if place == 0 else 50} for place, client in enumerate(run.clients)]
    assert any(text.startswith("1 of 4 clients has fewer than 10") for text in cautions(replace(run, clients=sizes)))
    assert not any("not finished" in text.lower() or "secure aggregation" in text for text in found)


@pytest.mark.parametrize(
    ("changes", "caution"),
    [
        ({"status": "failed", "error": "Boom."}, "fedavg (seed 1) failed after 5 rounds: Boom."),
        ({"status": "stopped"}, "Not finished, and left out of comparisons: fedavg (seed 1)."),
    ],
)
def test_cells_that_are_not_finished_come_first(run: RunData, changes: dict[str, str], caution: str) -> None:
    assert cautions(with_cells(run, **changes))[0] == caution


def test_one_seed_says_nothing_about_chance(run: RunData) -> None:
    one = replace(run, cells={cell: row for cell, row in run.cells.items() if cell[1] == 1})
    assert any(text.startswith("One seed: ") for text in cautions(one))


def test_a_run_that_stops_at_a_target_and_one_over_a_network_say_so(run: RunData) -> None:
    assert any("Runs end when" in text for text in cautions(with_description(run, evaluate={"stop": "target"})))
    networked = replace(run, facts={**run.facts, "network": {"agents": 4}})
    assert cautions(networked)[-1].startswith("The run was federated without secure aggregation")


def test_rounds_that_did_not_count_and_updates_that_were_not_finite_are_counted(
    comparison: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    shutil.copytree(comparison, folder)
    with Store(folder) as store, store._transaction() as database:
        (cell,) = database.execute("SELECT id FROM cells WHERE label = 'local' AND seed = 2").fetchone()
        database.execute("UPDATE rounds SET complete = 0 WHERE cell = ? AND round = 2", (cell,))
        for round, client in ((1, 0), (2, 0), (2, 3)):
            row = (cell, round, client, "left_out", client, 1.0)
            database.execute("INSERT INTO public_numbers VALUES (?, ?, ?, ?, ?, ?)", row)
    found = cautions(RunData.read(folder))
    why = "left out updates that were not finite, or made the model so"
    assert f"local (seed 2) {why}: client-0 (2 rounds), client-3 (1 round)." in found
    assert any(text.startswith("local (seed 2): 1 of 5 rounds did not count") for text in found)


def test_a_loss_that_rises_far_above_its_lowest_value_is_named(comparison: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    shutil.copytree(comparison, folder)
    with Store(folder) as store, store._transaction() as database:
        database.execute("UPDATE server_metrics SET value = 1 + (round = 5) * 2 WHERE metric = 'loss'")
    found = cautions(RunData.read(folder))
    said = "fedavg, pooled may diverge or overfit: the test loss of the global model ended 3.0 (seed 1), 3.0 (seed 1)"
    assert sum(text.startswith(said) for text in found) == 1
    assert any(text.startswith(said) for text in about_numbers(RunData.read(folder)))  # the terminal shows these


def test_with_drawn_clients_each_is_compared_with_itself(run: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, clients = np.repeat(np.arange(1, 7), 2), np.array([0, 1, 2, 3] * 3)  # 0 and 1, then 2 and 3, and again
    losses = np.where(clients < 2, 0.2, 2.0)  # clients 2 and 3 have the higher one in every round
    known = ClientValues(rounds, clients, losses)
    monkeypatch.setattr(RunData, "leaves_out_clients", lambda self, phase: True)
    monkeypatch.setattr(RunData, "client_values", lambda self, *given: known)

    def at_clients() -> dict[int, tuple[float, float]]:
        return dict(report_warnings._losses(run, "fedavg"))[" after local training"]

    assert at_clients() == {1: (2.0, 1.0), 2: (2.0, 1.0)}
    known = ClientValues(rounds, clients, losses * np.where(rounds == 6, 3.0, 1.0))
    assert at_clients()[1] == pytest.approx((6.0, 3.0))


def test_a_loss_that_is_absurd_from_the_first_round_on_is_named(comparison: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    shutil.copytree(comparison, folder)
    with Store(folder) as store, store._transaction() as database:
        database.execute("UPDATE server_metrics SET value = 2e8 WHERE metric = 'loss'")
    run = with_labels(RunData.read(folder), [[1, 1, 1]])
    said = (
        "fedavg, pooled diverged: the test loss of the global model ended at 2e+08 (seed 1), 2e+08 (seed 1), and "
        "guessing all classes alike has 1.1."
    )
    assert any(text.startswith(said) for text in about_numbers(with_description(run, task={"loss": "cross_entropy"})))
    for loss in ("mse", "file.py:own"):  # such a loss may be in any unit
        assert not any(" diverged: " in text for text in cautions(with_description(run, task={"loss": loss})))


@pytest.mark.parametrize("server", ["none", 0.1])
def test_clients_that_diverge_are_named_whether_the_server_has_test_data_or_not(tmp_path: Path, server: Any) -> None:
    """At the server, the mean of the clients' models has not even ten times the loss of guessing."""
    generator = np.random.default_rng(2)
    rows = [f"{'abcd'[n % 4]},{generator.normal():.3f},{generator.choice(['no', 'yes'])}" for n in range(160)]
    (tmp_path / "wards.csv").write_text("\n".join(["ward,x,sick", *rows]))
    data = {"source": "csv", "path": str(tmp_path / "wards.csv"), "client": "ward", "label": "sick", "server": server}
    tables = {"task": {"model": "logistic"}, "train": {"lr": 30.0, "batch_size": 5}, "algorithm": {"fedavg": {}}}
    run_plan(Plan.of(parse({"rounds": 5, "data": data, **tables, "run": {"backend": "serial"}})), tmp_path / "run")
    run = RunData.read(tmp_path / "run")
    assert run.has_server_test == (server != "none")
    (said,) = report_warnings._diverged(run)
    assert said.startswith("fedavg diverged: the test loss after local training ended at ")
    assert said.partition(" ended at ")[2].split(",")[0] == f"{run.summary('fedavg', 1)['post_fit_test_loss']:.3g}"


def ending(losses: Any) -> Any:
    """What `_losses` gives, with a global model that has these losses in seed 1, 2, …."""
    return lambda *_: [(" of the global model", {seed: (loss, 1.0) for seed, loss in enumerate(losses, 1)})]


def test_a_loss_above_guessing_blames_the_noise_of_a_private_run_and_not_the_rate(run: RunData) -> None:
    private = with_description(
        with_labels(run, [[1, 1, 1]]), task={"loss": "cross_entropy"}, privacy={"dp": {"clip": 1.0}}
    )

    def said(run: RunData, *losses: float) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(report_warnings, "_losses", ending(losses))
            return [*report_warnings._diverged(run)]

    for loss in (1.2, 2e8):  # three classes: ln 3 is 1.1
        (text,) = said(private, loss)
        assert "guessing all classes alike has 1.1. The noise of differential privacy may hide what is learnt" in text
    assert said(private, 1.0) == []
    assert "diverged" in said(with_description(private, privacy={}), 2e8)[0]
    # noise is about the mean over seeds, divergence about the worst of them
    assert said(private, 1.0, 1.15) == []
    (text,) = said(private, 1.0, 1.4)
    assert "learnt little: the test loss of the global model ended at 1.2 (mean over 2 seeds), 1.2 (mean" in text
    (text,) = said(with_description(private, privacy={}), 0.5, 20.0)
    assert "diverged: the test loss of the global model ended at 20 (seed 2), 20 (seed 2)" in text


def test_of_two_losses_the_one_that_ended_worse_is_named_with_its_seed(run: RunData) -> None:
    about = with_description(with_labels(run, [[1, 1, 1]]), task={"loss": "cross_entropy"}).of_algorithms(["fedavg"])
    ends = [
        (" of the global model", {1: (0.2, 4.0), 2: (0.1, 2.0)}),
        (" after local training", {1: (0.2, 1.0), 2: (30.0, 1.0)}),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_warnings, "_losses", lambda *_: ends)
        (text,) = report_warnings._diverged(about)
        assert text.startswith("fedavg diverged: the test loss after local training ended at 30 (seed 2), and guessing")
        ends[1][1][2] = (0.2, 1.0)
        (text,) = report_warnings._diverged(about)
    assert text.startswith("fedavg may diverge or overfit: the test loss of the global model ended 4.0 (seed 1) times")


def test_cautions_find_overfitting_and_clients_left_behind(comparison: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    shutil.copytree(comparison, folder)
    with Store(folder) as store, store._transaction() as database:
        last = "round = 5 AND metric = 'accuracy' AND cell IN (SELECT id FROM cells WHERE label = 'fedavg')"
        for phase, split, value in (
            ("pre_fit", "train", 0.5), ("post_fit", "train", 0.9), ("pre_fit", "test", 0.8), ("post_fit", "test", 0.7)
        ):  # fmt: skip
            database.execute(
                f"UPDATE client_metrics SET value = ? WHERE {last} AND phase = ? AND split = ?", (value, phase, split)
            )
        database.execute(
            "UPDATE client_metrics SET value = client * 1e-3 + 0.9 WHERE phase = 'final' AND metric = 'accuracy'"
        )
    found = " ".join(cautions(RunData.read(folder)))
    assert re.search(r"Clients overfit: in the last round.* with fedavg \(by \+?40 points, and by .10", found)
    assert "Left behind" not in found
    with Store(folder) as store, store._transaction() as database:
        for client in range(4, 24):  # many more that fare as well as the rest, and one that does not
            database.execute("INSERT INTO clients VALUES (?, ?, 5, 5, 50)", (client, f"client-{client}"))
            rows = "SELECT cell, round, ?, phase, split, metric, ?, examples FROM client_metrics WHERE client = 0"
            value = 0.1 if client == 7 else 0.7
            database.execute(f"INSERT INTO client_metrics {rows} AND {last} AND phase = 'final'", (client, value))
    text = " ".join(cautions(RunData.read(folder)))
    assert re.search(
        r"behind with fedavg \(final model\)[^:]*: client-7 \(10.00 %; 50 test examples, measured in 2 of 2 seeds\)\.",
        text,
    )


def test_a_client_that_few_seeds_measured_is_left_behind_with_that_evidence(drawn: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    shutil.copytree(drawn, folder)
    with Store(folder) as store, store._transaction() as database:
        database.execute("DELETE FROM client_metrics WHERE phase = 'final'")
        worst = "client = (SELECT MIN(client) FROM client_metrics WHERE cell = 1 AND phase = 'post_fit' AND round = 3)"
        database.execute("UPDATE client_metrics SET value = 0.9 WHERE metric = 'accuracy'")
        database.execute(f"UPDATE client_metrics SET value = 0.1 WHERE metric = 'accuracy' AND cell = 1 AND {worst}")
    text = " ".join(cautions(RunData.read(folder)))
    assert re.search(
        r"Left behind with fedavg \(models after local training\).*: client-\d+ \(10.00 %; \d+ .*, measured in 1 of 2 ",
        text,
    )


def test_local_training_is_judged_at_the_clients_that_were_drawn(drawn: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    shutil.copytree(drawn, folder)
    with Store(folder) as store, store._transaction() as database:
        # at drawn clients, local training gains on both splits; clients that were not drawn do better before it
        trained = "(SELECT client FROM client_metrics AS after WHERE after.cell = client_metrics.cell AND round = 3 "
        trained += "AND phase = 'post_fit')"
        for phase, where, value in (("pre_fit", "NOT IN", 1.0), ("pre_fit", "IN", 0.3), ("post_fit", "IN", 0.5)):
            changed = f"UPDATE client_metrics SET value = ? WHERE metric = 'accuracy' AND phase = ? AND client {where} "
            database.execute(changed + trained, (value, phase))
        database.execute("UPDATE client_metrics SET value = 0.2 WHERE split = 'train' AND phase = 'pre_fit'")
    assert not any("Clients overfit" in text for text in cautions(RunData.read(folder)))


def test_the_pooled_model_does_not_overfit_at_clients(comparison: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    shutil.copytree(comparison, folder)
    everybody = "(SELECT id FROM cells WHERE label = 'pooled')"
    with Store(folder) as store, store._transaction() as database:
        for phase, split, value in (
            ("pre_fit", "train", 0.5), ("final", "train", 0.9), ("pre_fit", "test", 0.8), ("final", "test", 0.7)
        ):  # fmt: skip
            changed = database.execute(
                "UPDATE client_metrics SET value = ? WHERE metric = 'accuracy' AND phase = ? AND split = ? "
                f"AND cell IN {everybody}",
                (value, phase, split),
            )
            assert changed.rowcount
    run = RunData.read(folder)
    assert run.is_pooled("pooled")
    assert not any("Clients overfit" in text and "pooled" in text for text in cautions(run))


def test_a_served_run_is_called_unprotected_only_if_it_is(run: RunData) -> None:
    served = replace(run, facts={**run.facts, "network": True})
    assert any("without secure aggregation" in text for text in cautions(served))
    secure = with_description(served, privacy={"secure_aggregation": {}})
    assert not any("without secure aggregation" in text for text in cautions(secure))


def test_metrics_that_some_clients_do_not_have_are_named(tmp_path: Path) -> None:
    data = two_classes(federation([30, 40, 25], seed=2))
    labels = data.y.clone()
    labels[data.offsets[1] : data.offsets[2]] = 1
    task = fl.Task(Logit, loss="bce", metrics=["accuracy", "auroc"])
    fl.run(replace(data, y=labels), task, fl.FedAvg(lr=0.1), 1, out=tmp_path, backend="serial")
    found = cautions(RunData.read(tmp_path))
    said = (
        "auroc is undefined at 1 of 3 clients (client-1), because their test examples lack a class. Means over clients"
    )
    assert any(text.startswith(said) for text in found)
    table = named(RunData.read(tmp_path), "clients_auroc")
    assert [row[0] for row in table.rows] == ["client-0", "client-1", "client-2"]
    assert [row[-1] is None for row in table.rows] == [False, True, False]
    assert "| client-1 | 24 | 8 | 8 | – |" in table.markdown()
    assert "1 of 3 clients has only one label: client-1." in found  # what `fedloom data describe` says of the data


def test_one_sentence_names_all_metrics_that_the_same_clients_do_not_have(tmp_path: Path) -> None:
    data = two_classes(federation([30, 40, 25], seed=2))
    labels = data.y.clone()
    labels[data.offsets[1] : data.offsets[2]] = 1
    task = fl.Task(Logit, loss="bce", metrics=["accuracy", "auroc", "auprc"])
    fl.run(replace(data, y=labels), task, fl.FedAvg(lr=0.1), 1, out=tmp_path, backend="serial")
    (said,) = [text for text in cautions(RunData.read(tmp_path)) if "undefined" in text]
    assert said.startswith(
        "auroc, auprc are undefined at 1 of 3 clients (client-1), because their test examples lack a class"
    )


def test_models_of_clients_may_differ_beside_the_same_global_one(tmp_path: Path) -> None:
    """Ditto's global model is FedAvg's by its definition."""
    algorithms = {"fedavg": fl.FedAvg(lr=0.2), "ditto": fl.Ditto(lr=0.2), "again": fl.FedAvg(lr=0.2)}
    data = two_classes(federation([20, 15, 30], seed=2))
    fl.run(data, fl.Task(Logit, loss="bce"), algorithms, 2, out=tmp_path, backend="serial")
    (said,) = [one for one in cautions(RunData.read(tmp_path)) if "ended with the same weights" in one]
    assert said.startswith("fedavg and again ended")


def test_without_numbers_of_clients_nobody_is_said_to_have_computed_the_same(tmp_path: Path) -> None:
    data, task = two_classes(federation([20, 15, 30], seed=2)), fl.Task(Logit, loss="bce")
    for splits, name in (((), "none"), (("validation",), "validation")):
        algorithms = {"fedavg": fl.FedAvg(lr=0.2), "ditto": fl.Ditto(lr=0.2)}
        evaluate = fl.Evaluation(splits=splits)
        fl.run(data, task, algorithms, 2, out=tmp_path / name, backend="serial", evaluate=evaluate)
        assert not [one for one in cautions(RunData.read(tmp_path / name)) if "same weights" in one]


def test_what_several_algorithms_say_in_the_same_words_is_one_sentence(run: RunData) -> None:
    said = ["fedavg: it is slow.", "local: it is slow.", "pooled: it is fast.", "All: of them."]
    about = replace(run, facts={**run.facts, "cautions about algorithms": said})
    assert [*report_warnings.about_algorithms(about, [])] == [
        "fedavg, local: it is slow.",
        "pooled: it is fast.",
        "All: of them.",
    ]
    assert next(report_warnings.about_algorithms(about, ["local"])) == "fedavg: it is slow."


@pytest.mark.parametrize(("setup", "warned"), [({"loss_is_mean": False}, 1), ({"loss_is_mean": True}, 0), (None, 0)])
def test_a_loss_that_is_no_mean_over_examples_is_named(run: RunData, setup: Any, warned: int) -> None:
    weighted = RunData(run.folder, run.cells, run.metrics, run.clients, {**run.facts, "setup": setup})
    assert sum("This loss is no mean over examples" in text for text in cautions(weighted)) == warned
