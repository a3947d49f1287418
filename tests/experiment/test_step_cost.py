"""The cost of a step is measured once, and belongs to the run."""

from pathlib import Path

import pytest

from fedloom.experiment import step_cost
from fedloom.experiment.store import Store
from fedloom.task import Task
from fedloom.training.settings import Training
from tests.conftest import Dense, federation


def test_a_run_keeps_the_number_that_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, task, train = federation((10, 20, 30)), Task(Dense), Training(batch_size=5)
    with Store(tmp_path) as store:
        first = step_cost.step_seconds(store, "fedavg", data, task, train)
        assert first > 0
        monkeypatch.setattr(step_cost, "measure", lambda *_: 7.0)
        assert step_cost.step_seconds(store, "fedavg", data, task, train) == first
        assert step_cost.step_seconds(store, "fedprox", data, task, train) == 7.0
    with Store(tmp_path) as store:  # another process that continues
        assert step_cost.step_seconds(store, "fedavg", data, task, train) == first


def test_long_trainings_are_measured_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = step_cost.Serial.run

    def watched(self: step_cost.Serial, work: step_cost.ClientWork) -> object:
        seen.append(work.algorithm.train.epochs)
        return run(self, work)

    monkeypatch.setattr(step_cost.Serial, "run", watched)
    assert step_cost.measure(federation((40,)), Task(Dense), Training(batch_size=1, epochs=100.0)) > 0
    assert max(seen) * 24 <= step_cost.MOST + 1
