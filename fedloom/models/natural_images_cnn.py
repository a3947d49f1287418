"""The CNN of Samani 2020 for small pictures."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu


class NaturalImagesCNN(nn.Module):
    """Five 3 × 3 convolutions (32-64, pool, 128, pool, 128, pool, 256), dense 256-8, for RGB pictures of 80 × 80."""

    inputs = (3, 80, 80)  # the shape of an example

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3)
        self.second = nn.Conv2d(32, 64, 3)
        self.third = nn.Conv2d(64, 128, 3)
        self.fourth = nn.Conv2d(128, 128, 3)
        self.fifth = nn.Conv2d(128, 256, 3)
        self.hidden = nn.Linear(256 * 6 * 6, 256)
        self.out = nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per class."""
        seen = max_pool2d(relu(self.second(relu(self.first(x)))), 2)
        seen = max_pool2d(relu(self.third(seen)), 2)
        seen = max_pool2d(relu(self.fourth(seen)), 2)
        seen = relu(self.fifth(seen))
        logits: Tensor = self.out(relu(self.hidden(seen.flatten(1))))
        return logits
