"""Losses and metrics, and which of them may be averaged.

A metric that is a mean over examples is kept as a sum, so that it can be added over batches and clients. A metric that
is not a mean (AUROC) is computed from all scores at once, and is never averaged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fedloom.errors import InputError, nearest

Range = tuple[float, float]
NON_NEGATIVE: Range = (0.0, math.inf)
SHARE: Range = (0.0, 1.0)


@dataclass(frozen=True)
class Metric:
    """One number about a model on some examples."""

    name: str
    values: Callable[[Tensor, Tensor], Tensor] | None = None  # one value per example, averaged
    scores: Callable[[Tensor], Tensor] | None = None  # or: one score per example …
    summary: Callable[[np.ndarray, np.ndarray], float] | None = None  # … and the function of all scores and labels
    higher_is_better: bool = True
    range: Range = (-math.inf, math.inf)  # its smallest and largest possible value

    @property
    def is_mean(self) -> bool:
        return self.values is not None


def is_binary(output: Tensor) -> bool:
    """Whether an output has one logit per example, not one per class."""
    return output.dim() == 1 or output.shape[-1] == 1


def _flat(output: Tensor) -> Tensor:
    return output.reshape(output.shape[0], -1).squeeze(-1) if output.dim() > 1 else output


def _accuracy(output: Tensor, target: Tensor) -> Tensor:
    if is_binary(output):
        return ((_flat(output) > 0).to(target.dtype) == target.reshape(-1)).float()
    return (output.argmax(-1) == target).float()


def _top(k: int, output: Tensor, target: Tensor) -> Tensor:
    best = output.topk(min(k, output.shape[-1]), -1).indices
    return (best == target.unsqueeze(-1)).any(-1).float()


def _positive_score(output: Tensor) -> Tensor:
    return _flat(output) if is_binary(output) else output[:, 1] - output[:, 0]


def _auroc(scores: np.ndarray, targets: np.ndarray) -> float:
    from sklearn.metrics import roc_auc_score

    if len(np.unique(targets)) < 2:
        return float("nan")  # one class only: the area is not defined
    return float(roc_auc_score(targets, scores))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of each example, for classes."""
    return F.cross_entropy(output, target, reduction="none")


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Return the squared error of each example, for regression."""
    return (output.reshape(target.shape) - target.to(output.dtype)).square()


def mae(output: Tensor, target: Tensor) -> Tensor:
    """Return the absolute error of each example, for regression."""
    return (output.reshape(target.shape) - target.to(output.dtype)).abs()


def bce(output: Tensor, target: Tensor) -> Tensor:
    """Return the binary cross-entropy of each example, for two classes and one logit per example."""
    logits = output.reshape(target.shape)
    return F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {loss.__name__: loss for loss in (cross_entropy, mse, bce, mae)}
NUMBER_LOSSES = ("mse", "mae")  # for labels that are numbers, never for classes
METRICS = {
    "accuracy": Metric("accuracy", _accuracy, range=SHARE),
    "mse": Metric("mse", mse, higher_is_better=False, range=NON_NEGATIVE),
    "mae": Metric("mae", mae, higher_is_better=False, range=NON_NEGATIVE),
    "auroc": Metric("auroc", scores=_positive_score, summary=_auroc, range=SHARE),
}


def loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss with this name. The loss returns one value per example."""
    if name not in LOSSES:
        raise InputError(
            f"There is no loss '{name}'. Known: {', '.join(LOSSES)}, or your own as 'file.py:name'."
            f"{nearest(name, LOSSES)}"
        )
    return LOSSES[name]


def metric(name: str) -> Metric:
    """Return the metric with this name: accuracy, top_k (top_3, top_5, …), mse, mae or auroc.

    >>> metric("top_3").name
    'top_3'
    """
    if name in METRICS:
        return METRICS[name]
    top = re.fullmatch(r"top_([1-9]\d*)", name)
    if top:
        return Metric(name, partial(_top, int(top[1])), range=SHARE)
    known = [*METRICS, "top_5"]
    raise InputError(f"There is no metric '{name}'. Known: {', '.join(known)} (any top_k).{nearest(name, known)}")


def per_example(loss: Callable[[Any, Tensor], Tensor], output: Any, target: Tensor) -> Tensor:
    """Return one loss per example, for a loss that returns one value per example, per token or per batch.

    A loss that returns one number per batch is called on every example alone.
    """
    values = loss(output, target)
    if values.dim() == 0 and len(target) == 1:
        return values.reshape(1)
    if values.dim() == 0 or len(values) != len(target):
        output, target = tree_map_only(Tensor, lambda leaf: leaf.unsqueeze(1), (output, target))
        return torch.vmap(lambda one, label: loss(one, label).mean())(output, target)
    return values.reshape(len(values), -1).mean(1) if values.dim() > 1 else values
