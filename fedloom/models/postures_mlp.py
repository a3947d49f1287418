"""The dense net of Samani 2020 for hand postures."""

from __future__ import annotations

from fedloom.models.mlp import MLP


class PosturesMLP(MLP):
    """Dense 36-512-128-32-5 with ReLU, for the coordinates of MoCap Hand Postures."""

    inputs = (36,)  # the shape of an example

    def __init__(self) -> None:
        super().__init__(features=36, hidden=(512, 128, 32), classes=5)
