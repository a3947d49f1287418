"""Models that draw: dropout of every kind, noise, gumbel, stochastic depth."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.odd.table import CLASSES, Net, odd

DROPOUT = "dropout"


class Dropped(Net):
    """A dropout layer between two others."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(torch.tanh(self.first(x))))


class Channels(nn.Module):
    """Dropout of whole channels of pictures."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.drop = drop
        self.out = nn.Linear(4 * 36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(torch.tanh(self.conv(x))).flatten(1))


@odd(DROPOUT, quick=True)
def dropout() -> nn.Module:
    return Dropped(nn.Dropout(0.4))


@odd(DROPOUT)
def alpha_dropout() -> nn.Module:
    return Dropped(nn.AlphaDropout(0.3))


@odd(DROPOUT)
class Dropout1d(Net):
    def forward(self, x: Tensor) -> Tensor:
        steps = F.dropout1d(x.reshape(len(x), 4, 4), 0.4, self.training)
        return self.out(torch.tanh(self.first(steps.flatten(1))))


@odd(DROPOUT, data="pictures")
def dropout_2d() -> nn.Module:
    return Channels(nn.Dropout2d(0.4))


@odd(DROPOUT, data="pictures")
def feature_alpha_dropout() -> nn.Module:
    return Channels(nn.FeatureAlphaDropout(0.3))


@odd(DROPOUT)
class DropsWeights(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(F.linear(x, F.dropout(self.first.weight, 0.3, self.training), self.first.bias)))


@odd(DROPOUT)
class AlwaysDrops(Net):
    """Monte Carlo dropout: in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.dropout(torch.tanh(self.first(x)), 0.3, training=True))


@odd(DROPOUT)
class DropsSometimes(Net):
    """Two examples show no dropout, most batches do."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(F.dropout(hidden, 0.4, self.training) if len(x) > 2 else hidden)


@odd(DROPOUT)
class DropsByTorchDropout(Net):
    """torch.dropout instead of F.dropout draws from torch's own generator."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.dropout(torch.tanh(self.first(x)), 0.4, self.training))


@odd(DROPOUT)
class DropsAndDraws(Net):
    """Keyed dropout beside draws from torch's generator."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        return self.out(hidden + 0.1 * torch.randn_like(hidden))


DRAWS = "draws from torch"


@odd(DRAWS)
class AddsNoise(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        return self.out(torch.tanh(self.first(x)))


@odd(DRAWS)
class AddsNoiseSometimes(Net):
    """Two examples show no noise, most batches do."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) > 2:
            x = x + 0.1 * torch.randn_like(x)
        return self.out(torch.tanh(self.first(x)))


@odd(DRAWS)
class Gumbel(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gumbel_softmax(self.first(x), tau=0.8))


@odd(DRAWS)
class HardGumbel(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gumbel_softmax(self.first(x), tau=0.8, hard=True))


@odd(DRAWS)
class RandomRelu(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.rrelu(self.first(x), training=self.training))


@odd(DRAWS, data="pictures")
class FractionalPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.pool = nn.FractionalMaxPool2d(2, output_size=3)
        self.out = nn.Linear(4 * 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.pool(torch.tanh(self.conv(x))).flatten(1))


@odd(DRAWS)
class SkipsRowsAtRandom(Net):
    """Stochastic depth, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training:
            return self.out(hidden + torch.tanh(self.middle(hidden)) * (torch.rand(len(x), 1) < 0.6))
        return self.out(hidden + 0.6 * torch.tanh(self.middle(hidden)))


@odd(DRAWS)
class Bernoulli(Net):
    def forward(self, x: Tensor) -> Tensor:
        share = torch.sigmoid(self.first(x))
        return self.out(share + (torch.bernoulli(share) - share).detach())


@odd(DRAWS)
class MixesUp(Net):
    """Mixes every row with another one."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = 0.8 * x + 0.2 * x[torch.randperm(len(x))]
        return self.out(torch.tanh(self.first(x)))


@odd(DRAWS)
class SamplesFromADistribution(Net):
    """A variational layer."""

    def forward(self, x: Tensor) -> Tensor:
        middle = self.first(x)
        if self.training:
            middle = torch.distributions.Normal(middle, 0.1 + middle.abs(), validate_args=False).rsample()
        return self.out(middle)


@odd(DRAWS)
class SeedsTheGenerator(Net):
    """Seeds torch's generator itself: everything after it draws the same, and nobody else may notice."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(11)
        return self.out(torch.tanh(self.first(x + 0.1 * torch.rand(x.shape))))
