"""The defaults that every backend inherits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import tree
from fedloom.algorithms import LocalOnly
from fedloom.backends.protocol import Backend
from fedloom.federation.work import Work
from fedloom.task import Task
from tests.conftest import Dense


class Idle(Backend):
    def run(self, work: Work) -> Any:
        return None


def test_a_backend_that_only_runs_work_keeps_states_here_and_has_nothing_to_prepare_or_release() -> None:
    own = {"model": {"w": torch.zeros(2)}}
    backend = Idle()
    backend.begin("fedavg", 0, Path("checkpoints"))
    assert backend.keep(own) is own
    backend.close()


def test_it_fingerprints_the_model_of_every_client_that_has_a_state() -> None:
    task = Task(Dense)
    models = {3: task.initial(), 5: tree.zeros_like(task.initial())}
    found = Idle().model_sha256(LocalOnly(), task, {}, {client: {"model": model} for client, model in models.items()})
    assert found == {client: tree.sha256(model) for client, model in models.items()}


def test_a_backend_without_run_is_named() -> None:
    class Empty(Backend):
        pass

    with pytest.raises(NotImplementedError, match="Empty does not define run"):
        Empty().run(None)  # type: ignore[arg-type]
