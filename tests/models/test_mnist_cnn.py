"""The CNN has the published layers and takes images of any shape."""

from __future__ import annotations

import pytest
import torch

from fedloom.models import build
from tests.models.helpers import parameters


@pytest.mark.parametrize("shape", [(28, 28), (1, 28, 28), (784,)])
def test_images_may_come_in_any_shape(shape: tuple[int, ...]) -> None:
    model, x = build("mnist_cnn"), torch.rand(2, 784)
    assert torch.equal(model(x.reshape(2, *shape)), model(x))


def test_it_has_the_published_layers() -> None:
    counts = {name: parameters(part) for name, part in build("mnist_cnn").named_children()}
    assert counts == {"first": 832, "second": 51_264, "hidden": 1_606_144, "out": 5_130}
