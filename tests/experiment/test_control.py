"""A run pauses and stops as the file in its folder asks, says so, and is never held up in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.errors import InputError
from fedloom.experiment.control import FILE, PAUSED, Control, read_control, write_wish
from fedloom.experiment.progress import Progress
from fedloom.experiment.store import Store


class Notes(Progress):
    """Keeps what a run says, and does something after a round."""

    def __init__(self, after: Callable[[int], None] = lambda round: None) -> None:
        self.said: list[str] = []
        self.rounds: list[int] = []
        self.after = after

    def step(self, cell: str, round: int, values: dict[str, float], seconds: float) -> None:
        self.rounds.append(round)
        self.after(round)

    def note(self, text: str) -> None:
        self.said.append(text)


def train(folder: Path, federation: fl.Federation, task: fl.Task, notes: Notes, **more: Any) -> fl.Result:
    settings = {"rounds": 4, "backend": "serial", "checkpoint_every": 100, **more}
    return fl.run(federation, task, fl.FedAvg(lr=0.1), out=folder, progress=notes, **settings)


def test_a_wish_to_stop_ends_the_run_after_the_round_and_is_gone(
    tmp_path: Path, federation: fl.Federation, task: fl.Task
) -> None:
    notes = Notes(lambda round: write_wish(tmp_path, "stop") if round == 2 else None)
    result = train(tmp_path, federation, task, notes)
    assert (result.status, result.runs[0].rounds) == ("stopped", 2)
    assert not (tmp_path / FILE).exists()
    assert [
        said for said in notes.said if said.startswith(f"Stopping after this round, as {tmp_path / FILE} asked (20")
    ]
    again = train(tmp_path, federation, task, Notes())
    alone = train(tmp_path / "alone", federation, task, Notes())
    assert again.finished
    assert again.weights_sha256 == alone.weights_sha256


def test_a_pause_is_checkpointed_is_visible_and_ends_with_the_file(
    tmp_path: Path, federation: fl.Federation, task: fl.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def look(seconds: float) -> None:
        with Store(tmp_path, read_only=True) as store:
            seen.append((store.fact(PAUSED), store.cells()[0]["rounds_done"], read_control(tmp_path)["running"]))
        assert (tmp_path / "cells" / "fedavg-1" / "round-000002.json").exists()
        if len(seen) == 3:
            write_wish(tmp_path, "continue")

    monkeypatch.setattr("fedloom.experiment.control.time.sleep", look)
    monkeypatch.setattr(Control.__init__, "__defaults__", (look,))
    notes = Notes(lambda round: write_wish(tmp_path, "pause") if round == 2 else None)
    result = train(tmp_path, federation, task, notes)
    assert seen == [(2, 2, True)] * 3
    assert result.finished
    assert notes.rounds == [1, 2, 3, 4]
    assert [said.partition(" ")[0] for said in notes.said if said.startswith(("Paused", "Continued"))] == [
        "Paused",
        "Continued.",
    ]
    with Store(tmp_path, read_only=True) as store:
        assert store.fact(PAUSED) is None
    assert result.weights_sha256 == train(tmp_path / "alone", federation, task, Notes()).weights_sha256


def test_a_pause_that_comes_too_late_for_a_checkpoint_waits_for_the_next_one(
    tmp_path: Path, federation: fl.Federation, task: fl.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, paused_after = Store.save, []

    def save_and_wish(store: Store, cell: int, record: Any, task: fl.Task, *, durable: bool = False) -> None:
        save(store, cell, record, task, durable=durable)
        if record.round == 2 and not durable:  # it was decided already that this round has no checkpoint
            write_wish(tmp_path, "pause")

    def look(seconds: float) -> None:
        with Store(tmp_path, read_only=True) as store:
            paused_after.append(store.fact(PAUSED))
        assert (tmp_path / "cells" / "fedavg-1" / "round-000003.json").exists()
        write_wish(tmp_path, "continue")

    monkeypatch.setattr(Store, "save", save_and_wish)
    monkeypatch.setattr(Control.__init__, "__defaults__", (look,))
    assert train(tmp_path, federation, task, Notes()).finished
    assert paused_after == [3]


def test_a_pause_survives_a_restart_and_says_so(
    tmp_path: Path, federation: fl.Federation, task: fl.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    notes = Notes(lambda round: (write_wish(tmp_path, "pause"), asked.append(1)) if round == 1 else None)  # type: ignore[arg-type]
    result = train(
        tmp_path, federation, task, notes, should_stop=lambda: bool(asked) and "Paused" in "".join(notes.said)
    )
    assert (result.status, result.runs[0].rounds) == ("stopped", 1)
    assert read_control(tmp_path) | {"time": ""} == {"wish": "pause", "time": "", "running": False}
    later = Notes()
    monkeypatch.setattr(Control.__init__, "__defaults__", (lambda seconds: write_wish(tmp_path, "continue"),))
    assert train(tmp_path, federation, task, later).finished
    assert later.said[0].startswith(f"Paused by {tmp_path / FILE} (20")
    assert "delete the file" in later.said[0]
    assert later.rounds == [2, 3, 4]


def test_a_stop_that_was_left_is_ignored_aloud(tmp_path: Path, federation: fl.Federation, task: fl.Task) -> None:
    train(tmp_path, federation, task, Notes(), rounds=1)
    write_wish(tmp_path, "stop")
    notes = Notes()
    assert train(tmp_path, federation, task, notes).finished
    assert [said for said in notes.said if "Ignored the wish to stop" in said]
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '"pause"', '{"wish": "explode"}', "{}", "\x00\xff"])
def test_a_file_that_cannot_be_read_is_ignored_aloud(
    tmp_path: Path, federation: fl.Federation, task: fl.Task, text: str
) -> None:
    (tmp_path / FILE).write_text(text)
    notes = Notes()
    assert train(tmp_path, federation, task, notes, rounds=1).finished
    assert [said for said in notes.said if "has no wish that fedloom knows" in said]
    assert read_control(tmp_path)["wish"] == "unreadable"


def test_a_stop_during_a_pause_ends_the_run(
    tmp_path: Path, federation: fl.Federation, task: fl.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Control.__init__, "__defaults__", (lambda seconds: write_wish(tmp_path, "stop"),))
    notes = Notes(lambda round: write_wish(tmp_path, "pause") if round == 2 else None)
    result = train(tmp_path, federation, task, notes)
    assert (result.status, result.runs[0].rounds) == ("stopped", 2)
    assert train(tmp_path, federation, task, Notes()).finished


def test_cells_side_by_side_all_stop(tmp_path: Path, federation: fl.Federation, task: fl.Task) -> None:
    notes = Notes(lambda round: write_wish(tmp_path, "stop") if round == 1 else None)
    made = {"a": fl.FedAvg(lr=0.1), "b": fl.FedAvg(lr=0.2)}
    result = fl.run(federation, task, made, 50, out=tmp_path, progress=notes, workers=2, cells=2)
    assert result.status == "stopped"
    assert sum(said.startswith("Stopping after this round") for said in notes.said) == 1


def test_a_wish_needs_a_run_and_hidden_characters_of_the_time_are_shown(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run folder"):
        write_wish(tmp_path, "pause")
    (tmp_path / FILE).write_text(json.dumps({"wish": "pause", "time": "\x1b[2J"}))
    assert read_control(tmp_path)["time"] == "\\x1b[2J"
