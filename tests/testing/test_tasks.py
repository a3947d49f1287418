"""`check_task` tells users whether their model and loss are trained as plain torch trains them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.data.federation import Federation
from fedloom.data.split import Split
from fedloom.errors import FedloomError
from fedloom.task import Task
from fedloom.testing import check_task, plain_loop, tasks
from fedloom.testing.tasks import a_few
from fedloom.training.settings import Training
from tests.conftest import Cumulative, Dense, Normed, federation, slow_after
from tests.odd.nets.draws import AddsNoise
from tests.odd.nets.state import BuildsInForward
from tests.odd.table import Net

DATA = federation((30, 60, 45))


class OnlySinglePrecision(Net):
    """Does not run in float64."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x.float())))


@pytest.mark.parametrize(
    ("model", "replayed", "grouped"),
    slow_after(
        1,
        [
            (AddsNoise, "draws from torch's generator", "draws from a global generator"),
            (Normed, "", ""),
            (Cumulative, "Python numbers out of values", "vmap"),
        ],
    ),
)
def test_a_report_says_how_a_task_can_be_computed(model: Any, replayed: str, grouped: str) -> None:
    report = check_task(Task(model), DATA)
    assert report.furthest <= report.tolerance == 1e-9
    assert replayed in report.replayed
    assert grouped in report.grouped
    assert bool(report.replayed) == bool(replayed)
    assert bool(report.grouped) == bool(grouped)
    assert f"{len(report.ways)} ways" in str(report)


@pytest.mark.slow
def test_it_is_also_tried_on_processes() -> None:
    report = check_task(Task(Normed), DATA, workers=2, training=Training(optimizer="adam", lr=0.01, batch_size=3))
    assert {"2 worker processes", "2 worker processes, pairs of clients side by side"} < report.ways.keys()


def test_labels_that_are_scaled_for_training_are_no_difference() -> None:
    x = np.random.default_rng(0).normal(size=(60, 3))
    data = Federation.from_arrays(x, 50 * x.sum(1) + 100, clients=3, scale_target=True)
    task = Task(nn.Linear, args={"in_features": 3, "out_features": 1}, loss="mse", metrics=["mae"])
    assert check_task(task, data).furthest < 1e-9


def test_a_difference_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = plain_loop.make_optimizer
    monkeypatch.setattr(
        plain_loop, "make_optimizer", lambda training, parameters: real(training.replace(weight_decay=0.3), parameters)
    )
    with pytest.raises(AssertionError, match=r"not trained as plain torch .* step by step: '.* differs by"):
        check_task(Task(Normed), DATA)


def test_a_model_for_single_precision_is_compared_in_it() -> None:
    report = check_task(Task(OnlySinglePrecision), DATA)
    assert (report.precision, report.tolerance) == ("float32", 1e-3)


def test_the_weights_of_a_loss_are_converted_with_the_model() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]))
    assert check_task(Task(Normed, loss=loss), DATA).precision == "float64"


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer": "adamw", "weight_decay": 0.1, "schedule": {"name": "step", "every": 1, "factor": 0.5}},
        {"optimizer": "rmsprop", "momentum": 0.5, "centered": True, "local_schedule": {"name": "cosine", "warmup": 2}},
        {"optimizer": "nesterov", "momentum": 0.9, "schedule": {"warmup": 3}, "optimizer_state": "keep"},
        {"clients": [{"name": "client-1", "lr": 0.05, "epochs": 3.0}], "schedule": {"name": "cosine", "over": 2}},
        {"clients": [{"name": "client-1", "batch_size": 3}, {"name": "client-2", "batch_size": "full"}]},
    ],
    ids=lambda keys: "-".join(keys),
)
def test_optimisers_schedules_and_settings_of_clients_are_those_of_torch_in_every_way(keys: dict[str, Any]) -> None:
    training = Training(**{"lr": 0.02, "epochs": 2.0, "batch_size": 4, **keys})
    report = check_task(Task(Dense), DATA, training=training, workers=2)
    assert report.furthest < 1e-9


def test_what_cannot_be_trained_is_refused_in_plain_words() -> None:
    with pytest.raises(FedloomError):
        check_task(Task(BuildsInForward), DATA)


def test_a_long_check_shows_its_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tasks, "PATIENCE", -1.0)
    check_task(Task(Normed), DATA, rounds=1)
    said = capsys.readouterr().err
    assert "check_task: 1 of 11, one client after another, step by step" in said


@pytest.mark.parametrize("sizes", [(200, 3, 90, 50), (40,), (9, 2, 5)])
def test_a_few_examples_never_leave_a_last_batch_of_one(sizes: tuple[int, ...]) -> None:
    few = a_few(federation(sizes), 4)
    trained = few.sizes("train")
    assert 1 <= few.clients <= 3
    assert all(1 < count <= 11 and count % 4 != 1 for count in trained)
    assert len(few.x) == len(few.y) == few.offsets[-1]


def test_a_federation_without_examples_to_train_on_is_refused() -> None:
    lonely = Federation(torch.zeros(2, 3), torch.zeros(2).long(), np.array([0, 1, 2]), Split(), classes=("a", "b"))
    with pytest.raises(FedloomError, match="at least two training examples"):
        check_task(Task(Normed), lonely)


def test_metrics_that_are_no_means_over_examples_are_compared_too() -> None:
    def once(outputs: np.ndarray, labels: np.ndarray) -> float:
        if not seen:  # as a package does while it is imported
            seen.append(random.random())
        return float("nan") if outputs.argmax(1).any() else 0.5

    seen: list[float] = []
    report = check_task(Task(Normed, metrics=["accuracy", "auroc_macro", "f1_macro", "perplexity", once]), DATA)
    assert report.precision == "float64"
