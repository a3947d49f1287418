"""The linear model is one matrix and one bias."""

from __future__ import annotations

import torch

from fedloom.models import build


def test_it_is_a_matrix_and_a_bias() -> None:
    model = build("logistic", features=2, classes=2)
    with torch.no_grad():
        model.out.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, -1.0]]))
        model.out.bias.copy_(torch.tensor([0.5, 3.0]))
    assert model(torch.tensor([[[3.0], [4.0]]])).tolist() == [[11.5, -1.0]]  # an example of any shape is flat
