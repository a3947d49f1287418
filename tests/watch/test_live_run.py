"""A run that grows is read again, only what is new, and never half a round."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fedloom.errors import StoreError
from fedloom.experiment.store import Store
from fedloom.results.report_warnings import cautions
from fedloom.results.run_data import RunData
from fedloom.watch import live_run
from fedloom.watch.live_run import LiveRun, RunOnceItExists
from tests.experiment.round_records import TASK
from tests.watch.growing_run import GrowingRun


def values(run: RunData) -> list[tuple[int, int, float]]:
    found = run.client_values("fedavg", 1, "post_fit", "accuracy")
    return list(zip(found.rounds.tolist(), found.clients.tolist(), found.values.tolist(), strict=True))


def test_it_sees_new_rounds_and_reads_only_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growing = GrowingRun(tmp_path).add(3)
    live = LiveRun(tmp_path)
    stamp = live.stamp()
    assert values(live.data()) == values(RunData.read(tmp_path))
    assert live.stamp() == stamp
    asked: list[int] = []
    read = Store.client_values

    def counted(store: Store, *where: object, after: int = -1) -> object:
        asked.append(after)
        return read(store, *where, after=after)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "client_values", counted)
    growing.add(2)
    assert live.stamp() != stamp
    assert {round for round, _, _ in values(live.data())} == {1, 2, 3, 4, 5}
    assert asked == [3]
    assert values(live.data()) == values(RunData.read(tmp_path))


def test_reading_a_run_that_has_ended_is_no_change(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path).add(1)
    live = LiveRun(tmp_path)
    growing.end().store.close()  # this deletes the WAL, and the first one who reads the run makes one again
    assert not (tmp_path / "run.db-wal").exists()
    stamp = live.stamp()
    assert len(values(live.data())) == 3
    assert live.stamp() == stamp


def test_of_cells_that_have_not_changed_nothing_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growing = GrowingRun(tmp_path, labels=("rounds", "participants"), seeds=(1,)).add(2)
    live = LiveRun(tmp_path)

    def read_all() -> list[list[float]]:
        run = live.data()
        curves = [run.client_values(*cell, "post_fit", "accuracy").values.tolist() for cell in run.cells]
        return [*curves, *(run.costs(*cell).seconds.tolist() for cell in run.cells)]

    assert read_all() == read_all()
    asked: list[tuple[str, object]] = []
    rows, values = Store.rows, Store.client_values

    def later_rows(store: Store, table: str, *cell: int, after: int = -1) -> object:
        asked.append((table, cell and (*cell, after)))
        return rows(store, table, *cell, after=after)

    monkeypatch.setattr(Store, "rows", later_rows)

    def later(store: Store, cell: int, *where: object, after: int = -1) -> object:
        asked.append(("values", (cell, after)))
        return values(store, cell, *where, after=after)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "client_values", later)
    first = growing.cells["rounds", 1]
    growing.done += 1
    growing.store.save(first, growing._record(0, 1), TASK)
    found = read_all()
    assert [one for one in asked if one[1]] == [("values", (first, 2)), ("rounds", (first, 1))]
    assert (len(found[0]), len(found[1]), found[2], found[3]) == (9, 6, [0.5] * 3, [0.5] * 2)


def test_rounds_that_are_taken_back_and_a_folder_that_is_replaced_are_read_again(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path / "run").add(5)
    live = LiveRun(tmp_path / "run")
    values(live.data())
    assert live.cell("fedavg", 1)[1].upto == 5
    assert live.data().costs("fedavg", 1).rounds.tolist() == [1, 2, 3, 4, 5]
    for cell in growing.cells.values():
        growing.store.forget_after(cell, 2)
    assert {round for round, _, _ in values(live.data())} == {1, 2}
    assert live.data().costs("fedavg", 1).rounds.tolist() == [1, 2]
    assert set(live.cell("fedavg", 1)[1].participations[:, 0]) == {1, 2}
    growing.store.close()
    (tmp_path / "run").rename(tmp_path / "old")
    GrowingRun(tmp_path / "run", clients=["only"]).add(4)
    assert values(live.data()) == values(RunData.read(tmp_path / "run"))
    assert set(live.cell("fedavg", 1)[1].participations[:, 1]) == {0}


def test_who_took_part_and_who_was_left_out_comes_from_the_store(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path).add(1).add(1, left_out=(2,))
    live = LiveRun(tmp_path)
    _, cell = live.cell("fedavg", 1)
    assert cell.participations.tolist() == [[r, c, 100, 200] for r in (1, 2) for c in range(3)]
    assert cell.marked["left_out"].tolist() == [[2, 2]]
    growing.add(1, outliers=(0,))
    _, cell = live.cell("fedavg", 1)
    assert cell.marked["outlier"].tolist() == [[3, 0]]
    assert cell.marked["left_out"].tolist() == [[2, 2]]
    assert np.unique(cell.participations[:, 0]).tolist() == [1, 2, 3]


def test_cautions_are_the_reports_and_are_computed_rarely(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path, seeds=(1,)).add(2)
    live = LiveRun(tmp_path)
    assert live.cautions() == cautions(RunData.read(tmp_path))
    times = iter([0.0, 100.0, 110.0, 110.0, 200.0, 200.0])
    live = LiveRun(tmp_path)
    first = live.cautions(lambda: next(times, 2000.0))  # takes ten seconds, so the next ones come 2,000 s later
    growing.add(1, left_out=(1,))
    assert live.cautions(lambda: 150.0) == first
    assert live.cautions(lambda: 5000.0) == cautions(RunData.read(tmp_path)) != first


def test_a_finished_run_has_the_cautions_of_its_end(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path, seeds=(1,)).add(1)
    live = LiveRun(tmp_path)
    times = iter([0.0, 0.0, 100.0, 100.0])
    assert any(text.startswith("Not finished") for text in live.cautions(lambda: next(times)))
    growing.end()
    assert live.cautions(lambda: 100.0) == cautions(RunData.read(tmp_path))  # although no time has passed


def test_reading_never_blocks_the_writer(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path).add(1)
    growing.store._database.execute("PRAGMA busy_timeout = 0")  # a lock would be an error at once
    live = LiveRun(tmp_path)
    for _ in range(5):
        values(live.data())
        growing.add(1)
    assert {round for round, _, _ in values(live.data())} == {*range(1, 7)}


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a run folder"):
        LiveRun(tmp_path)
    (tmp_path / "control.json").write_text(json.dumps({}))
    with pytest.raises(StoreError, match="is not a run folder"):
        LiveRun(tmp_path)


def test_a_run_that_begins_is_opened_once_though_many_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GrowingRun(tmp_path).add(1)
    both, opened = threading.Barrier(2), []

    class Slow(LiveRun):
        def __init__(self, folder: Path) -> None:
            opened.append(folder)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # somebody else may come in now
            super().__init__(folder)

    monkeypatch.setattr(live_run, "LiveRun", Slow)
    runs = RunOnceItExists(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: runs[0], range(2)))
    assert (len(opened), found[0] is found[1]) == (1, True)


def test_a_database_that_stays_unreadable_is_an_error_and_no_run_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes(b"")
    assert len(RunOnceItExists(tmp_path)) == 0  # it is being made
    os.utime(tmp_path / "run.db", (0, 0))
    with pytest.raises(StoreError, match="has version 0 of the schema"):
        len(RunOnceItExists(tmp_path))


def test_the_run_appears_when_it_begins(tmp_path: Path) -> None:
    runs = RunOnceItExists(tmp_path)
    assert (len(runs), list(runs)) == (0, [])
    GrowingRun(tmp_path).add(1)
    assert len(runs) == 1
    assert runs[0].data().name == tmp_path.name
