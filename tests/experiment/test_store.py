"""The run's database: rows go in by round and come out with names."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.clock.clock import ClientTime, RoundTime
from fedloom.data.federation import Federation
from fedloom.errors import InputError, StoreError
from fedloom.experiment import store as module
from fedloom.experiment.store import Store
from fedloom.federation.work import Report
from fedloom.training.evaluation import Measured, pool
from tests.experiment.round_records import RANKING, TASK, final, measured, ranked, record


def test_a_cell_is_made_once_and_then_found(tmp_path: Path) -> None:
    with Store(tmp_path / "new" / "run") as store:
        first = store.cell("fedavg", 1)
        assert store.cell("fedavg", 2) != first
        assert store.cell("local", 1) != first
        assert store.cell("fedavg", 1) == first
    with Store(tmp_path / "new" / "run") as store:
        assert store.cell("fedavg", 1) == first
        assert [(cell["label"], cell["seed"], cell["status"]) for cell in store.cells()] == [
            ("fedavg", 1, "waiting"),
            ("fedavg", 2, "waiting"),
            ("local", 1, "waiting"),
        ]


def test_a_cell_that_runs_on_forgets_what_it_ended_with(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        assert store.cells()[0]["started"] is None
        store.set_status(cell, "running")
        started = store.cells()[0]["started"]
        assert started is not None
        store.set_status(cell, "done", weights_sha256="abc")
        store.set_status(cell, "done")
        assert store.cells()[0]["weights_sha256"] == "abc"
        assert store.cells()[0]["finished"] is not None
        store.set_status(cell, "running")
        (again,) = store.cells()
        assert (again["status"], again["weights_sha256"], again["finished"]) == ("running", None, None)
        assert again["started"] == started
        store.set_status(cell, "failed", error="the loss is nan")
        assert store.cells()[0]["error"] == "the loss is nan"


def test_tidy_rows_name_algorithm_seed_and_client(tmp_path: Path) -> None:
    x, y = np.zeros((10, 4), np.float32), np.zeros(10, np.int64)
    federation = Federation.from_arrays(x, y, client=["ann"] * 4 + ["bob"] * 6)
    with Store(tmp_path) as store:
        store.set_clients(federation)
        store.set_clients(federation)
        cell = store.cell("mine", 7)
        store.save(cell, record(1), TASK)
        rows = store.rows("client_metrics")
        assert rows[0] == {
            "algorithm": "mine",
            "seed": 7,
            "round": 1,
            "client": "ann",
            "phase": "post_fit",
            "split": "test",
            "metric": "accuracy",
            "value": 0.8,
            "examples": 10,
        }
        assert len(rows) == 2 * 2 * 2
        assert store.rows("clients") == [
            {"client": 0, "name": "ann", "train": 2, "validation": 1, "test": 1},
            {"client": 1, "name": "bob", "train": 3, "validation": 1, "test": 2},
        ]
        assert store.rows("server_metrics")[0] == {
            "algorithm": "mine",
            "seed": 7,
            "round": 1,
            "split": "test",
            "metric": "accuracy",
            "value": 0.6,
            "examples": 100,
        }


def test_the_client_that_owns_everything_is_called_everyone(tmp_path: Path) -> None:
    x, y = np.zeros((10, 4), np.float32), np.zeros(10, np.int64)
    federation = Federation.from_arrays(x, y, client=["ann"] * 4 + ["bob"] * 6)
    pooled = record(1, reports=(Report(2, 5, 6),), clients={"post_fit": {2: {"test": measured(3, 1.0)}}})
    with Store(tmp_path) as store:
        cell = store.cell("pooled", 1)
        store.save(cell, pooled, TASK)
        assert {row["client"] for row in store.rows("client_metrics")} == {"2"}
        store.set_clients(federation)
        assert {row["client"] for row in store.rows("client_metrics")} == {"everyone"}
        assert [row["client"] for row in store.rows("participants")] == ["everyone"]


def test_traffic_and_epochs_add_up_over_calls(tmp_path: Path) -> None:
    one = Report(0, 10, 20, ({"loss": 3.0}, {"loss": 2.0, "validation_loss": 2.5}))
    two = Report(0, 1, 2, ({"loss": 1.0},))
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        store.save(cell, record(1, reports=(one, Report(1, 10, 20), two)), TASK)
        (row,) = store.rows("rounds", cell)
        assert (row["participants"], row["bytes_up"], row["bytes_down"], row["complete"]) == (2, 21, 42, True)
        assert [(p["client"], p["bytes_up"], p["bytes_down"]) for p in store.rows("participants")] == [
            ("0", 11, 22),
            ("1", 10, 20),
        ]
        assert [(h["epoch"], h["metric"], h["value"]) for h in store.rows("history", cell)] == [
            (1, "loss", 3.0),
            (2, "loss", 2.0),
            (2, "validation_loss", 2.5),
            (3, "loss", 1.0),
        ]


def test_saving_a_round_again_replaces_it(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        store.save(cell, record(1), TASK)
        store.save(cell, record(2), TASK, durable=True)
        only = {"pre_fit": {0: {"test": measured(10, 0.1)}}}
        store.save(cell, record(1, clients=only, server={}, reports=()), TASK)
        first = [row for row in store.rows("client_metrics", cell) if row["round"] == 1]
        assert [(row["phase"], row["metric"], row["value"]) for row in first] == [
            ("pre_fit", "accuracy", 0.1),
            ("pre_fit", "loss", 1.0),
        ]
        assert {row["round"] for row in store.rows("server_metrics")} == {2}
        assert [row["round"] for row in store.rows("rounds", cell)] == [1, 2]
        assert store.cells()[0]["rounds_done"] == 2


def test_a_round_that_fails_to_save_leaves_nothing(tmp_path: Path) -> None:
    twice = {"pre_fit": {0: {"test": measured(10, 0.1)}}}
    broken = record(1, clients=twice, seconds=None)
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        with pytest.raises(StoreError, match="NOT NULL"):
            store.save(cell, broken, TASK)
        assert store.rows("client_metrics") == store.rows("rounds") == []
        assert store.cells()[0]["rounds_done"] == 0
        store.save(cell, record(1), TASK)
        assert len(store.rows("rounds", cell)) == 1


def test_the_summary_counts_each_client_once_and_pools_each_example_once(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        other = store.cell("fedavg", 2)
        store.save(cell, record(1), TASK)
        store.save(other, record(1), TASK)
        store.save(cell, final(2, 0.8), TASK)
        summary = store.summary(cell)
        assert summary["test_accuracy"] == pytest.approx((0.8 + 0.4) / 2)
        assert summary["pooled_test_accuracy"] == pytest.approx((8 + 12) / 40)
        assert summary["post_fit_test_accuracy"] == summary["pre_fit_test_accuracy"] == summary["test_accuracy"]
        assert summary["universal_accuracy"] == pytest.approx(0.4)
        assert summary["server_test_accuracy"] == pytest.approx(0.6)
        assert summary["test_loss"] == pytest.approx(1.0)
        assert "test_accuracy" not in store.summary(other)
        assert store.summary(other)["post_fit_test_accuracy"] == pytest.approx(0.6)


def test_the_pooled_model_has_means_over_clients_before_and_after_training_and_at_the_end(tmp_path: Path) -> None:
    x, y = np.zeros((40, 4), np.float32), np.zeros(40, np.int64)
    everyone = {"reports": (Report(2, 0, 0),), "server": {}}
    trained = {2: {"test": measured(40, 0.5)}}
    first, second = record(1).clients["pre_fit"], final(2, 0.2).clients["final"]
    ended = {"pre_fit": second, "post_fit": trained, "final": {0: {"test": measured(10, math.nan)}}}
    with Store(tmp_path) as store:
        store.set_clients(Federation.from_arrays(x, y, client=["a"] * 10 + ["b"] * 30))
        cell = store.cell("pooled", 1)
        store.save(cell, record(1, clients={"pre_fit": first, "post_fit": trained}, **everyone), TASK)
        assert store.is_pooled(cell)
        assert "post_fit_test_accuracy" not in store.summary(cell)  # no client has the trained model yet
        store.save(cell, record(2, clients={"pre_fit": second, "post_fit": trained}, **everyone), TASK)
        summary = store.summary(cell)
        assert summary["post_fit_test_accuracy"] == summary["pre_fit_test_accuracy"] == pytest.approx((0.2 + 0.1) / 2)
        assert summary["pooled_post_fit_test_accuracy"] == pytest.approx(0.5)
        store.save(cell, record(2, clients={**ended, "final": first}, **everyone), TASK)
        summary = store.summary(cell)
        assert summary["post_fit_test_accuracy"] == summary["test_accuracy"] == pytest.approx((0.8 + 0.4) / 2)
        assert summary["pooled_test_accuracy"] == pytest.approx((8 + 12) / 40)
        store.save(cell, record(2, clients=ended, **everyone), TASK)
        assert "post_fit_test_accuracy" not in store.summary(cell)  # undefined at the end, whatever it was before
        other = store.cell("fedavg", 1)
        assert not store.is_pooled(other)
        store.save(other, record(1), TASK)
        assert not store.is_pooled(other)


def test_a_summary_is_about_the_last_measured_round(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        store.save(cell, record(1), TASK)
        store.save(cell, record(2, clients={}, server={}), TASK)
        assert store.summary(cell)["server_test_accuracy"] == pytest.approx(0.6)
        assert store.summary(cell)["pre_fit_test_accuracy"] == pytest.approx(0.6)
        assert store.summary(store.cell("empty", 1)) == {}


def test_a_run_that_is_extended_has_one_end(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        store.save(cell, record(1), TASK)
        store.save(cell, final(2, 0.2), TASK)
        store.forget_after(cell, 2)
        assert store.summary(cell)["test_accuracy"] == pytest.approx(0.15)
        store.save(cell, record(3), TASK)
        assert {row["phase"] for row in store.rows("client_metrics")} == {"pre_fit", "post_fit"}
        assert {row["phase"] for row in store.rows("pooled_metrics")} == {"pre_fit", "post_fit"}
        assert "test_accuracy" not in store.summary(cell)
        assert "universal_accuracy" not in store.summary(cell)
        store.save(cell, final(4, 0.8), TASK)
        assert {row["round"] for row in store.rows("client_metrics") if row["phase"] in ("final", "universal")} == {4}
        assert store.summary(cell)["test_accuracy"] == pytest.approx(0.6)


def test_forgetting_removes_later_rounds_of_one_cell_from_every_table(tmp_path: Path) -> None:
    report = Report(0, 1, 1, ({"loss": 1.0},))
    passed = RoundTime(1.0, 2.0, 3, (ClientTime(0, "counted", 1.0, 2.0, 0.5, 1),))
    with Store(tmp_path) as store:
        cell, other = store.cell("fedavg", 1), store.cell("fedavg", 2)
        for round in (1, 2, 3):
            made = record(round, reports=(report,), public=((0, "scores", 1, 0.5),), time=passed)
            store.save(cell, made, TASK)
            store.save(other, made, TASK)
        store.forget_after(cell, 1)
        for table in module.PER_ROUND:
            assert {row["round"] for row in store.rows(table, cell)} == {1}, table
            assert {row["round"] for row in store.rows(table, other)} == {1, 2, 3}, table
        assert [row["rounds_done"] for row in store.cells()] == [1, 3]


def test_a_metric_that_is_not_a_mean_is_averaged_over_clients_and_also_pooled(tmp_path: Path) -> None:
    clients = {
        0: {"test": ranked([0.1, 0.2], [0, 1])},
        1: {"test": ranked([0.3, 0.4, 0.0], [0, 1, 0])},
        2: {"test": ranked([0.3], [0])},
    }
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        store.save(cell, record(1, clients={"final": clients}, server={}), RANKING)
        each = {row["client"]: row["value"] for row in store.rows("client_metrics") if row["metric"] == "auroc"}
        assert each == {"0": 1.0, "1": 1.0, "2": None}
        summary = store.summary(cell)
        assert summary["test_auroc"] == 1.0  # client 2 has one class: it does not count
        assert summary["pooled_test_auroc"] == pytest.approx(6 / 8)  # 0.3 of others is above 0.2 of client 0
        assert summary["test_accuracy"] == pytest.approx(0.5)
        kinds = {row["metric"]: (row["is_mean"], row["higher_is_better"]) for row in store.rows("metrics")}
        assert kinds == {"accuracy": (1, 1), "auroc": (0, 1), "loss": (1, 0)}


def test_models_that_saw_the_same_examples_do_have_a_mean_of_any_metric(tmp_path: Path) -> None:
    good, bad = ranked([0.1, 0.2], [0, 1]), ranked([0.2, 0.1], [0, 1])
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        store.save(cell, record(1, clients={"post_fit": {0: {"universal": good}, 1: {"universal": bad}}}), RANKING)
        assert store.summary(cell)["universal_auroc"] == pytest.approx(0.5)
        assert store.rows("pooled_metrics") == []


def test_an_undefined_value_is_none_and_leaves_no_mean(tmp_path: Path) -> None:
    one_class = {0: {"test": ranked([0.1, 0.2], [1, 1])}}
    diverged = {0: {"test": measured(10, 0.5, math.nan)}, 1: {"test": measured(10, 0.5)}}
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        store.save(cell, record(1, clients={"pre_fit": one_class, "post_fit": diverged}), RANKING)
        values = {(r["phase"], r["client"], r["metric"]): r["value"] for r in store.rows("client_metrics")}
        assert values["pre_fit", "0", "auroc"] is None
        assert values["post_fit", "0", "loss"] is None
        summary = store.summary(cell)
        assert "post_fit_test_loss" not in summary
        assert "pooled_pre_fit_test_auroc" not in summary
        assert summary["post_fit_test_accuracy"] == pytest.approx(0.5)


def test_clients_without_examples_leave_no_rows(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        empty = {"pre_fit": {0: {"test": Measured()}}}
        store.save(cell, record(1, clients=empty, server={"test": Measured()}), TASK)
        assert store.rows("client_metrics") == store.rows("pooled_metrics") == store.rows("server_metrics") == []


def test_pooling_at_once_equals_pooling_one_after_another() -> None:
    parts = [ranked([0.1, 0.2], [0, 1]), ranked([0.3], [1])]
    added, pooled = pool([pool(parts[:1]), parts[1]]), pool([parts[0], Measured(), parts[1]])
    assert (pooled.count, pooled.sums) == (added.count, added.sums)
    assert torch.equal(pooled.scores["auroc"], added.scores["auroc"])
    assert pooled.values(RANKING) == added.values(RANKING)
    assert pool([]).values(TASK) == {}


def test_facts_are_kept_as_they_are(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.set_fact("machine", {"cores": 2, "torch": "2.13"})
        store.set_fact("hash", "abc")
        store.set_fact("hash", "abd")
        assert store.facts() == {"machine": {"cores": 2, "torch": "2.13"}, "hash": "abd"}
        assert store.fact("hash") == "abd"
        assert store.fact("nothing") is None


def test_a_reader_sees_whole_rounds_while_the_writer_writes(tmp_path: Path) -> None:
    with Store(tmp_path) as writer:
        cell = writer.cell("fedavg", 1)
        writer.save(cell, record(1), TASK)
        with Store(tmp_path, read_only=True, timeout=0) as reader:
            with writer._transaction() as database:
                database.execute("DELETE FROM client_metrics")
                assert len(reader.rows("client_metrics")) == 8
                assert reader.summary(cell)["pre_fit_test_accuracy"] == pytest.approx(0.6)
            assert reader.rows("client_metrics") == []
            writer.save(cell, record(2), TASK)
            assert {row["round"] for row in reader.rows("client_metrics")} == {2}
            with pytest.raises(StoreError, match="readonly"):
                reader.cell("other", 1)


def test_a_second_writer_is_told_that_the_database_is_locked(tmp_path: Path) -> None:
    locked = pytest.raises(StoreError, match=r"run\.db is locked: another process writes to it")
    with Store(tmp_path) as one, Store(tmp_path, timeout=0) as two:
        with one._transaction(), locked:
            two.cell("fedavg", 1)
        assert one.cells() == []
        assert two.cell("fedavg", 1) == 1


def test_a_reader_of_no_run_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"There is no run in .*run\.db does not exist"):
        Store(tmp_path, read_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"hello", b"SQLite format 3\0" + b"\xff" * 5000, b"\0" * 3000])
def test_a_file_that_is_not_a_database_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"run\.db is damaged or not a database"):
        Store(tmp_path)
    assert (tmp_path / "run.db").read_bytes() == content


def test_damage_inside_the_file_is_told_with_its_path(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        for round in range(1, 40):
            store.save(cell, record(round), TASK)
    content = bytearray((tmp_path / "run.db").read_bytes())
    content[8192:] = b"\x55" * (len(content) - 8192)
    (tmp_path / "run.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"run\.db is damaged"), Store(tmp_path) as store:
        store.rows("client_metrics")


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(tmp_path / "runs")


def test_somebody_elses_database_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "run.db") as other:
        other.execute("CREATE TABLE songs (name TEXT)")
    other.close()
    with pytest.raises(StoreError, match="fedloom did not write"):
        Store(tmp_path)


def test_a_newer_schema_asks_for_an_update(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "run.db") as newer:
        newer.execute("PRAGMA user_version = 99")
    newer.close()
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"version 99 .* update fedloom"):
            Store(tmp_path, read_only=read_only)


def test_an_empty_database_of_version_0_is_brought_up_to_date(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "run.db").close()
    (tmp_path / "run.db").touch()
    with pytest.raises(StoreError, match="has version 0 of the schema"):
        Store(tmp_path, read_only=True)
    with Store(tmp_path) as store:
        assert store._database.execute("PRAGMA user_version").fetchone() == (len(module.MIGRATIONS),)
        assert store._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert store._database.execute("PRAGMA synchronous").fetchone() == (1,)
        assert store._database.execute("PRAGMA foreign_keys").fetchone() == (1,)


def test_an_older_schema_is_migrated_step_by_step_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        store.save(cell, record(1), TASK)
    later = (("ALTER TABLE facts ADD COLUMN unit TEXT",), ("UPDATE facts SET unit = 'none'", "CREATE TABLE notes (n)"))
    monkeypatch.setattr(module, "MIGRATIONS", module.MIGRATIONS + later)
    with pytest.raises(StoreError, match="Open it for writing once"):
        Store(tmp_path, read_only=True)
    with Store(tmp_path) as store:
        assert store._database.execute("PRAGMA user_version").fetchone() == (len(module.MIGRATIONS),)
        store._database.execute("SELECT n FROM notes")
        store._database.execute("SELECT unit FROM facts")
        assert len(store.rows("client_metrics", cell)) == 8
    Store(tmp_path, read_only=True).close()


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path).close()
    known = module.MIGRATIONS
    monkeypatch.setattr(module, "MIGRATIONS", (*known, ("CREATE TABLE notes (n)", "DROP TABLE no_such_table")))
    with pytest.raises(StoreError, match="no_such_table"):
        Store(tmp_path)
    monkeypatch.setattr(module, "MIGRATIONS", known)
    with Store(tmp_path) as store, pytest.raises(sqlite3.OperationalError, match="no such table"):
        store._database.execute("SELECT * FROM notes")


def test_unknown_tables_and_cells_are_named(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        with pytest.raises(InputError, match=r"no table 'client_metric'.*Did you mean 'client_metrics'"):
            store.rows("client_metric")
        with pytest.raises(StoreError, match="There is no cell 5"):
            store.save(5, record(1), TASK)
        with pytest.raises(StoreError, match="There is no cell 5"):
            store.set_status(5, "done")
        with pytest.raises(StoreError, match="CHECK"):
            store.set_status(store.cell("a", 1), "sleeping")  # type: ignore[arg-type]


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.cells()


def test_numbers_of_clients_can_be_read_from_a_round_on(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        for round in (1, 2, 3):
            store.save(cell, record(round, left_out=(1,) if round == 3 else ()), TASK)
        found = store.client_values(cell, "post_fit", "test", "accuracy", after=1)
        assert found.tolist() == [[2, 0, 0.8], [2, 1, 0.4], [3, 0, 0.8], [3, 1, 0.4]]
        assert store.participations(cell, after=2).tolist() == [[3, 0, 100, 200], [3, 1, 100, 200]]
        assert len(store.participations(cell)) == 6
        assert store.marked(cell, "left_out").tolist() == [[3, 1]]
        assert store.marked(cell, "left_out", (), after=3).shape == (0, 2)
        assert store.marked(cell, "outlier").shape == (0, 2)


def test_an_undefined_value_of_a_client_is_not_finite(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        cell = store.cell("fedavg", 1)
        store.save(cell, record(1, clients={"post_fit": {0: {"test": ranked([0.5], [1])}}}), RANKING)
        assert store.client_values(cell, "post_fit", "test", "auroc").tolist() == [[1, 0, math.inf]]


def test_an_experiment_file_in_place_of_a_run_is_answered_with_the_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    assert module.no_run(tmp_path / "mine.toml").endswith("Give the folder of its run, such as runs/mine.")
    assert "there is no run.db in it" in module.no_run(tmp_path)
