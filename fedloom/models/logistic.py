"""Linear models."""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.models.mlp import check_sizes


class Logistic(nn.Module):
    """One linear layer: logistic regression with cross-entropy, linear regression with mse and classes = 1."""

    def __init__(self, features: int, classes: int = 2) -> None:
        super().__init__()
        check_sizes("logistic", features=features, classes=classes)
        self.out = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per class, or the predicted number."""
        logits: Tensor = self.out(x.flatten(1))
        return logits
