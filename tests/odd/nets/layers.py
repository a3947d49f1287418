"""Torch's own layers of every kind: attention, recurrent, normalisation, embeddings, reparametrised weights."""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.odd.table import CLASSES, FEATURES, LENGTH, TOKENS, Net, Words, odd

ATTENTION = "attention"


class Sequence(nn.Module):
    """The features as four steps of four numbers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.out = nn.Linear(width, CLASSES)

    def steps(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), 4, 4)


@odd(ATTENTION)
class Attends(Sequence):
    """Dropout on weights that are computed in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.steps(x)
        return self.out(self.attention(steps, steps, steps)[0].mean(1))


@odd(ATTENTION)
class AttendsWithoutWeights(Attends):
    """Dropout inside torch's own kernel."""

    def forward(self, x: Tensor) -> Tensor:
        steps = self.steps(x)
        return self.out(self.attention(steps, steps, steps, need_weights=False)[0].mean(1))


@odd(ATTENTION)
class IsATransformerLayer(Sequence):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.steps(x)).mean(1))


@odd(ATTENTION, data="tokens")
class IsATransformerWithPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        padding = x == 0
        seen = self.encoder(self.words(x), src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)
        return self.out(seen.sum(1) / (~padding).sum(1, keepdim=True))


@odd(ATTENTION)
class AttendsCausally(Sequence):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.steps(x)).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).mean(1))


@odd(ATTENTION)
class AttendsWithDropout(AttendsCausally):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.steps(x)).chunk(3, -1)
        share = 0.3 if self.training else 0.0
        return self.out(F.scaled_dot_product_attention(query, key, value, dropout_p=share).mean(1))


RECURRENT = "recurrent"


@odd(RECURRENT)
class Lstm(Sequence):
    def __init__(self) -> None:
        super().__init__(5)
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.steps(x))[0][:, -1])


@odd(RECURRENT)
class LstmWithDropout(Sequence):
    def __init__(self) -> None:
        super().__init__(5)
        self.lstm = nn.LSTM(4, 5, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.steps(x))[0][:, -1])


@odd(RECURRENT)
class GruInBothDirections(Sequence):
    def __init__(self) -> None:
        super().__init__(6)
        self.gru = nn.GRU(4, 3, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(self.steps(x))[0].mean(1))


@odd(RECURRENT)
class PlainRnn(Sequence):
    def __init__(self) -> None:
        super().__init__(5)
        self.rnn = nn.RNN(4, 5, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.steps(x).transpose(0, 1))[0][-1])


@odd(RECURRENT)
class GruCellByCell(Sequence):
    def __init__(self) -> None:
        super().__init__(5)
        self.cell = nn.GRUCell(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), 5)
        for step in self.steps(x).unbind(1):
            hidden = self.cell(step, hidden)
        return self.out(hidden)


@odd(RECURRENT, data="tokens")
class PackedLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1)
        packed = pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        steps, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(steps.sum(1) / steps.shape[1])


NORMS = "normalisation"


class Normed(Net):
    """A layer and its normalisation."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.first(x))))


class Pictures(nn.Module):
    """A convolution over pictures and its normalisation."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = norm
        self.out = nn.Linear(4 * 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2).flatten(1))


@odd(NORMS, batch=5, quick=True)
def batch_norm() -> nn.Module:
    return Normed(nn.BatchNorm1d(6))


@odd(NORMS, batch=4, refused="last batch has one", quick=True)
def batch_norm_with_a_last_batch_of_one() -> nn.Module:
    """Torch raises: one value per channel has no variance."""
    return Normed(nn.BatchNorm1d(6))


@odd(NORMS, batch=5)
def batch_norm_without_momentum() -> nn.Module:
    return Normed(nn.BatchNorm1d(6, momentum=None))


@odd(NORMS, batch=5, quick=True)
def batch_norm_without_running_statistics() -> nn.Module:
    """It looks across the rows of a batch in evaluation too."""
    return Normed(nn.BatchNorm1d(6, track_running_stats=False))


@odd(NORMS, batch=5)
def batch_norm_without_parameters() -> nn.Module:
    return Normed(nn.BatchNorm1d(6, affine=False))


@odd(NORMS, data="pictures")
def batch_norm_of_pictures() -> nn.Module:
    return Pictures(nn.BatchNorm2d(4))


@odd(NORMS, data="pictures")
def frozen_batch_norm() -> nn.Module:
    """Its scale is not trained, its statistics are."""
    return Pictures(nn.BatchNorm2d(4).requires_grad_(False))


@odd(NORMS, data="pictures")
class BatchNormAlwaysInEvaluation(Pictures):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(4))

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self


@odd(NORMS)
class BatchNormOfSequences(Sequence):
    """Several values per channel and example: a lone example is no trouble."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.steps(x))).mean(2))


@odd(NORMS, batch=5)
class BatchNormOfOneChannelPerStep(Sequence):
    """Rows that are not examples: steps and examples in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(x.reshape(-1, 4))).reshape(-1, 4, 4).mean(1))


@odd(NORMS, data="pictures")
def instance_norm() -> nn.Module:
    return Pictures(nn.InstanceNorm2d(4, affine=True))


@odd(NORMS, data="pictures")
def instance_norm_with_running_statistics() -> nn.Module:
    return Pictures(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))


@odd(NORMS)
def layer_norm() -> nn.Module:
    return Normed(nn.LayerNorm(6))


@odd(NORMS)
def rms_norm() -> nn.Module:
    return Normed(nn.RMSNorm(6))


@odd(NORMS, data="pictures")
def group_norm() -> nn.Module:
    return Pictures(nn.GroupNorm(2, 4))


@odd(NORMS, data="pictures")
def local_response_norm() -> nn.Module:
    return Pictures(nn.LocalResponseNorm(2))


EMBEDDINGS = "embeddings"


class Averages(Words):
    """The mean of a text's words."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).mean(1))


@odd(EMBEDDINGS, data="tokens", training={"optimizer": "sgd", "lr": 0.1, "momentum": 0.5, "weight_decay": 0.01})
def sparse_embedding() -> nn.Module:
    return Averages(sparse=True)


@odd(EMBEDDINGS, data="tokens", training={"optimizer": "adam", "lr": 0.02, "epsilon": 1e-4})
def sparse_embedding_under_adam() -> nn.Module:
    return Averages(sparse=True)


@odd(EMBEDDINGS, data="tokens", quick=True)
def embedding_scaled_by_frequency() -> nn.Module:
    """A gradient that depends on how often a word is in the whole batch."""
    return Averages(scale_grad_by_freq=True)


@odd(EMBEDDINGS, data="tokens")
def embedding_with_largest_norm() -> nn.Module:
    """Forward shortens the rows it looks up, in place."""
    return Averages(max_norm=1.0)


@odd(EMBEDDINGS, data="tokens")
def embedding_with_padding() -> nn.Module:
    return Averages(padding_idx=0)


class Bag(nn.Module):
    """Texts as bags of words."""

    def __init__(self, mode: str, **more: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(TOKENS, 5, mode=mode, **more)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.bag(x)))


@odd(EMBEDDINGS, data="tokens")
def bag_of_sums() -> nn.Module:
    return Bag("sum")


@odd(EMBEDDINGS, data="tokens")
def bag_of_means() -> nn.Module:
    return Bag("mean")


@odd(EMBEDDINGS, data="tokens")
def bag_of_maxima() -> nn.Module:
    return Bag("max")


@odd(EMBEDDINGS, data="tokens", training={"optimizer": "sgd", "lr": 0.1})
def sparse_bag() -> nn.Module:
    return Bag("sum", sparse=True)


@odd(EMBEDDINGS, data="tokens")
class BagWithOffsets(Bag):
    """All texts of a batch in one row, without their padding."""

    def __init__(self) -> None:
        super().__init__("mean")

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1)
        offsets = lengths.cumsum(0) - lengths
        return self.out(torch.tanh(self.bag(x[x != 0], offsets)))


@odd(EMBEDDINGS, data="tokens")
class WeightedBag(Bag):
    def __init__(self) -> None:
        super().__init__("sum")
        self.importance = nn.Parameter(torch.ones(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.bag(x, per_sample_weights=self.importance.expand(x.shape).contiguous())))


@odd(EMBEDDINGS, data="tokens")
class TiedEmbedding(Words):
    """Words are looked up and scored with the same matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.decode = nn.Linear(5, TOKENS, bias=False)
        self.decode.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tanh(self.words(x).mean(1))
        return self.out(seen) + self.decode(seen)[:, :CLASSES]


WEIGHTS = "reparametrised weights"


class Tanh(Net):
    """Two layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


@odd(WEIGHTS)
def spectral_norm_by_hook() -> nn.Module:
    net = Tanh()
    nn.utils.spectral_norm(net.first)
    return net


@odd(WEIGHTS)
def spectral_norm() -> nn.Module:
    net = Tanh()
    parametrizations.spectral_norm(net.first)
    return net


@odd(WEIGHTS)
def weight_norm_by_hook() -> nn.Module:
    net = Tanh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(net.first)
    return net


@odd(WEIGHTS)
def weight_norm() -> nn.Module:
    net = Tanh()
    parametrizations.weight_norm(net.first)
    return net


@odd(WEIGHTS)
def orthogonal_weights() -> nn.Module:
    net = Tanh()
    parametrizations.orthogonal(net.first, orthogonal_map="cayley")
    return net


class Symmetric(nn.Module):
    """A matrix made symmetric."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@odd(WEIGHTS)
class OwnParametrization(Net):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(6, 6)
        parametrize.register_parametrization(self.middle, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.first(x))))


@odd(WEIGHTS)
def pruned() -> nn.Module:
    net = Tanh()
    prune.l1_unstructured(net.first, "weight", amount=0.5)
    return net


@odd("one output", data="tags", loss="bce")
class OneLogit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


@odd("one output", data="tags", loss="bce")
class OneFlatLogit(OneLogit):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(x).squeeze(-1)


@odd("one output", data="numbers", loss="mse", measured=False)
class OneNumber(OneLogit):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x))
