"""The CNN of McMahan et al. 2017."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu


class MnistCNN(nn.Module):
    """Two 5 × 5 convolutions of 32 and 64 channels, each with ReLU and pooling, then dense 512-10, for MNIST."""

    inputs = (1, 28, 28)  # the shape of an example

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 5, padding=2)
        self.second = nn.Conv2d(32, 64, 5, padding=2)
        self.hidden = nn.Linear(64 * 7 * 7, 512)
        self.out = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per digit. Images may be flat, and may lack the channel dimension."""
        seen = max_pool2d(relu(self.first(x.reshape(-1, 1, 28, 28))), 2)
        seen = max_pool2d(relu(self.second(seen)), 2)
        logits: Tensor = self.out(relu(self.hidden(seen.flatten(1))))
        return logits
