"""What a list says about a sweep: while it runs, after it was stopped, and when it is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import StoreError
from fedloom.tuning import sweep_folder

FOUND = {"tried": [{"setting": {"train.lr": 0.1}}, {"setting": {"train.lr": 0.3, "train.epochs": 2}}]}


def test_a_sweep_runs_is_interrupted_and_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "tune"
    with sweep_folder.running(folder, ["train.lr"]):
        assert sweep_folder.read(folder).status == "running"
        with pytest.raises(StoreError, match="Another sweep is running"), sweep_folder.running(folder, []):
            pass
    stopped = sweep_folder.read(folder)
    assert (stopped.status, stopped.over, stopped.settings, stopped.finished) == ("interrupted", ["train.lr"], 0, None)
    with sweep_folder.running(folder, ["train.lr", "train.epochs"]):
        sweep_folder.finish(folder, FOUND, "train.lr=0.1: 90 %")
    done = sweep_folder.read(folder)
    assert (done.status, done.over, done.settings) == ("done", ["train.lr", "train.epochs"], 2)
    assert (done.name, done.best) == ("tune", "train.lr=0.1: 90 %")
    assert str(done.started) <= str(done.finished)


def test_a_sweep_that_is_stopped_when_it_is_repeated_keeps_what_it_found(tmp_path: Path) -> None:
    sweep_folder.finish(tmp_path, FOUND, "train.lr=0.1: 90 %")
    with sweep_folder.running(tmp_path, ["train.lr"]):
        pass
    stopped = sweep_folder.read(tmp_path)
    assert (stopped.status, stopped.best) == ("interrupted", "")
    assert json.loads((tmp_path / "sweep.json").read_text())["tried"] == FOUND["tried"]


@pytest.mark.parametrize(
    ("fresh", "found", "kept"), [(False, FOUND, True), (True, FOUND, False), (False, {"tried": []}, False)]
)
def test_a_finished_sweep_that_computes_nothing_new_keeps_its_dates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool, found: dict[str, Any], kept: bool
) -> None:
    for hour, what in (("01", FOUND), ("02", found)):
        monkeypatch.setattr(sweep_folder, "_now", lambda hour=hour: f"2026-11-18T{hour}:00:00+00:00")
        with sweep_folder.running(tmp_path, ["train.lr"], fresh):
            sweep_folder.finish(tmp_path, what, "train.lr=0.1: 90 %")
    shown = sweep_folder.read(tmp_path)
    day = f"2026-11-18T{'01' if kept else '02'}:00:00+00:00"
    assert (shown.started, shown.finished) == (day, day)


def test_files_of_earlier_versions_are_of_sweeps_that_ended(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(FOUND))
    done = sweep_folder.read(tmp_path)
    assert (done.status, done.over, done.settings, done.best) == ("done", ["train.lr", "train.epochs"], 2, "")
    assert done.finished


@pytest.mark.parametrize("text", ["[]", "{"])
def test_other_files_of_that_name_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(StoreError, match=r"sweep\.json"):
        sweep_folder.read(tmp_path)
