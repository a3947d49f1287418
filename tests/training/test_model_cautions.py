"""Probable mistakes in models are named."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.task import Task
from fedloom.training.probe import probe
from tests.conftest import FEATURES, Dense, federation


class Soft(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


class InAList(nn.Module):
    """Keeps its layers where torch does not find them, unless they are also attributes."""

    def __init__(self, also: bool = False) -> None:
        super().__init__()
        self.layers = [nn.Linear(FEATURES, 4), nn.Tanh()]
        self.last = nn.Linear(4, 3)
        if also:
            self.first = self.layers[0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Cut(nn.Module):
    """Cuts the gradient of its first layers, and may use its spare layer, or not."""

    def __init__(self, cut: bool, spare: bool = True) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh())
        self.spare, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.cut, self.uses_spare = cut, spare

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.detach() if self.cut else x
        return self.last(self.spare(x) if self.uses_spare else x)


def test_a_model_that_mixes_the_examples_of_a_batch_is_named() -> None:
    class OverRows(Dense):
        dim = 0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).log_softmax(self.dim)

    class OverClasses(OverRows):
        dim = -1

    class Normalised(nn.Sequential):  # mixes in training only, as is usual
        def __init__(self) -> None:
            super().__init__(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))

    data = federation((8, 8))
    assert "depends on the other examples of its batch" in probe(data, Task(OverRows)).caution
    for model in (OverClasses, Normalised, Dense):
        assert "depends on the other examples" not in probe(data, Task(model)).caution


def test_a_layer_that_gets_no_gradient_is_named() -> None:
    data = federation((8, 8))
    said = probe(data, Task(Cut, args={"cut": True})).caution
    assert said.startswith("first.0 gets no gradient in the examples tried, so it is not trained there")
    said = probe(data, Task(Cut, args={"cut": True, "spare": False})).caution
    assert said.startswith("first.0, spare get no gradient in the examples tried, so they are not trained there")
    assert probe(data, Task(Cut, args={"cut": False})).caution == ""

    def frozen() -> Cut:
        model = Cut(cut=True)
        model.first.requires_grad_(False)
        return model

    assert probe(data, Task(frozen)).caution == ""  # as it is meant


def test_layers_in_a_list_are_cautioned_about() -> None:
    data = federation((8, 8))
    assert "InAList.layers holds layers in a list" in probe(data, Task(InAList)).caution
    assert probe(data, Task(InAList, args={"also": True})).caution == ""


def test_a_model_that_ends_in_a_softmax_is_cautioned_about_with_cross_entropy() -> None:
    data = federation((8, 8))
    assert "seems to end in a softmax" in probe(data, Task(Soft)).caution
    assert probe(data, Task(Dense)).caution == ""
    own = Task(Soft, loss=lambda output, target: -output.log().gather(1, target[:, None]).squeeze(1))
    assert probe(data, own).caution == ""


def test_what_keeps_something_outside_of_itself_is_cautioned_about() -> None:
    """A generator of its own or a global variable: results depend on the order in which clients compute."""
    drawn, calls = np.random.default_rng(3), [0]

    class Draws(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.from_numpy(drawn.normal(size=x.shape)).to(x.dtype))

    class Seeded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            noise = np.random.normal(size=x.shape) * random.random()
            return nn.functional.dropout(super().forward(x + torch.from_numpy(noise).to(x.dtype)), 0.3)

    def counting(output: Tensor, labels: Tensor) -> Tensor:
        calls[0] += 1
        return nn.functional.cross_entropy(output, labels) * calls[0]

    data = federation((9, 8))
    classes = len(data.classes)

    def said(model: type[nn.Linear], loss: Any = "cross_entropy") -> str:
        return probe(data, Task(lambda: model(FEATURES, classes), loss=loss)).caution

    for found in (said(Draws), said(nn.Linear, counting)):
        assert found.startswith("The same training step gives other numbers when it is computed again")
    assert said(Seeded) == said(nn.Linear) == ""

    class DrawsLater(Draws):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Linear.forward(self, x) if self.training else super().forward(x)

    found = said(DrawsLater)
    assert found.startswith("The same examples are measured differently when the model is evaluated again: training is")
    assert "measured numbers depend on the order" in found
    assert "training step" not in found
