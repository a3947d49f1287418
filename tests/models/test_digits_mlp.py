"""The net for digits has one hidden layer with ReLU."""

from __future__ import annotations

import torch

from fedloom.models import build


def test_a_hidden_layer_that_is_negative_leaves_only_the_last_bias() -> None:
    model = build("digits_mlp")
    with torch.no_grad():
        model.hidden.weight.fill_(-1.0)
        model.hidden.bias.zero_()
    assert model(torch.ones(2, 8, 8)).tolist() == [model.out.bias.tolist()] * 2
