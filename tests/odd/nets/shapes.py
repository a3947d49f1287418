"""Models that move values about, look across the rows of a batch, or answer with something other than one tensor."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.odd.table import CLASSES, FEATURES, Net, Words, odd

MOVES = "gather and scatter"


@odd(MOVES)
class Gathers(Net):
    def forward(self, x: Tensor) -> Tensor:
        places = x[:, :6].argsort(1)
        return self.out(torch.tanh(self.first(x)).gather(1, places))


@odd(MOVES)
class Scatters(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(torch.zeros_like(hidden).scatter(1, x[:, :6].argsort(1), hidden))


@odd(MOVES, data="tokens")
class ScattersAndAdds(Words):
    def forward(self, x: Tensor) -> Tensor:
        seen = self.words(x)
        slots = (x % 3)[..., None].expand(seen.shape)
        summed = torch.zeros(len(x), 3, 5, dtype=seen.dtype).scatter_add(1, slots, seen)
        return self.out(torch.tanh(summed).sum(1))


@odd(MOVES)
class AddsByIndex(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(torch.zeros_like(hidden).index_add(1, torch.tensor([0, 0, 1, 2, 3, 3]), hidden))


@odd(MOVES)
class SumsUp(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x.cumsum(1) / 4)))


@odd(MOVES)
class Sorts(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x).sort(1).values))


@odd(MOVES)
class TakesTheLargest(Net):
    def forward(self, x: Tensor) -> Tensor:
        best, places = self.first(x).topk(3, 1)
        return self.out(torch.zeros(len(x), 6, dtype=x.dtype).scatter(1, places, best))


@odd(MOVES)
class TakesTheMedian(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.out(torch.tanh(hidden - hidden.median(1, keepdim=True).values))


@odd(MOVES)
class Einsum(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 4, 6) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(torch.einsum("bij,ijk->bk", x.reshape(-1, 4, 4), self.mix)))


@odd(MOVES)
class Bilinear(Net):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(6, 6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(self.pair(hidden, hidden.flip(1)))


@odd(MOVES)
class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.centres = nn.Parameter(torch.randn(CLASSES, 6))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(torch.tanh(self.first(x)), self.centres)


@odd(MOVES)
class Unfolds(Net):
    def forward(self, x: Tensor) -> Tensor:
        windows = x.unfold(1, 4, 4)
        return self.out(torch.tanh(self.first((windows * windows.softmax(2)).flatten(1))))


PICTURES = "pictures"


@odd(PICTURES, data="pictures")
class ShufflesPixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        self.out = nn.Linear(2 * 36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.avg_pool2d(torch.tanh(self.shuffle(self.conv(x))), 2).flatten(1))


@odd(PICTURES, data="pictures")
class ConvolvesBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 3, 2, stride=2, groups=1)
        self.up = nn.ConvTranspose2d(3, 2, 2, stride=2)
        self.out = nn.Linear(2 * 36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x + self.up(torch.relu(self.down(x)))).flatten(1))


@odd(PICTURES, data="pictures")
class SamplesAGrid(nn.Module):
    """A spatial transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.tensor([[0.9, 0.1, 0.0], [-0.1, 0.9, 0.0]]))
        self.out = nn.Linear(2 * 36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
        return self.out(F.grid_sample(x, grid, align_corners=False).flatten(1))


@odd(PICTURES, data="pictures")
class PoolsAndScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")
        self.out = nn.Linear(4 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        seen = F.interpolate(torch.relu(self.conv(x)), scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(F.adaptive_max_pool2d(seen, 2).flatten(1))


@odd(PICTURES, data="pictures")
class WantsChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.out = nn.Linear(4 * 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.relu(self.conv(x.contiguous(memory_format=torch.channels_last)))
        return self.out(F.max_pool2d(seen, 2).flatten(1))


ACROSS = "looks across rows"


@odd(ACROSS, quick=True)
class SubtractsTheBatchMean(Net):
    """In training and in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x - x.mean(0))))


@odd(ACROSS)
class StandardisesInEvaluation(Net):
    """Statistics of the batch only where nobody trains."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.out(torch.tanh(hidden if self.training else (hidden - hidden.mean(0)) / (1 + hidden.std(0))))


@odd(ACROSS)
class AttendsToOtherRows(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out((hidden @ hidden.T).softmax(1) @ hidden)


@odd(ACROSS)
class ReadsTheNextRow(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x + 0.3 * x.roll(1, 0))))


@odd(ACROSS)
class DividesByTheBatch(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x))) / len(x)


@odd(ACROSS)
class BranchesOnTheBatch(Net):
    """Small batches go another way."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.out(torch.tanh(hidden) if len(x) > 3 else hidden.sigmoid())


@odd(ACROSS)
class LooksAcrossLargeBatchesOnly(Net):
    """Two rows show nothing."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(hidden - hidden.mean(0) if len(x) > 3 else hidden)


OUTPUTS = "several outputs"


def first_of_pair(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + 0.1 * output[1].square().mean()


def scores_of_dict(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["scores"], target) + 0.1 * output["hidden"].square().mean()


def scores_of_record(output: "Answer", target: Tensor) -> Tensor:
    return F.cross_entropy(output.scores, target) + 0.1 * output.hidden.square().mean()


@odd(OUTPUTS, loss=first_of_pair, measured=False)
class AnswersWithATuple(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        return self.out(hidden), hidden


@odd(OUTPUTS, loss=scores_of_dict, measured=False)
class AnswersWithADict(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.first(x))
        return {"scores": self.out(hidden), "hidden": hidden}


class Answer(NamedTuple):
    """Two tensors with names."""

    scores: Tensor
    hidden: Tensor


@odd(OUTPUTS, loss=scores_of_record, measured=False)
class AnswersWithARecord(Net):
    def forward(self, x: Tensor) -> Answer:
        hidden = torch.tanh(self.first(x))
        return Answer(self.out(hidden), hidden)


DTYPES = "kinds of numbers"


@odd(DTYPES)
class HasADoublePart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(self.fine(hidden.double()).to(x.dtype))


@odd(DTYPES)
class ComputesInBfloat16(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x).bfloat16()).to(x.dtype))


class HasABfloat16Part(Net):
    """A layer in a precision that the model chose by itself; not in the table, because it has no nine digits."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Linear(6, 6).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(hidden + self.coarse(hidden.bfloat16()).to(x.dtype))


@odd(DTYPES, quick=True)
class HasComplexWeights(Net):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 6, dtype=torch.cfloat) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).to(self.turn.dtype) @ self.turn
        return self.out(hidden.abs())


@odd(DTYPES)
class Fourier(Net):
    """A filter in the frequencies, with complex weights kept as two real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(FEATURES // 2 + 1, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter)
        return self.out(torch.tanh(self.first(torch.fft.irfft(waves, n=FEATURES, dim=1))))


@odd(DTYPES)
class HasWholeNumberWork(Net):
    """Bins its features as whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.bins = nn.Embedding(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        place = (x.mean(1) * 4).long().clamp(0, 4)
        return self.out(torch.tanh(self.first(x)) + self.bins(place))


MASKS = "masks"


@odd(MASKS, data="tokens")
class AveragesUnderAMask(Words):
    def forward(self, x: Tensor) -> Tensor:
        mask = (x != 0).to(self.out.weight.dtype)[..., None]
        return self.out((self.words(x) * mask).sum(1) / mask.sum(1).clamp(min=1))


@odd(MASKS)
class FillsAMask(Net):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.first(x).masked_fill(x[:, :6] < 0.3, float("-inf"))
        return self.out(torch.nan_to_num(scores.softmax(1)))


@odd(MASKS)
class MasksWeights(Net):
    """A fixed mask on a weight, as a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.arange(6 * FEATURES).reshape(6, FEATURES) % 3 > 0

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(F.linear(x, self.first.weight * self.mask, self.first.bias)))
