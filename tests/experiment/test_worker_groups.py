"""How clients are computed, and what is recorded about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom import machine
from fedloom.errors import InputError, StoreError
from fedloom.experiment import worker_groups
from fedloom.experiment.progress import Silent
from fedloom.experiment.store import Store
from tests.experiment.small_run import StopAfter, run


class LSTM(nn.Module):
    """Torch's own, which cannot be vmapped."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x.unsqueeze(-1))[0][:, -1])


def test_what_cannot_be_computed_side_by_side_is_computed_one_by_one_and_the_reason_is_kept(
    federation: fl.Federation, tmp_path: Path
) -> None:
    settings = {"algorithms": {"fedavg": fl.FedAvg(batch_size=4)}, "backend": "vector", "workers": 1}
    grouped, plain = (
        run(federation, fl.Task(LSTM), tmp_path / str(group), rounds=2, group=group, **settings) for group in (3, 1)
    )
    assert grouped.weights_sha256 == plain.weights_sha256
    with Store(grouped.folder, read_only=True) as store:
        assert store.fact("setup")["group"] == 1
        assert "vmap" in store.fact("one by one")
    with Store(plain.folder, read_only=True) as store:
        assert store.fact("one by one") is None, "nobody asked for it"


def test_a_run_of_an_older_version_whose_setup_has_other_names_can_be_extended(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    short = run(federation, task, tmp_path / "r", rounds=1)
    with Store(short.folder) as store:
        store.set_fact("setup", {**store.fact("setup"), "compile": False})
    longer = run(federation, task, tmp_path / "r", rounds=2)
    assert longer.weights_sha256 == run(federation, task, tmp_path / "whole", rounds=2).weights_sha256


def test_changed_data_is_refused(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    described = {"data": "by name only"}
    run(federation, task, tmp_path, description=described, should_stop=StopAfter(1))
    other = fl.Federation.from_arrays(federation.x + 1, federation.y, clients=3)
    with pytest.raises(StoreError, match="data has changed"):
        run(other, task, tmp_path, description=described)


def test_a_model_that_cannot_be_grouped_says_why(federation: fl.Federation, tmp_path: Path) -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x + torch.rand_like(x))

    notes: list[str] = []

    class Listening(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    settings = {"backend": "vector", "workers": 1, "group": 3, "progress": Listening(), "algorithms": fl.FedAvg()}
    result = run(federation, fl.Task(Drawing), tmp_path, rounds=1, **settings)
    assert result.status == "done"
    assert any("one by one" in note and "global generator" in note for note in notes)


def test_workers_that_need_more_memory_than_there_is_are_refused_if_you_asked_for_them(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_groups, "working_bytes", lambda model, group: 1_000_000_000)
    monkeypatch.setattr(machine, "free_memory", lambda: 1_200_000_000)
    message = r"2 worker processes need about 2\.0 GB for .*, and 1\.2 GB are free\. Use \[run\] workers = 1\."
    with pytest.raises(InputError, match=message):
        run(federation, task, tmp_path / "two", rounds=1, backend="vector", workers=2)
    assert run(federation, task, tmp_path / "one", rounds=1, backend="vector", workers=1).finished
    monkeypatch.setattr(machine, "cores", lambda: 2)
    notes = Notes()
    assert run(federation, task, tmp_path / "auto", rounds=1, backend="vector", progress=notes).finished
    assert any("Use [run] workers = 1 if they are killed" in note for note in notes.texts)


class Notes(Silent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_without_worker_processes_a_run_says_so_and_computes_the_same(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(machine, "has_worker_processes", lambda: False)  # as on Windows
    monkeypatch.setattr(Silent, "note", lambda self, text: notes.append(text))
    found = run(federation, task, tmp_path / "vector", rounds=2, backend="vector", workers=2)
    assert notes == ["Worker processes need Linux or macOS: this run computes in one process, with the same results."]
    assert found.weights_sha256 == run(federation, task, tmp_path / "serial", rounds=2).weights_sha256
