"""The 2NN of McMahan et al. 2017."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu


class Mnist2NN(nn.Module):
    """Dense 784-200-200-10 with ReLU, for MNIST."""

    inputs = (1, 28, 28)  # the shape of an example

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(784, 200)
        self.second = nn.Linear(200, 200)
        self.out = nn.Linear(200, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per digit."""
        logits: Tensor = self.out(relu(self.second(relu(self.first(x.flatten(1))))))
        return logits
