"""A dense net of any widths computes what its layers say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedloom.errors import InputError
from fedloom.models import build
from fedloom.task import Task
from tests.models.helpers import parameters


def test_an_mlp_computes_what_its_layers_say() -> None:
    model = build("mlp", features=2, hidden=[2], classes=1)
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), ([[1, -1], [2, 0]], [0, 1], [[1, 10]], [5]), strict=True):
            parameter.copy_(torch.tensor(values))
    assert model(torch.tensor([[1.0, 3.0]])).tolist() == [[35.0]]  # relu(-2) + 10 · relu(2 + 1) + 5


def test_an_mlp_without_hidden_layers_is_linear() -> None:
    assert parameters(build("mlp", features=4, hidden=[], classes=3)) == parameters(
        build("logistic", features=4, classes=3)
    )


@pytest.mark.parametrize(("model", "args"), [("logistic", {}), ("mlp", {"hidden": [3]}), ("mlp", {"hidden": []})])
def test_without_features_the_data_gives_the_width(model: str, args: dict[str, Any]) -> None:
    task = Task(model, args={**args, "classes": 2}, example=torch.zeros(1, 4))
    given = build(model, features=4, **args, classes=2)
    assert [leaf.shape for leaf in task.build().parameters()] == [leaf.shape for leaf in given.parameters()]
    with pytest.raises(InputError, match=f"'features' parameter of {model} must be a whole number from 1"):
        build(model, features=0, **args)
