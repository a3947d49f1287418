"""A small net for the digits that come with scikit-learn."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu


class DigitsMLP(nn.Module):
    """Dense 64-32-10 with ReLU, for the 8 × 8 digits of scikit-learn."""

    inputs = (64,)  # the shape of an example

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per digit."""
        logits: Tensor = self.out(relu(self.hidden(x.flatten(1))))
        return logits
