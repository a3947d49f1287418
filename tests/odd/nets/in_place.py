"""Models that change tensors in place."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.odd.table import Net, odd

KIND = "works in place"


@odd(KIND)
class ReluInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).relu_())


@odd(KIND)
class AddsInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        hidden = hidden + 0.0
        hidden.add_(0.1).mul_(1.5)
        return self.out(hidden)


@odd(KIND)
class PutsByIndex(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * 1.0
        hidden[:, 0] = 0.5
        hidden.index_put_((torch.tensor([0]), torch.tensor([1])), hidden.new_tensor(2.0))
        return self.out(hidden)


@odd(KIND)
class FillsByMaskInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * 1.0
        return self.out(hidden.masked_fill_(x[:, :6] > 0.5, 0.0))


@odd(KIND, quick=True)
class DropsInPlaceWithResidual(Net):
    """The residual is the tensor that dropout has already changed."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        dropped = F.dropout(hidden, 0.4, self.training, inplace=True)
        return self.out(dropped * 0.5 + hidden)


@odd(KIND)
class DropsInPlaceByModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.drop(hidden)
        return self.out(hidden)


@odd(KIND)
class ChangesItsInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5).clamp_(min=-1.0)
        return self.out(torch.tanh(self.first(x)))


@odd(KIND)
class WritesIntoAnEmptyTensor(Net):
    def forward(self, x: Tensor) -> Tensor:
        both = torch.empty(len(x), 6, dtype=x.dtype)
        hidden = torch.tanh(self.first(x))
        both[:, :3], both[:, 3:] = hidden[:, 3:], hidden[:, :3]
        return self.out(both)
