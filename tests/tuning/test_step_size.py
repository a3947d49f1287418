"""A check says that steps are too large before a run diverges, and nothing about usual ones."""

from __future__ import annotations

from typing import Any

import pytest

from fedloom.experiment.experiment_file import parse
from fedloom.tuning.estimate import estimate

DIGITS = {"data": {"source": "digits", "partition": {"name": "iid", "clients": 10}}}


def said(**tables: Any) -> list[str]:
    return [text for text in estimate(parse({**DIGITS, **tables})).cautions if "may diverge" in text]


@pytest.mark.parametrize(
    ("train", "is_said"),
    [
        ({"lr": 100.0}, True),
        ({"lr": 10.0}, True),
        ({"lr": 1.0, "optimizer": "adam"}, True),
        ({"lr": 1e38, "batch_size": 2}, True),  # the loss is infinite
        ({}, False),
        ({"lr": 1.0}, False),
        ({"lr": 0.5, "batch_size": 1, "momentum": 0.9}, False),
        ({"lr": 0.01, "optimizer": "adam"}, False),
        ({"lr": 100.0, "clip": 0.01}, False),
    ],
)
def test_steps_that_explode_are_named_before_the_run(train: dict[str, Any], is_said: bool) -> None:
    found = said(train=train)
    assert bool(found) == is_said
    if is_said:
        assert found[0].startswith("fedavg: in a rehearsal, local steps raised the training loss to ")
        assert f"A smaller lr than {train['lr']:g} may help" in found[0]


def test_only_algorithms_with_such_steps_are_named() -> None:
    found = said(algorithm={"calm": {"name": "fedavg"}, "wild": {"name": "fedprox", "lr": 100.0}, "snes": {}})
    assert [text.partition(":")[0] for text in found] == ["wild"]
