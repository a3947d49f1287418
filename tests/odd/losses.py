"""The table of losses: what a loss says of a batch is what is minimised, whatever it makes of the batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.odd.table import CLASSES, FEATURES, TOKENS, Net, Odd

LOSSES: list[Odd] = []
STEADY = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
CAREFUL = {"optimizer": "sgd", "lr": 0.005, "momentum": 0.9}
WEIGHTS = (0.2, 1.0, 5.0)


def loss(kind: str, **more: Any) -> Callable[[Any], Any]:
    """Put a loss into the table: a function, or a class or factory whose instance is the loss."""

    def enter(given: Any) -> Any:
        entry = {"build": Scores, "training": STEADY, "measured": False, **more}
        made = given() if entry.pop("made", False) else given
        LOSSES.append(Odd(given.__name__, kind, loss=made, **entry))
        return given

    return enter


# --- small models


class Scores(Net):
    """Three scores."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


class DroppedScores(Net):
    """Three scores, with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.dropout(torch.tanh(self.first(x)), 0.3, self.training))


class Points(Net):
    """Six numbers of length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(torch.tanh(self.first(x)) + 0.1 * self.out(torch.tanh(self.first(x))).sum(1, keepdim=True))


class Several(nn.Module):
    """As many numbers as `outputs` says."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.out = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


def one_number() -> nn.Module:
    return Several(1)


def two_numbers() -> nn.Module:
    return Several(2)


def four_numbers() -> nn.Module:
    return Several(4)


class TwoHeads(nn.Module):
    """A mean and a variance, as a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x).squeeze(-1), F.softplus(self.spread(x)).squeeze(-1) + 0.1


class NextWords(nn.Module):
    """Scores for the next word at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 5)
        self.out = nn.Linear(5, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.words(x).cumsum(1)))


class Outline(nn.Module):
    """One score per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.first(x))).squeeze(1)


class Letters(nn.Module):
    """Scores of five letters at eight moments."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 8 * 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x).reshape(len(x), 8, 5)


# --- classes

CLASSES_KIND = "classes"


@loss(CLASSES_KIND, measured=True, quick=True)
def class_weights(output: Tensor, target: Tensor) -> Tensor:
    """Torch divides by the weights of the batch, not by its rows."""
    return F.cross_entropy(output, target, weight=output.new_tensor(WEIGHTS))


@loss(CLASSES_KIND, made=True, measured=True, quick=True)
def class_weights_in_a_module() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS, dtype=torch.float64))


@loss(CLASSES_KIND, build=DroppedScores, measured=True)
def class_weights_with_dropout(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, weight=output.new_tensor(WEIGHTS))


@loss(CLASSES_KIND, data="ignored", batch=5, measured=True, quick=True)
def ignored_labels(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


@loss(CLASSES_KIND, data="ignored", batch=5, made=True)
def ignored_labels_in_a_module() -> nn.Module:
    return nn.CrossEntropyLoss(ignore_index=-100)


@loss(CLASSES_KIND, measured=True)
def label_smoothing(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.2)


@loss(CLASSES_KIND, made=True)
def weighted_label_smoothing() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS, dtype=torch.float64), label_smoothing=0.2)


@loss(CLASSES_KIND, training=CAREFUL, measured=True, quick=True)
def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


@loss(CLASSES_KIND, training=CAREFUL, made=True)
def summed_in_a_module() -> nn.Module:
    return nn.CrossEntropyLoss(reduction="sum")


@loss(CLASSES_KIND, measured=True)
def plain_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


@loss(CLASSES_KIND, made=True, measured=True)
def plain_mean_in_a_module() -> nn.Module:
    return nn.CrossEntropyLoss()


@loss(CLASSES_KIND, measured=True, quick=True)
def one_value_per_example(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


@loss(CLASSES_KIND)
def weighted_values_per_example(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, weight=output.new_tensor(WEIGHTS), reduction="none")


@loss(CLASSES_KIND, made=True)
def a_lambda() -> Any:
    return lambda output, target: F.cross_entropy(output, target, weight=output.new_tensor(WEIGHTS))


@loss(CLASSES_KIND, made=True)
def negative_log_likelihood() -> Any:
    module = nn.NLLLoss(weight=torch.tensor(WEIGHTS, dtype=torch.float64))
    return lambda output, target: module(output.log_softmax(1), target)


@loss(CLASSES_KIND)
def multi_margin(output: Tensor, target: Tensor) -> Tensor:
    return F.multi_margin_loss(output, target, margin=0.5)


@loss(CLASSES_KIND, quick=True)
def focal_by_positives(output: Tensor, target: Tensor) -> Tensor:
    """Divided by the number of positives of the batch."""
    positive = F.one_hot(target, CLASSES).to(output.dtype)
    share = output.sigmoid()
    right = share * positive + (1 - share) * (1 - positive)
    values = (1 - right) ** 2 * F.binary_cross_entropy_with_logits(output, positive, reduction="none")
    return values.sum() / (target > 0).sum().clamp(min=1)


@loss(CLASSES_KIND)
def hard_examples(output: Tensor, target: Tensor) -> Tensor:
    """The mean of the worst half of a batch."""
    values = F.cross_entropy(output, target, reduction="none")
    return values.topk(max(len(values) // 2, 1)).values.mean()


@loss(CLASSES_KIND)
def hard_examples_by_value(output: Tensor, target: Tensor) -> Tensor:
    """The mean of those above a threshold, or of all where there are none."""
    values = F.cross_entropy(output, target, reduction="none")
    hard = values[values > 1.0]
    return hard.mean() if len(hard) else values.mean()


@loss(CLASSES_KIND, quick=True)
def with_a_constant_penalty(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + 0.01 * output.square().sum()


@loss(CLASSES_KIND, training=CAREFUL)
def scaled_by_its_own_value(output: Tensor, target: Tensor) -> Tensor:
    value = F.cross_entropy(output, target)
    return value / value.item()


@loss(CLASSES_KIND)
def one_value_in_a_vector(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, weight=output.new_tensor(WEIGHTS)).reshape(1)


@loss(CLASSES_KIND, quick=True)
def balanced_by_the_batch(output: Tensor, target: Tensor) -> Tensor:
    """A vector with a value per example that depends on the other labels."""
    counts = torch.bincount(target, minlength=CLASSES).to(output.dtype)
    return F.cross_entropy(output, target, reduction="none") / counts[target]


# --- tokens

TOKENS_KIND = "tokens"


@loss(TOKENS_KIND, data="next words", build=NextWords, quick=True)
def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    """The mean over all words of a batch that are not padding."""
    mask = (target != 0).to(output.dtype)
    return (F.cross_entropy(output.transpose(1, 2), target, reduction="none") * mask).sum() / mask.sum()


@loss(TOKENS_KIND, data="next words", build=NextWords)
def padding_ignored(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, TOKENS), target.reshape(-1), ignore_index=0)


@loss(TOKENS_KIND, data="next words", build=NextWords)
def one_value_per_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target, reduction="none")


@loss(TOKENS_KIND, data="next words", build=NextWords)
def one_value_per_real_token(output: Tensor, target: Tensor) -> Tensor:
    """A vector that is longer than the batch."""
    real = target != 0
    return F.cross_entropy(output[real], target[real], reduction="none")


@loss(TOKENS_KIND, data="letters", build=Letters)
def ctc(output: Tensor, target: Tensor) -> Tensor:
    steps = output.log_softmax(2).transpose(0, 1)
    lengths = torch.full((len(target),), steps.shape[0])
    return F.ctc_loss(steps, target, lengths, (target != 0).sum(1), zero_infinity=True)


# --- pictures


PICTURES_KIND = "pictures"


@loss(PICTURES_KIND, data="outlines", build=Outline, quick=True)
def dice(output: Tensor, target: Tensor) -> Tensor:
    """Of all pixels of a batch together."""
    share = output.sigmoid()
    return 1 - (2 * (share * target).sum() + 1) / (share.sum() + target.sum() + 1)


@loss(PICTURES_KIND, data="outlines", build=Outline)
def dice_per_picture(output: Tensor, target: Tensor) -> Tensor:
    share = output.sigmoid()
    return 1 - (2 * (share * target).sum((1, 2)) + 1) / (share.sum((1, 2)) + target.sum((1, 2)) + 1)


@loss(PICTURES_KIND, data="outlines", build=Outline)
def one_value_per_pixel(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="none")


# --- pairs of examples


PAIRS_KIND = "pairs of examples"


@loss(PAIRS_KIND, build=Points, batch=5, quick=True)
def triplet_in_the_batch(output: Tensor, target: Tensor) -> Tensor:
    """The furthest of the same class and the nearest of another."""
    far = torch.cdist(output, output + 1e-3)
    same = target[:, None] == target
    hardest = far.masked_fill(~same, 0.0).amax(1)
    nearest = far.masked_fill(same, 10.0).amin(1)
    return F.relu(hardest - nearest + 0.5).mean()


@loss(PAIRS_KIND, build=Points, batch=5)
def triplet(output: Tensor, target: Tensor) -> Tensor:
    return F.triplet_margin_loss(output, output.roll(1, 0) + 0.1 * target[:, None], output.roll(2, 0), margin=1.0)


def _similar(output: Tensor) -> Tensor:
    return output @ (output + 0.1 * output.flip(1)).T / 0.5


@loss(PAIRS_KIND, build=Points, batch=5, quick=True)
def info_nce(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(_similar(output), torch.arange(len(output)))


@loss(PAIRS_KIND, build=Points, batch=5, quick=True)
def info_nce_per_anchor(output: Tensor, target: Tensor) -> Tensor:
    """A vector as long as the batch, whose values are no examples' own."""
    return F.cross_entropy(_similar(output), torch.arange(len(output)), reduction="none")


@loss(PAIRS_KIND, build=Points, batch=5)
def supervised_contrast(output: Tensor, target: Tensor) -> Tensor:
    same = (target[:, None] == target).to(output.dtype)
    return -(_similar(output).log_softmax(1) * same).sum(1).div(same.sum(1)).mean()


@loss(PAIRS_KIND, build=one_number, data="tags", batch=5)
def ranking(output: Tensor, target: Tensor) -> Tensor:
    """Every pair of a yes and a no, as an area under the curve counts them."""
    scores = output.reshape(-1)
    pairs = (target[:, None] > target).to(scores.dtype)
    return (F.softplus(scores - scores[:, None]) * pairs).sum() / pairs.sum().clamp(min=1)


@loss(PAIRS_KIND, build=Points, batch=5)
def decorrelated(output: Tensor, target: Tensor) -> Tensor:
    centred = output - output.mean(0)
    spread = centred.T @ centred / len(output)
    return (spread - torch.eye(spread.shape[0], dtype=spread.dtype)).square().sum()


@loss(PAIRS_KIND, build=Points, batch=5)
def cosine_embedding(output: Tensor, target: Tensor) -> Tensor:
    signs = torch.where(target == target.roll(1), 1.0, -1.0)
    return F.cosine_embedding_loss(output, output.roll(1, 0), signs, margin=0.2)


# --- numbers

NUMBERS_KIND = "numbers"


@loss(NUMBERS_KIND, data="survival", build=one_number, batch=5, quick=True)
def cox(output: Tensor, target: Tensor) -> Tensor:
    """The partial likelihood: everybody who is still there when somebody's event happens."""
    risk, time, event = output.reshape(-1), target[:, 0], target[:, 1]
    there = (time[:, None] <= time).to(risk.dtype)
    among = (there * risk.exp()).sum(1).log()
    return -((risk - among) * event).sum() / event.sum().clamp(min=1)


@loss(NUMBERS_KIND, data="numbers", build=one_number, batch=5, quick=True)
def correlation(output: Tensor, target: Tensor) -> Tensor:
    one, other = output.reshape(-1) - output.mean(), target - target.mean()
    return 1 - (one * other).sum() / (one.norm() * other.norm() + 1e-6)


@loss(NUMBERS_KIND, data="numbers", build=one_number, batch=5)
def concordance(output: Tensor, target: Tensor) -> Tensor:
    value = output.reshape(-1)
    together = ((value - value.mean()) * (target - target.mean())).mean()
    apart = value.var(correction=0) + target.var(correction=0) + (value.mean() - target.mean()).square()
    return 1 - 2 * together / (apart + 1e-6)


@loss(NUMBERS_KIND, data="numbers", build=one_number, batch=5, quick=True)
def standardised(output: Tensor, target: Tensor) -> Tensor:
    """Errors in units of the batch's spread."""
    return ((output.reshape(-1) - target) / (target.std() + 0.1)).square().mean()


@loss(NUMBERS_KIND, data="shares", quick=True)
def kl_by_batch(output: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(output.log_softmax(1), target, reduction="batchmean")


@loss(NUMBERS_KIND, data="shares")
def kl_by_value(output: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(output.log_softmax(1), target, reduction="none")


@loss(NUMBERS_KIND, data="shares")
def soft_labels(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


@loss(NUMBERS_KIND, data="numbers", build=one_number)
def huber(output: Tensor, target: Tensor) -> Tensor:
    return F.huber_loss(output.reshape(-1), target, delta=0.4)


@loss(NUMBERS_KIND, data="numbers", build=one_number, made=True)
def smooth_l1() -> Any:
    module = nn.SmoothL1Loss(beta=0.4)
    return lambda output, target: module(output.reshape(-1), target)


@loss(NUMBERS_KIND, data="numbers", build=one_number)
def quantile(output: Tensor, target: Tensor) -> Tensor:
    error = target - output.reshape(-1)
    return torch.maximum(0.8 * error, -0.2 * error).mean()


@loss(NUMBERS_KIND, data="numbers", build=one_number)
def log_cosh(output: Tensor, target: Tensor) -> Tensor:
    error = output.reshape(-1) - target
    return (error + F.softplus(-2 * error) - math.log(2)).mean()


@loss(NUMBERS_KIND, data="numbers", build=TwoHeads)
def gaussian_likelihood(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """A regression with two heads, which are two tensors."""
    return F.gaussian_nll_loss(output[0], target, output[1])


@loss(NUMBERS_KIND, data="numbers", build=two_numbers)
def gaussian_likelihood_of_one_tensor(output: Tensor, target: Tensor) -> Tensor:
    return F.gaussian_nll_loss(output[:, 0], target, F.softplus(output[:, 1]) + 0.1)


@loss(NUMBERS_KIND, data="weighted numbers", build=one_number, quick=True)
def weighted_examples(output: Tensor, target: Tensor) -> Tensor:
    """The second number of a label is how much its example counts."""
    error = (output.reshape(-1) - target[:, 0]).square()
    return (error * target[:, 1]).sum() / target[:, 1].sum()


@loss(NUMBERS_KIND, data="numbers", build=one_number)
def root_mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output.reshape(-1) - target).square().mean().sqrt()


# --- several labels, and yes or no

LABELS_KIND = "several labels"


@loss(LABELS_KIND, data="labels", build=four_numbers)
def several_labels(output: Tensor, target: Tensor) -> Tensor:
    weight = output.new_tensor([1.0, 3.0, 0.5, 2.0])
    return F.binary_cross_entropy_with_logits(output, target, pos_weight=weight)


@loss(LABELS_KIND, data="labels", build=four_numbers, made=True, quick=True)
def several_labels_in_a_module() -> nn.Module:
    weight = torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
    return nn.BCEWithLogitsLoss(pos_weight=weight)


@loss(LABELS_KIND, data="labels", build=four_numbers, made=True)
def soft_margin_of_several_labels() -> nn.Module:
    return nn.MultiLabelSoftMarginLoss()


@loss(LABELS_KIND, data="tags", build=one_number)
def hinge(output: Tensor, target: Tensor) -> Tensor:
    return F.relu(1 - output.reshape(-1) * (2 * target - 1)).mean()


@loss(LABELS_KIND, data="tags", build=one_number, batch=5, quick=True)
def balanced_tags(output: Tensor, target: Tensor) -> Tensor:
    """Yes and no count the same in every batch."""
    yes = target.to(output.dtype)
    values = F.binary_cross_entropy_with_logits(output.reshape(-1), yes, reduction="none")
    return (values * yes).sum() / yes.sum().clamp(min=1) + (values * (1 - yes)).sum() / (1 - yes).sum().clamp(min=1)


# --- losses that remember or draw

STATE_KIND = "losses with a state"


@loss(STATE_KIND, made=True, quick=True)
class Weighted(nn.Module):
    """A buffer of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(WEIGHTS, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        weights = self.weights[target]
        return (F.cross_entropy(output, target, reduction="none") * weights).sum() / weights.sum()


@loss(STATE_KIND, made=True, quick=True)
class Annealed:
    """Counts its calls; every client begins with a fresh one."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) * (0.5 + 1 / self.calls)


@loss(STATE_KIND, made=True)
class Centred(nn.Module):
    """Class centres that move with every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(CLASSES, CLASSES, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.centres.lerp_(output.detach().mean(0).expand(CLASSES, CLASSES), 0.1)
        return F.cross_entropy(output, target) + 0.1 * (output - self.centres[target]).square().mean()


@loss(STATE_KIND)
def negative_sampling(output: Tensor, target: Tensor) -> Tensor:
    """Draws from torch's generator."""
    other = (target + torch.randint(1, CLASSES, target.shape)) % CLASSES
    right, wrong = (output.gather(1, place[:, None]) for place in (target, other))
    return F.softplus(wrong - right).mean()


@loss(STATE_KIND)
def branches_on_its_value(output: Tensor, target: Tensor) -> Tensor:
    value = F.cross_entropy(output, target)
    return value * 2 if value > 1.0 else value


class Growing:
    """Counts its calls, and weighs later ones more."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) * (1 + 0.1 * self.calls)


class Slotted:
    """The same without a dict."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) * (1 + 0.1 * self.calls)


@loss(STATE_KIND, made=True)
def a_bound_method() -> Any:
    return Growing().__call__


@loss(STATE_KIND, made=True)
def a_partial() -> Any:
    return functools.partial(Growing())


@loss(STATE_KIND, made=True)
def an_object_with_slots() -> Any:
    return Slotted()


@functools.lru_cache(None)
def others(rows: int) -> Tensor:
    """Every row but itself: made once for every size of batch."""
    return 1 - torch.eye(rows)


@loss(STATE_KIND)
def cached_by_batch_size(output: Tensor, target: Tensor) -> Tensor:
    alike = F.normalize(output, dim=1)
    return (
        F.cross_entropy(output, target) + 0.1 * (alike @ alike.T * others(len(output)).to(output.dtype)).square().mean()
    )
