"""Small random models and losses: sentences of a grammar, as plain tuples, and the modules that they mean."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.odd.table import CLASSES, FEATURES

WIDTH = 6
Sentence = tuple[Any, ...]

ACTIVATIONS = ("tanh", "relu", "sigmoid", "gelu", "silu", "softplus")
NORMS = ("layer", "rms", "group", "batch", "batch without statistics")
DROPOUTS = ("dropout", "dropout in place", "alpha dropout")
BUFFERS = ("mean in place", "mean assigned", "counter", "counter assigned", "mean not saved", "mean in evaluation")
LOOKS = ("sum", "item", "numpy", "tolist", "mask")
DRAWS = ("noise", "python", "numpy")
ODD = ("subtract mean", "python counter", "unused", "frozen", "tied", "clamp", "detach", "sort", "in place")

words = st.one_of(
    st.tuples(st.just("linear")),
    st.tuples(st.just("activation"), st.sampled_from(ACTIVATIONS)),
    st.tuples(st.just("norm"), st.sampled_from(NORMS)),
    st.tuples(st.just("dropout"), st.sampled_from(DROPOUTS), st.sampled_from((0.2, 0.5))),
    st.tuples(st.just("buffer"), st.sampled_from(BUFFERS)),
    st.tuples(st.just("look"), st.sampled_from(LOOKS)),
    st.tuples(st.just("draw"), st.sampled_from(DRAWS)),
    st.tuples(st.just("odd"), st.sampled_from(ODD)),
)
phrases = st.recursive(
    words,
    lambda inner: st.one_of(
        st.tuples(st.just("residual"), inner),
        st.tuples(st.just("branch"), st.sampled_from(("sum", "rows", "tolist")), inner, inner),
        st.tuples(st.just("twice"), inner),
    ),
    max_leaves=3,
)
models = st.lists(phrases, min_size=1, max_size=4).map(tuple)
losses = st.tuples(
    st.sampled_from(("mean", "sum", "none", "by weights", "worst half", "standardised")),
    st.sampled_from((None, (0.2, 1.0, 5.0))),  # class weights
    st.sampled_from((0.0, 0.2)),  # label smoothing
    st.sampled_from((0.0, 0.01)),  # a penalty that is not divided by rows
)
trainings = st.sampled_from(
    (
        {"optimizer": "sgd", "lr": 0.02},
        {"optimizer": "sgd", "lr": 0.02, "momentum": 0.8, "weight_decay": 0.05},
        {"optimizer": "sgd", "lr": 0.02, "clip": 0.3},
        {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.05, "epsilon": 1e-3},
        {"optimizer": "adagrad", "lr": 0.01, "epsilon": 1e-3},
        {"optimizer": "adadelta", "lr": 0.1, "epsilon": 1e-3},
    )
)


class Drawn(nn.Module):
    """A model of the grammar."""

    def __init__(self, model: Sentence) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.parts = nn.Sequential(*(part(phrase, self.first) for phrase in model))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.parts(torch.tanh(self.first(x))))


class DrawnLoss:
    """A loss of the grammar."""

    def __init__(self, loss: Sentence) -> None:
        self.reduction, self.weights, self.smoothing, self.penalty = loss

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        weight = None if self.weights is None else output.new_tensor(self.weights)
        direct = self.reduction if self.reduction in ("mean", "sum", "none") else "none"
        value = F.cross_entropy(output, target, weight=weight, reduction=direct, label_smoothing=self.smoothing)
        if self.reduction == "by weights":
            importance = 1.0 + target
            value = (value * importance).sum() / importance.sum()
        elif self.reduction == "worst half":
            value = value.topk(max(len(value) // 2, 1)).values.mean()
        elif self.reduction == "standardised":
            value = value.mean() / (1 + output.detach().var(correction=0))
        return value + self.penalty * output.square().sum()


def part(phrase: Sentence, first: nn.Linear) -> nn.Module:
    """The module that a phrase means; it takes and gives six numbers per row."""
    kind, *more = phrase
    if kind == "linear":
        return nn.Linear(WIDTH, WIDTH)
    if kind == "residual":
        return Residual(part(more[0], first))
    if kind == "twice":
        return Twice(part(more[0], first))
    if kind == "branch":
        return Branch(more[0], part(more[1], first), part(more[2], first))
    if kind == "norm":
        return _norm(more[0])
    if kind == "dropout":
        return _dropout(*more)
    simple: dict[str, Any] = {"activation": Activation, "buffer": Buffer, "look": Look, "draw": Draw}
    return simple[kind](more[0]) if kind in simple else Odd(more[0], first)


def needs_two_rows(model: Sentence) -> bool:
    """Whether torch refuses a batch of one example."""
    return any(word == "norm" or (isinstance(word, tuple) and needs_two_rows(word)) for word in model)


def _norm(name: str) -> nn.Module:
    if name == "layer":
        return nn.LayerNorm(WIDTH)
    if name == "rms":
        return nn.RMSNorm(WIDTH)
    if name == "group":
        return nn.GroupNorm(2, WIDTH)
    return nn.BatchNorm1d(WIDTH, track_running_stats=name == "batch")


def _dropout(name: str, share: float) -> nn.Module:
    if name == "alpha dropout":
        return nn.AlphaDropout(share)
    return nn.Sequential(Shift(), nn.Dropout(share, inplace=name == "dropout in place"))


class Shift(nn.Module):
    """A tensor of its own, which may be changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1


class Activation(nn.Module):
    """An activation by its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = getattr(F, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Residual(nn.Module):
    """A part beside its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0 + 0.5 * torch.tanh(self.inner(x * 1.0))


class Twice(nn.Module):
    """A part that is applied two times."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.tanh(self.inner(x))))


class Branch(nn.Module):
    """One part or another, as the batch is."""

    def __init__(self, by: str, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.by, self.one, self.other = by, one, other

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "sum":
            first = bool(x.sum() > 0)
        elif self.by == "rows":
            first = len(x) > 3
        else:
            first = sum(x.detach()[:, 0].tolist()) > 0
        return torch.tanh(self.one(x) if first else self.other(x))


class Buffer(nn.Module):
    """Something that is kept from batch to batch, saved or not."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=name != "mean not saved")
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.name == "mean in evaluation":
            new = x.detach().mean(0)
            if self.name == "counter":
                self.count += len(x)
            elif self.name == "counter assigned":
                self.count = self.count + 1
            elif self.name == "mean assigned":
                self.mean = 0.8 * self.mean + 0.2 * new
            else:
                self.mean.lerp_(new, 0.2)
        return (x - self.mean.clone()) / (1 + self.count / 50)


class Look(nn.Module):
    """Scales by something that Python reads."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        if self.way == "sum":
            scale = float(seen.abs().sum() / seen.numel())
        elif self.way == "item":
            scale = seen.abs().max().item()
        elif self.way == "numpy":
            scale = float(seen.numpy().std())
        elif self.way == "tolist":
            scale = max(seen[:, 0].tolist())
        else:
            scale = len(seen[seen > 0.2]) / seen.numel()
        return x * (0.5 + abs(scale))


class Draw(nn.Module):
    """Draws from a global generator."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        import random

        import numpy as np

        if not self.training:
            return x
        if self.source == "noise":
            return x + 0.1 * torch.randn_like(x)
        return x * (0.5 + (random.random() if self.source == "python" else float(np.random.uniform())))


class Odd(nn.Module):
    """One odd thing."""

    def __init__(self, name: str, first: nn.Linear) -> None:
        super().__init__()
        self.name = name
        self.calls = 0
        self.linear = nn.Linear(WIDTH, WIDTH)
        if name == "frozen":
            self.linear.requires_grad_(False)
        if name == "tied":
            self.again = first

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "subtract mean":
            return self.linear(x - x.mean(0))
        if self.name == "python counter":
            self.calls += 1
            return self.linear(x) / self.calls**0.5
        if self.name == "unused":
            return x
        if self.name == "tied":
            return self.linear(F.linear(torch.tanh(self.again.bias * x), self.linear.weight))
        if self.name == "clamp":
            with torch.no_grad():
                self.linear.weight.clamp_(-0.2, 0.2)
        if self.name == "detach":
            return self.linear(x) * x.detach()
        if self.name == "sort":
            return self.linear(x).sort(1).values
        if self.name == "in place":
            return self.linear(x).mul_(0.5).relu_()
        return self.linear(x)
