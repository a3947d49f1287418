"""Work that goes out as assignments and comes back as answers, with real agents in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import TrainingError
from fedloom.experiment.progress import Silent
from fedloom.network.agent.assignment_runner import AssignmentRunner
from fedloom.results.result import Result
from tests.network.conftest import EXPERIMENT, InProcessRun, serial_weights, weights

SMALL = {**EXPERIMENT, "rounds": 2, "evaluate": {"every": 1}}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"scaffold": {}},  # clients keep a state
        {"staged": {"groups": 3}},  # every client gets its own message
        {"peer": {"name": "peer", "weights": "score", "topology": "ring"}},  # clients receive their peers' models
    ],
)
def test_the_bits_are_those_of_the_serial_backend(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    values = {**SMALL, "algorithm": algorithm}
    result = InProcessRun(tmp_path / "net", values, {}, {}).run(Silent())
    assert result.status == "done"
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


def test_what_a_client_measures_is_in_the_results(tmp_path: Path) -> None:
    InProcessRun(tmp_path / "net", SMALL, {}, {}).run(Silent())
    serial_weights(SMALL, tmp_path / "serial")

    def rows(folder: str) -> list[tuple[Any, ...]]:
        found = Result.read(tmp_path / folder).rows("clients")
        return sorted((row["round"], row["client"], row["split"], row["metric"], row["value"]) for row in found)

    assert "accuracy" in (Result.read(tmp_path / "net").report()).read_text()
    assert rows("net")
    assert rows("net") == rows("serial")


def test_answers_that_were_accepted_before_a_crash_are_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**SMALL, "algorithm": {"scaffold": {}}}
    trained: list[tuple[int, int]] = []
    train = AssignmentRunner.train

    def crash_in_round_two(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        if (assignment.round, one.client) == (2, 3) and (2, 3) not in trained:
            trained.append((2, 3))
            raise KeyboardInterrupt
        trained.append((assignment.round, one.client))
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", crash_in_round_two)
    with pytest.raises(KeyboardInterrupt):
        InProcessRun(tmp_path / "net", values, {}, {}).run(Silent())
    assert trained == [(1, 0), (1, 2), (1, 1), (1, 3), (2, 0), (2, 2), (2, 1), (2, 3)]
    InProcessRun(tmp_path / "net", values, {}, {}).run(Silent())
    assert trained[8:] == [(2, 3)]
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


def test_a_round_below_its_quorum_is_abandoned_and_the_next_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = AssignmentRunner.train

    def fail_in_round_one(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        if assignment.round == 1 and one.client != 0:
            raise TrainingError("out of memory")
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", fail_in_round_one)
    run = InProcessRun(tmp_path / "net", SMALL, {}, {}, quorum=0.5)
    assert run.run(Silent()).status == "done"
    assert "fedavg: round 1 is abandoned, because 1 of 4 clients answered and 2 are needed" in run.said
    assert "site-1 failed: out of memory" in run.said


def test_when_no_client_can_do_its_work_the_run_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        raise TrainingError("out of memory")

    monkeypatch.setattr(AssignmentRunner, "train", fail)
    with pytest.raises(TrainingError, match=r"Round 1: no client could do its work. out of memory"):
        InProcessRun(tmp_path / "net", SMALL, {}).run(Silent())


def test_an_update_above_the_norm_bound_costs_its_client_the_round(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"Round 1: no client could do its work. norm: the change of model"):
        InProcessRun(tmp_path / "net", SMALL, {}, norm_bound=1e-9).run(Silent())
