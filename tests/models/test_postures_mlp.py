"""The net for postures is an MLP of the published widths."""

from __future__ import annotations

from fedloom.models import build


def test_it_has_the_published_widths() -> None:
    shapes = [tuple(layer.weight.shape) for layer in build("postures_mlp").layers]
    assert shapes == [(512, 36), (128, 512), (32, 128), (5, 32)]
