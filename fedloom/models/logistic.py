"""Linear models."""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.models.mlp import check_sizes, linear


class Logistic(nn.Module):
    """One linear layer: logistic regression with cross-entropy, linear regression with mse and classes = 1."""

    def __init__(self, features: int | None = None, classes: int = 2) -> None:
        super().__init__()
        check_sizes("logistic", classes=classes)
        self.out = linear("logistic", features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per class, or the predicted number."""
        logits: Tensor = self.out(x.flatten(1))
        return logits
