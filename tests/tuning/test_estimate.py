"""Estimates: which work they count."""

from __future__ import annotations

from typing import Any

import pytest

from fedloom.experiment import experiment_file
from fedloom.tuning import estimate


@pytest.mark.parametrize(
    ("evaluate", "tested"),
    [
        ({}, 100),
        ({"server": ["test"]}, 100),
        ({"server": []}, 0),
        ({"server": ["train", "test"]}, 1697 + 100),  # train: of all clients
    ],
)
def test_only_what_is_measured_is_counted(
    monkeypatch: pytest.MonkeyPatch, evaluate: dict[str, Any], tested: int
) -> None:
    monkeypatch.setattr(estimate, "_time_step", lambda *_: (3.0, 1))  # a second forward, two backward
    experiment = experiment_file.parse(
        {
            "data": {"partition": {"name": "iid", "clients": 1}, "split": [1, 0, 0], "server": 100},
            "evaluate": {"splits": [], **evaluate},
            "run": {"backend": "serial"},
        }
    )
    training = 1697 * 3.0
    assert estimate.estimate(experiment).seconds_a_round == pytest.approx(training + tested, abs=0.1)
