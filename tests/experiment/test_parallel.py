"""Cells side by side give what they give one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import fedloom as fl
from fedloom.errors import TrainingError
from fedloom.experiment import parallel
from fedloom.experiment.progress import Silent
from fedloom.results.result import Result
from tests.conftest import Dense, federation

ALGORITHMS = {"fedavg": fl.FedAvg(lr=0.2, batch_size=4), "peer": fl.Peer(lr=0.2), "pooled": fl.Pooled(lr=0.1)}
COLUMNS = ("algorithm", "seed", "round", "client", "phase", "split", "metric", "value")


class Heard(Silent):
    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []

    def expect(self, cells: int, rounds: int) -> None:
        self.said.append(("expect", cells, rounds))

    def begin(self, cell: str, done: int, rounds: int) -> None:
        self.said.append(("begin", cell, done))

    def end(self, cell: str) -> None:
        self.said.append(("end", cell))


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
    parallel.train(cells, ["a", "b"], lambda: False, [])
    assert [len(cell.groups) for cell in cells] == [1] * 7
    assert {cell.groups[0] for cell in cells[:2]} == {"a", "b"}


def test_a_failure_is_raised_and_nothing_more_begins() -> None:
    meet = threading.Barrier(2)
    cells = [Cell(meet, fails=True), Cell(meet, fails=True), Cell()]
    with pytest.raises(TrainingError, match="as asked"):
        parallel.train(cells, ["a", "b"], lambda: False, [])
    assert cells[2].groups == []


def test_being_asked_to_stop_leaves_the_rest_for_later() -> None:
    cells = [Cell(), Cell(), Cell(), Cell()]
    parallel.train(cells, ["a", "b"], lambda: True, [])
    assert sum(bool(cell.groups) for cell in cells) <= 2
    alone = [Cell(), Cell()]
    parallel.train(alone, ["a"], lambda: True, [])
    assert alone[1].groups == []


@pytest.mark.parametrize(
    ("cells", "workers", "data", "expected"),
    [(6, 1, 0, 1), (6, 2, 0, 2), (5, 4, 0, 1), (9, 4, 0, 4), (4, 2, 800_000_000, 1), (4, 8, 0, 4), (0, 4, 0, 1)],
)
def test_lanes_leave_no_worker_idle_for_long(cells: int, workers: int, data: int, expected: int) -> None:
    assert parallel.group_count(cells, workers, data) == expected
