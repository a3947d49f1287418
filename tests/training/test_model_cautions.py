"""Probable mistakes in models are named."""

from __future__ import annotations

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
