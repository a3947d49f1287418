"""A dense net of any widths computes what its layers say."""

from __future__ import annotations

import torch

from fedloom.models import build
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
