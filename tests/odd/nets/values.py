"""Models whose Python code looks at values: what it decides for one batch must not be repeated for the next."""

import math
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.odd.table import CLASSES, FEATURES, TOKENS, Net, Words, odd

KIND = "looks at values"


@odd(KIND, quick=True)
class BranchesOnSum(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.out(torch.tanh(hidden) if x.sum() > 4 * len(x) else hidden.relu())


@odd(KIND, quick=True)
class ScalesByItem(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * x.std(correction=0).item())


@odd(KIND, data="tokens", quick=True)
class CutsPaddingByToList(Words):
    """The model of the issue: the mean over as many words as the longest text of the batch has."""

    def forward(self, x: Tensor) -> Tensor:
        longest = max((x != 0).sum(1).tolist())
        return self.out(self.words(x[:, :longest]).mean(1))


@odd(KIND, data="tokens")
class CutsPaddingByTensor(Words):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x[:, : (x != 0).sum(1).max()]).mean(1))


@odd(KIND, data="tokens", quick=True)
class MasksByArange(Words):
    """The usual way to mask padding: the mask is as wide as the longest text."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1)
        mask = torch.arange(lengths.max()) < lengths[:, None]
        seen = self.words(x[:, : mask.shape[1]]) * mask[..., None]
        return self.out(seen.sum(1) / mask.shape[1])


@odd(KIND, quick=True)
class ReadsNumpy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * float(x.detach().numpy().max()))


@odd(KIND, quick=True)
class ReadsAsArray(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * np.asarray(x).std())


@odd(KIND)
class SortsByNumpy(Net):
    """Puts the rows in numpy's order, and back."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.from_numpy(np.argsort(x.cpu().detach().numpy()[:, 0]))
        hidden = torch.tanh(self.first(x[order])).cumsum(0) / 10
        return self.out(hidden[torch.argsort(order)])


@odd(KIND, quick=True)
class SplitsByTensor(Net):
    def forward(self, x: Tensor) -> Tensor:
        where = (x > 0).sum(1).max().reshape(1)
        left, right = torch.tanh(self.first(x * 1)), x.tensor_split(where, 1)[0].sum(1, keepdim=True)
        return self.out(left * right / 10)


@odd(KIND)
class IndexesByMask(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * x[x > 0].mean())


@odd(KIND)
class SelectsByMask(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(hidden + torch.masked_select(hidden, hidden > 0).sum() / 100)


@odd(KIND)
class FindsNonzero(Net):
    """Changes the rows whose first feature is positive."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0.5).nonzero().flatten()
        hidden = torch.tanh(self.first(x))
        return self.out(hidden.index_add(0, rows, hidden[rows] * 0.5))


@odd(KIND, data="tokens")
class CountsUnique(Words):
    def forward(self, x: Tensor) -> Tensor:
        found, places = torch.unique(x, return_inverse=True)
        return self.out(self.words(found)[places].mean(1) * len(found) / 10)


@odd(KIND)
class BranchesOnFloat(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.out(hidden.sigmoid() if float(x.mean()) > 0.5 else hidden.tanh())


@odd(KIND, data="tokens")
class TakesWidthFromValues(nn.Module):
    """A one-hot code as wide as the largest word of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(TOKENS, CLASSES) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        codes = F.one_hot(x).sum(1).to(self.weight.dtype)
        return codes @ self.weight[: codes.shape[1]] / codes.shape[1]


@odd(KIND, data="tokens")
class TakesShapeFromItem(Words):
    def forward(self, x: Tensor) -> Tensor:
        counts = torch.zeros(len(x), int(x.max().item()) + 1, dtype=self.out.weight.dtype)
        counts.scatter_add_(1, x, torch.ones(x.shape, dtype=counts.dtype))
        return self.out(counts @ self.words.weight[: counts.shape[1]] / counts.shape[1])


@odd(KIND)
class AsksWhereAny(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if torch.where(x > 2.8, 1, 0).any():
            hidden = hidden * 0.5
        return self.out(hidden)


@odd(KIND)
class IteratesOverRows(Net):
    def forward(self, x: Tensor) -> Tensor:
        rows = [self.first(row) if row.sum() > 8 else self.first(row).tanh() for row in x]
        return self.out(torch.stack(rows))


@odd(KIND, data="tokens")
class AsksIn(Words):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).mean(1) * (2.0 if 7 in x else 1.0))


@odd(KIND)
class RepeatsInt(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(int(x.abs().mean() * 5) % 3):
            hidden = torch.tanh(hidden)
        return self.out(hidden)


@odd(KIND)
class AsksBool(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * (1 + bool((x > 3).any())))


@odd(KIND)
class IndexesAList(Net):
    """A tensor as the index of a Python list."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * [0.5, 1.0, 2.0][(x.sum(1) > 8).sum() % 3])


@odd(KIND)
class FormatsAndParses(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * float(f"{x.std(correction=0):.4f}"))


@odd(KIND)
class ParsesItsRepr(Net):
    def forward(self, x: Tensor) -> Tensor:
        said = repr(x.detach().abs().mean())
        return self.out(torch.tanh(self.first(x)) * float(said.removeprefix("tensor(").split(",")[0].rstrip(")")))


@odd(KIND)
class AsksMath(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * math.exp(-x.abs().mean()))


@odd(KIND)
class ReadsDlpack(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * float(np.from_dlpack(x.detach()).std()))


@odd(KIND)
class ReadsBytes(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * (1 + zlib.crc32(memoryview(x.detach().numpy().copy())) % 3))


@odd(KIND)
class ReadsStorage(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * (1 + sum(x.clone().untyped_storage().tolist()) % 3))


@odd(KIND)
class AsksEqual(Net):
    def forward(self, x: Tensor) -> Tensor:
        same = torch.equal(x[0, :2] > 0.5, x[-1, :2] > 0.5)
        return self.out(torch.tanh(self.first(x)) * (2.0 if same else 1.0))


@odd(KIND)
class AsksAllClose(Net):
    def forward(self, x: Tensor) -> Tensor:
        near = torch.allclose(x.mean(), torch.full((), 0.5, dtype=x.dtype), atol=0.1)
        return self.out(torch.tanh(self.first(x)) * (2.0 if near else 1.0))


@odd(KIND)
class RepeatsRows(Net):
    """As many copies of a row as its features say."""

    def forward(self, x: Tensor) -> Tensor:
        times = (x[:, 0] > 0.5).long() + 1
        rows = torch.arange(len(x)).repeat_interleave(times)
        hidden = torch.tanh(self.first(x.repeat_interleave(times, 0)))
        return self.out(torch.zeros(len(x), hidden.shape[1], dtype=x.dtype).index_add(0, rows, hidden))


@odd(KIND)
class SpacesUpToAMaximum(nn.Module):
    """A tensor given where torch takes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * torch.linspace(0.5, x.max(), FEATURES, dtype=x.dtype))
