"""A loss that is not finite: the message says whether the initial model or a step is the cause."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedloom.data.federation import Federation
from fedloom.errors import TrainingError
from fedloom.task import Task
from fedloom.training import local
from fedloom.training.clients import Clients
from fedloom.training.local import Training
from fedloom.training.probe import probe
from fedloom.tree import expand
from tests.conftest import Dense, federation


def train(task: Task, data: Federation, training: Training, group: int) -> None:
    """Train as in the first call of the first round."""
    setup = probe(data, task).setup(group=group)
    first = Clients(data, tuple(range(data.clients)), round=1, setup=setup)
    local.train(task, first, expand(task.initial(), data.clients), training)


class Undefined(nn.Module):
    """Gives NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Dense()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) * float("nan")  # type: ignore[no-any-return]


def undefined_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum(1) * float("nan")


def with_infinity(data: Federation) -> Federation:
    return replace(data, x=data.x.index_fill(0, torch.tensor([1]), torch.inf))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("task", "data", "fault"),
    [
        (Task(Dense), with_infinity(federation((6, 5))), r"the client's features have NaN or infinity in them\. Corr"),
        (Task(Undefined), federation((6, 5)), r"the model \(\S*test_finite_loss\.py, line \d+\) gives NaN or infinity"),
        (
            Task(Dense, loss=undefined_loss),
            federation((6, 5)),
            r"the loss \(\S*test_finite_loss\.py, line \d+\) is nan for finite outputs",
        ),
    ],
)
def test_a_loss_that_is_not_finite_before_any_step_is_blamed_on_its_cause(
    task: Task, data: Federation, fault: str, group: int
) -> None:
    with pytest.raises(TrainingError, match=rf"the initial model, before any step, is not finite: {fault}") as failed:
        train(task, data, Training(batch_size=2), group)
    assert "lr" not in str(failed.value)


@pytest.mark.parametrize("group", [1, 2])
def test_a_loss_that_a_step_makes_infinite_asks_for_a_smaller_lr(group: int) -> None:
    with pytest.raises(TrainingError, match=r"the loss is \w+\. A smaller lr or a clip may help\.$"):
        train(Task(Dense), federation((6, 5)), Training(lr=1e38, epochs=9, batch_size=2), group)


def test_a_regression_that_diverges_is_told_of_scaled_targets() -> None:
    made = federation((6, 5))
    numbers = replace(made, classes=(), y=made.y.float() * 1e6)
    with pytest.raises(TrainingError, match=r"may help\. So may scale_target = true in \[data\], if labels are large"):
        train(Task("logistic", loss="mse", args={"classes": 1}), numbers, Training(lr=1e38, epochs=9, batch_size=2), 1)
