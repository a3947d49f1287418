"""The tables of an experiment file."""

from __future__ import annotations

import pytest

from fedloom.errors import InputError
from fedloom.experiment.tables import EvaluateTable, TaskTable


def test_the_usual_metric_depends_on_the_loss() -> None:
    assert TaskTable(loss="mse").metrics == ("mae",)
    assert TaskTable(loss="mse", metrics=("r2",)).metrics == ("r2",)
    assert TaskTable(loss="bce").metrics == TaskTable().metrics == ("accuracy",)


def test_a_target_must_be_one_metric_and_is_needed_to_stop() -> None:
    assert EvaluateTable(stop="target", target={"accuracy": 0.9}).target == {"accuracy": 0.9}
    with pytest.raises(InputError, match="needs a target"):
        EvaluateTable(stop="target")
    with pytest.raises(InputError, match="must name one metric"):
        EvaluateTable(target={"accuracy": 0.9, "auroc": 0.9})
