"""From time to time a step is computed in two ways, and a run stops where they do not agree."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from fedloom import user_code
from fedloom.algorithms import FedAvg
from fedloom.errors import TrainingError
from fedloom.federation.engine import fit
from fedloom.federation.work import Place
from fedloom.task import Task
from fedloom.testing.ways import InProcess
from fedloom.training import fast_paths
from fedloom.training.clients import Clients
from fedloom.training.fast_paths import WATCHED, must_agree, watched_step
from fedloom.training.lanes import LaneTrainer
from fedloom.training.probe import probe
from tests.conftest import ALL_TRAIN, Dense, Normed, facts, federation

DATA = federation((24, 16, 40), split=ALL_TRAIN)
CALLS = {"n": 0}


class TurnsAround(Dense):
    """Goes another way after some calls, which it counts in a hidden place."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS["n"] += 1
        return super().forward(x) * (1 if CALLS["n"] < 60 else -1)


def backend(task: Task, group: int = 1) -> InProcess:
    return InProcess(Place(DATA, task, probe(DATA, task).setup(group=group)), ())


def test_one_of_many_trainings_is_watched_at_one_of_its_steps() -> None:
    data = Clients(DATA, tuple(range(DATA.clients)), seed=1)
    drawn = [watched_step(replace(data, round=round), 0, 7) for round in range(40_000)]
    assert 0.5 < sum(step >= 0 for step in drawn) / (40_000 / WATCHED) < 1.5
    assert set(drawn) == {-1, *range(7)}


OWN = """
from fedloom.algorithm import add, sub
from fedloom.algorithms.fedavg import FedAvg


class Mine(FedAvg):
    def correct(self, step, shared, own):
        return add(step.grad, sub(step.params, step.start), scale=0.1)
"""


def test_steps_of_your_own_class_are_recorded_once_though_every_round_sends_its_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    sent = cloudpickle.dumps(user_code.code("mine.py:Mine", tmp_path)(batch_size=8))
    task = Task(Dense)
    here = backend(task)
    fast_paths.forget_trainers()
    for _ in range(2):
        list(fit(DATA, task, pickle.loads(sent), 1, backend=here))
    assert len(fast_paths._trainers) == 1


def test_a_replayed_step_that_the_model_no_longer_takes_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_paths, "WATCHED", 1)
    CALLS["n"] = 0
    task = Task(TurnsAround)
    with pytest.raises(TrainingError, match="the recorded step gave something else than the plain step"):
        list(fit(DATA, task, FedAvg(batch_size=8), 40, backend=backend(task)))


def test_lanes_that_do_not_train_as_clients_alone_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_paths, "WATCHED", 1)
    task = Task(Dense)
    running = backend(task, group=2)
    right = LaneTrainer.gradients

    def wrong(self: LaneTrainer, *given: Any) -> Any:
        gradient, losses, buffers = right(self, *given)
        return {name: leaf * 1.1 for name, leaf in gradient.items()}, losses, buffers

    monkeypatch.setattr(LaneTrainer, "gradients", wrong)
    with pytest.raises(TrainingError, match="Training clients side by side gave something else"):
        list(fit(DATA, task, FedAvg(batch_size=8), 1, backend=running))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    "settings", [{"lr": 0.1}, {"lr": 0.01, "optimizer": "adam"}, {"lr": 0.1, "momentum": 0.9, "clip": 0.5}], ids=str
)
def test_watching_changes_nothing(group: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    records = []
    for watched in (1, 10**9):
        monkeypatch.setattr(fast_paths, "WATCHED", watched)
        task = Task(Normed)
        algorithm = FedAvg(batch_size=6, epochs=2.0, **settings)
        records.append([facts(r) for r in fit(DATA, task, algorithm, 3, backend=backend(task, group))])
    assert records[0] == records[1]


def test_rounding_is_allowed_and_more_is_not() -> None:
    before = {"w": torch.zeros(100)}
    plain = {"w": torch.ones(100)}
    must_agree(before, plain, {"w": torch.ones(100) * (1 + 1e-6)}, "it")
    with pytest.raises(TrainingError, match=r"it gave something else.*0\.1 apart, and the step is 10 long"):
        must_agree(before, plain, {"w": torch.ones(100) * 1.01}, "it")
    counters = {"n": torch.tensor(3)}
    with pytest.raises(TrainingError):
        must_agree(counters, counters, {"n": torch.tensor(4)}, "it")
