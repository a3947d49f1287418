"""How clients are computed, and what is recorded about it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom import machine
from fedloom.algorithm import Groups, Step, Tree
from fedloom.errors import InputError, StoreError, TrainingError
from fedloom.experiment import worker_groups
from fedloom.experiment.progress import Silent
from fedloom.experiment.store import Store
from fedloom.experiment.worker_groups import group_count, train_cells
from fedloom.results import report
from fedloom.results.report_warnings import cautions
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from tests.conftest import Dense, federation
from tests.experiment.small_run import StopAfter, run


class LSTM(nn.Module):
    """Torch's own, which cannot be vmapped."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x.unsqueeze(-1))[0][:, -1])


def test_what_an_algorithm_says_about_the_task_is_noted_and_a_caution_of_the_report(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    notes: list[str] = []
    progress = Silent()
    progress.note = notes.append  # type: ignore[method-assign]
    said = "mine: the model has no normalisation layers, so this is FedAvg."
    for rounds in (1, 2):
        result = run(federation, task, tmp_path, rounds, algorithms={"mine": fl.FedBN()}, progress=progress)
    assert notes.count(f"Caution: {said}") == 1
    assert said in cautions(RunData.read(result.folder))


class Typo(fl.FedAvg):
    """Is FedAvg, because nothing calls its method."""

    def corect(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return step.grad


def test_a_misspelt_method_and_algorithms_that_computed_the_same_are_cautions(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    algorithms = {"fedavg": fl.FedAvg(), "mine": Typo(), "prox": fl.FedProx(mu=1.0)}
    result = run(federation, task, tmp_path, 1, algorithms=algorithms)
    found = cautions(RunData.read(result.folder))
    assert "mine: Typo defines `corect`, which fedloom does not call. Did you mean `correct`?" in found
    same = [text for text in found if "ended with the same weights" in text]
    assert [text.partition(" ended")[0] for text in same] == ["fedavg and mine"]


def test_clients_that_are_odd_and_weights_that_differ_are_noted_before_the_first_round(tmp_path: Path) -> None:
    odd = federation([1, 40, 80], seed=3)
    algorithms = {"fedavg": fl.FedAvg(lr=0.1), "scaffold": fl.Scaffold(lr=0.1)}
    notes: list[str] = []
    progress = Silent()
    progress.note = notes.append  # type: ignore[method-assign]
    result = run(odd, fl.Task(Dense), tmp_path, 1, algorithms=algorithms, progress=progress)
    said = " ".join(notes)
    assert "Caution: 1 of 3 clients has only one training example" in said
    assert '(weights = "examples" for fedavg and "uniform" for scaffold), and clients have 1 to' in said
    found = cautions(RunData.read(result.folder))
    assert {*notes} >= {f"Caution: {text}" for text in found if "weights" in text or "only one training" in text}
    assert sum("weights" in text for text in found) == 1


@pytest.mark.parametrize(
    ("sizes", "algorithms"),
    [
        ([40, 40], {"fedavg": fl.FedAvg(), "scaffold": fl.Scaffold()}),  # clients of one size
        ([40, 80], {"fedavg": fl.FedAvg(), "scaffold": fl.Scaffold(weights="examples")}),
        ([40, 80], {"fedavg": fl.FedAvg(), "peer": fl.Peer()}),  # its weights are about neighbours
    ],
)
def test_weights_that_agree_or_do_not_matter_are_not_noted(
    sizes: list[int], algorithms: dict[str, fl.Algorithm], tmp_path: Path
) -> None:
    result = run(federation(sizes, seed=3), fl.Task(Dense), tmp_path, 1, algorithms=algorithms)
    assert not any("weigh clients" in text for text in cautions(RunData.read(result.folder)))


@pytest.mark.slow
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


def test_the_report_says_whether_steps_were_recorded(federation: fl.Federation, tmp_path: Path) -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x)

    class Choosing(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x) * (1.0 if float(x.sum()) < 1e9 else 2.0)  # it reads a value

    said = {}
    for name, model, batch in (("plain", Linear, 4), ("full", Linear, "full"), ("choosing", Choosing, 4)):
        found = run(federation, fl.Task(model), tmp_path / name, 1, algorithms={"fedavg": fl.FedAvg(batch_size=batch)})
        (said[name],) = re.findall(
            r"<dt>Computed</dt>\s*<dd>(.*?)</dd>", report.html(RunData.read(found.folder), [], [])
        )
    assert "steps recorded once and replayed" in said["plain"]
    assert "not recorded and replayed, because every batch has all examples" in said["full"]
    assert re.search("not recorded and replayed, because .*(value|number)", said["choosing"])


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
    for place in ("one", "two"):  # a sweep has many runs, and says it once
        result = run(federation, fl.Task(Drawing), tmp_path / place, rounds=1, **settings)
        assert result.status == "done"
    assert len(["global generator" in note for note in notes if "one by one" in note]) == 1


@pytest.mark.slow
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
    said = "Worker processes need Linux or macOS: this run computes in one process, with the same results."
    assert [text for text in notes if not text.startswith("Caution: ")] == [said]
    assert found.weights_sha256 == run(federation, task, tmp_path / "serial", rounds=2).weights_sha256


ALGORITHMS = {"fedavg": fl.FedAvg(lr=0.2, batch_size=4), "peer": fl.Peer(lr=0.2), "pooled": fl.Pooled(lr=0.1)}
COLUMNS = ("algorithm", "seed", "round", "client", "phase", "split", "metric", "value")


class Heard(Silent):
    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []

    def expect(self, cells: int, rounds: int) -> None:
        self.said.append(("expect", cells, rounds))

    def begin(self, cell: str, done: int, rounds: int) -> None:
        self.said.append(("begin", cell, done))

    def end(self, cell: str, done: bool = True) -> None:
        self.said.append(("end", cell))


@pytest.mark.slow
def test_cells_side_by_side_have_the_same_bits_and_go_on_as_a_whole(tmp_path: Path) -> None:
    def data(seed: int) -> fl.Federation:
        return made.setdefault(seed, federation([12, 9, 15], seed=seed))

    def task(seed: int) -> fl.Task:
        return tasks.setdefault(seed, fl.Task(Dense, seed=seed))

    def run(folder: str, **settings: object) -> Result:
        return fl.run(data, task, ALGORITHMS, rounds=4, seeds=2, out=tmp_path / folder, workers=2, **settings)  # type: ignore[arg-type]

    made: dict[int, fl.Federation] = {}
    tasks: dict[int, fl.Task] = {}
    one, both = run("one", cells=1), run("both", progress=(heard := Heard()))
    assert heard.said[0] == ("expect", 6, 4)
    assert heard.said[1][0] == heard.said[2][0] == "begin"  # two under way at once
    assert both.weights_sha256 == one.weights_sha256
    assert [[row[c] for c in COLUMNS] for row in both.rows()] == [[row[c] for c in COLUMNS] for row in one.rows()]
    rounds = iter(range(1000))
    parts = run("parts", should_stop=lambda: next(rounds) >= 5)
    assert parts.status == "stopped"
    parts = run("parts")
    assert parts.weights_sha256 == one.weights_sha256


@dataclass
class Cell:
    """Waits at the barrier for the other cells, then ends as it is told."""

    meet: threading.Barrier | None = None
    fails: bool = False
    told_to_stop: list[bool] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    def train(self, group: str, should_stop: Callable[[], bool]) -> bool:
        self.groups.append(group)
        if self.meet is not None:
            self.meet.wait(10)
        if self.fails:
            raise TrainingError("as asked")
        self.told_to_stop.append(should_stop())
        return not self.told_to_stop[-1]


def test_every_cell_is_trained_once_in_some_lane() -> None:
    meet = threading.Barrier(2)
    cells = [Cell(meet), Cell(meet), *(Cell() for _ in range(5))]
    train_cells(cells, ["a", "b"], lambda: False, [])
    assert [len(cell.groups) for cell in cells] == [1] * 7
    assert {cell.groups[0] for cell in cells[:2]} == {"a", "b"}


def test_a_failure_is_raised_and_nothing_more_begins() -> None:
    meet = threading.Barrier(2)
    cells = [Cell(meet, fails=True), Cell(meet, fails=True), Cell()]
    with pytest.raises(TrainingError, match="as asked"):
        train_cells(cells, ["a", "b"], lambda: False, [])
    assert cells[2].groups == []


def test_being_asked_to_stop_leaves_the_rest_for_later() -> None:
    cells = [Cell(), Cell(), Cell(), Cell()]
    train_cells(cells, ["a", "b"], lambda: True, [])
    assert sum(bool(cell.groups) for cell in cells) <= 2
    alone = [Cell(), Cell()]
    train_cells(alone, ["a"], lambda: True, [])
    assert alone[1].groups == []


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no such signal")
def test_an_interruption_waits_for_the_threads_of_cells() -> None:
    killed, ended = threading.Event(), []

    class Slow:
        def train(self, group: str, should_stop: Callable[[], bool]) -> bool:
            if group == "b":
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGUSR1)
            killed.wait(10)
            time.sleep(0.6 if group == "a" else 0)
            ended.append(group)
            return False

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            train_cells([Slow(), Slow()], ["a", "b"], lambda: False, [killed.set])
        assert sorted(ended) == ["a", "b"], "what the threads use is closed as soon as train_cells returns"
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("cells", "workers", "data", "expected"),
    [(6, 1, 0, 1), (6, 2, 0, 2), (5, 4, 0, 1), (9, 4, 0, 4), (4, 2, 800_000_000, 1), (4, 8, 0, 4), (0, 4, 0, 1)],
)
def test_lanes_leave_no_worker_idle_for_long(cells: int, workers: int, data: int, expected: int) -> None:
    assert group_count(cells, workers, data) == expected


def test_a_softmax_before_cross_entropy_is_noted_once_and_is_a_caution_of_the_report(
    federation: fl.Federation, tmp_path: Path
) -> None:
    notes: list[str] = []
    progress = Silent()
    progress.note = notes.append  # type: ignore[method-assign]
    linear = nn.Linear(federation.x[0].numel(), len(federation.classes))
    task = fl.Task(nn.Sequential(nn.Flatten(), linear, nn.Softmax(-1)))
    result = run(federation, task, tmp_path, 1, progress=progress)
    assert len([note for note in notes if "seems to end in a softmax" in note]) == 1
    assert any("seems to end in a softmax" in text for text in cautions(RunData.read(result.folder)))


@pytest.mark.parametrize("cells", [1, 2])
def test_what_prepares_examples_is_kept_for_every_seed_though_seeds_share_the_data(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, cells: int
) -> None:
    run(federation, task, tmp_path, seeds=3, rounds=1, backend="vector", workers=cells, cells=cells)
    kept = [(tmp_path / f"preprocessing-{seed}.json").read_text() for seed in (1, 2, 3)]
    assert len(set(kept)) == 1
    assert set(RunData.read(tmp_path).data_fingerprints) == {"1", "2", "3"}


def test_later_seeds_do_not_begin_with_data_that_has_changed_since_the_first(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    described = {"data": "by name only"}
    run(federation, task, tmp_path, seeds=2, cells=1, rounds=1, description=described, should_stop=StopAfter(1))
    other = fl.Federation.from_arrays(federation.x + 1, federation.y, clients=3)
    with pytest.raises(StoreError, match="data has changed"):
        run(other, task, tmp_path, seeds=2, cells=1, rounds=1, description=described)
