"""The outputs of a dense net whose experiment file does not say how many: the labels of a table decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedloom.data.preprocessing import Preprocessing
from fedloom.experiment.tables import TaskTable
from fedloom.metrics import NUMBER_LOSSES

FITTED = ("mlp", "logistic")  # models that take any number of features, so that their outputs may follow, too


def model_args(table: TaskTable, labels: Callable[[], Preprocessing | None]) -> dict[str, Any]:
    """Return the arguments of a model: one output for each class, or for each number to predict, if none are given.

    `labels` is what is known of them: nothing at a site of several, whose classes may not be those of the others.
    """
    if table.model not in FITTED or "classes" in table.args:
        return table.args
    found = labels() if table.loss in ("cross_entropy", "bce", *NUMBER_LOSSES) else None
    if found is None or not found.label:
        return table.args
    outputs = len(found.classes) if table.loss == "cross_entropy" else len(found.label)
    return {**table.args, "classes": outputs} if outputs > 1 or table.loss != "cross_entropy" else table.args
