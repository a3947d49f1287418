"""Learning-rate schedules against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from fedloom.errors import InputError
from fedloom.training.rate_schedule import RateSchedule

LR = 0.3
CASES: dict[str, tuple[dict[str, Any], Callable[..., lr_scheduler.LRScheduler]]] = {
    "step": ({"every": 3, "factor": 0.5}, lambda o: lr_scheduler.StepLR(o, 3, 0.5)),
    "exponential": ({"factor": 0.9}, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "cosine": ({"over": 8, "end": 0.1}, lambda o: lr_scheduler.CosineAnnealingLR(o, 8, 0.1 * LR)),
}


def torchs(make: Callable[..., lr_scheduler.LRScheduler], steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    schedule, found = make(optimizer), []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", CASES)
def test_factors_are_those_of_torch(name: str) -> None:
    keys, make = CASES[name]
    found = [LR * RateSchedule(name=name, **keys).at(time) for time in range(9)]  # type: ignore[arg-type]
    assert found == pytest.approx(torchs(make, 9), rel=1e-12)


def test_a_cosine_keeps_its_end() -> None:
    assert [RateSchedule(name="cosine", over=4, end=0.25).at(time) for time in (4, 5, 99)] == [0.25] * 3
    assert RateSchedule(name="cosine", over=4).at(4) == 0.0


def test_a_cosine_over_local_steps_ends_with_the_round() -> None:
    assert [RateSchedule(name="cosine").at(time, 5) for time in range(5)] == [
        RateSchedule(name="cosine", over=5).at(time) for time in range(5)
    ]
    assert RateSchedule(name="cosine", warmup=1).at(1, 5) == 1.0


def test_what_follows_a_warm_up_is_counted_from_its_end() -> None:
    plain, warm = RateSchedule(name="exponential", factor=0.5), RateSchedule(name="exponential", factor=0.5, warmup=4)
    assert [warm.at(time) for time in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [warm.at(time) for time in range(4, 9)] == [plain.at(time) for time in range(5)]
    assert [RateSchedule(warmup=2).at(time) for time in range(4)] == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "A schedule needs a name"),
        ({"name": "step", "every": 3}, "needs 'factor'"),
        ({"name": "exponential"}, "needs 'factor'"),
        ({"name": "exponential", "factor": 0.5, "every": 2}, "has no 'every'. Got 2 for it"),
        ({"name": "cosine", "factor": 0.5}, "has no 'factor'"),
        ({"name": "cosin"}, "Did you mean 'cosine'"),
        ({"name": "step", "every": 0, "factor": 0.5}, "must be at least 1"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RateSchedule(**keys)
