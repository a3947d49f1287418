"""Losses and metrics, and what is kept of examples to compute them.

A metric that is a mean over examples is kept as a sum, so that it can be added over batches and clients. A metric that
is not a mean (AUROC) is computed from the scores of all examples at once: see `score_metrics.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fedloom.errors import InputError, TrainingError, unknown
from fedloom.score_metrics import (
    FORMULAS,
    RANKED,
    at_sensitivity,
    balanced_accuracy,
    c_index,
    calibration_error,
    confidences,
    decided,
    decisions,
    flat,
    has_labels,
    is_binary,
    predicted,
    r2,
    ranked,
    ranking,
)
from fedloom.user_code import defined_at, is_code, said

Range = tuple[float, float]
NON_NEGATIVE: Range = (0.0, math.inf)
SHARE: Range = (0.0, 1.0)


@dataclass(frozen=True)
class Metric:
    """One number about a model on some examples."""

    name: str
    values: Callable[[Tensor, Tensor], Tensor] | None = None  # one value per example, averaged
    scores: Callable[[Tensor, Tensor], Tensor] | None = None  # or: a row of scores per example …
    summary: Callable[[np.ndarray, np.ndarray], float] | None = None  # … and the function of all scores and labels
    higher_is_better: bool = True
    range: Range = (-math.inf, math.inf)  # its smallest and largest possible value
    of_mean: Callable[[float], float] | None = None  # the metric is this function of the mean of its values

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean over examples."""
        return self.values is not None and self.of_mean is None


def _accuracy(output: Tensor, target: Tensor) -> Tensor:
    if has_labels(output, target):
        return ((output > 0) == (target > 0)).float()
    if is_binary(output):
        return ((flat(output) > 0).to(target.dtype) == target.reshape(-1)).float()
    return (output.argmax(-1) == target).float()


def _top(k: int, output: Tensor, target: Tensor) -> Tensor:
    best = output.topk(min(k, output.shape[-1]), -1).indices
    return (best == target.unsqueeze(-1)).any(-1).float()


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


def _exp(mean: float) -> float:
    return math.exp(min(mean, 700.0))  # more would not be a finite number


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {loss.__name__: loss for loss in (cross_entropy, mse, bce, mae)}
NUMBER_LOSSES = ("mse", "mae")  # for labels that are numbers, never for classes


def usual(loss: object) -> tuple[str, ...] | None:
    """Return what is measured if nobody says what: accuracy for classes, the mean absolute error for numbers.

    Of a loss of your own, only the labels tell: None.
    """
    if not isinstance(loss, str) or is_code(loss):
        return None
    return ("mae",) if loss in NUMBER_LOSSES else ("accuracy",)


METRICS = {
    "accuracy": Metric("accuracy", _accuracy, range=SHARE),
    "mse": Metric("mse", mse, higher_is_better=False, range=NON_NEGATIVE),
    "mae": Metric("mae", mae, higher_is_better=False, range=NON_NEGATIVE),
    "rmse": Metric("rmse", mse, higher_is_better=False, range=NON_NEGATIVE, of_mean=math.sqrt),
    "perplexity": Metric("perplexity", cross_entropy, higher_is_better=False, range=NON_NEGATIVE, of_mean=_exp),
    "balanced_accuracy": Metric("balanced_accuracy", scores=decisions, summary=balanced_accuracy, range=SHARE),
    "calibration_error": Metric(
        "calibration_error", scores=confidences, summary=calibration_error, higher_is_better=False, range=SHARE
    ),
    "r2": Metric("r2", scores=predicted, summary=r2),
    "c_index": Metric("c_index", scores=predicted, summary=c_index, range=SHARE),
}
# metrics of classes, and what may follow their names: _macro, _micro, or _of_ and the number of a class
AVERAGES = r"(?:_(macro|micro)|_of_(\d+))?"
SHOWN_AS_PERCENTAGE = re.compile(
    rf"accuracy|balanced_accuracy|top_\d+|({'|'.join(FORMULAS)}){AVERAGES}|specificity_at_.*"
)
# how people write what is not a word
WRITTEN = {
    **{name: name.upper() for name in ("mse", "mae", "rmse", "f1", "auroc", "auprc")},
    **{"r2": "R²", "c_index": "C-index"},
}
EXAMPLES = (*METRICS, *RANKED, *FORMULAS, "f1_macro", "f1_micro", "recall_of_2", "specificity_at_90", "top_5")


def loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss with this name. The loss returns one value per example."""
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES, "or your own as 'file.py:name'")
    return LOSSES[name]


def metric(name: str) -> Metric:
    """Return the metric with this name, such as accuracy, top_5, auroc, f1_macro, recall_of_2 or specificity_at_90.

    >>> metric("top_3").name
    'top_3'
    """
    if name in METRICS:
        return METRICS[name]
    if found := re.fullmatch(r"top_([1-9]\d*)", name):
        return Metric(name, partial(_top, int(found[1])), range=SHARE)
    if found := re.fullmatch(r"specificity_at_([1-9]\d?)", name):
        return Metric(name, scores=ranking, summary=partial(ranked, at_sensitivity(int(found[1])), None), range=SHARE)
    if found := re.fullmatch(rf"({'|'.join(RANKED)}){AVERAGES}", name):
        summary = partial(ranked, RANKED[found[1]], _average(found))
        return Metric(name, scores=ranking, summary=summary, range=SHARE)
    if found := re.fullmatch(rf"({'|'.join(FORMULAS)}){AVERAGES}", name):
        return Metric(name, scores=decisions, summary=partial(decided, found[1], _average(found)), range=SHARE)
    if found := re.fullmatch(rf"({'|'.join((*RANKED, *FORMULAS))})_of_(\D+.*)", name):
        raise InputError(
            f"There is no metric '{name}'. Write the number of the class, counted from 0, as in '{found[1]}_of_2': "
            "`fedloom data describe` lists the classes in their order; or your own as 'file.py:name'."
        )
    raise unknown("metric", name, EXAMPLES, "with other numbers in them, or your own as 'file.py:name'")


def heading(name: str) -> str:
    """Return the name of a metric for headings and the beginnings of sentences; your own keeps its spelling.

    >>> [heading(name) for name in ("accuracy", "auroc", "mae", "c_index", "recall_of_2", "my_Score")]
    ['Accuracy', 'AUROC', 'MAE', 'C-index', 'Recall of 2', 'My_Score']
    """
    try:
        metric(name)
    except InputError:  # the loss, or your own
        return name[:1].upper() + name[1:]
    if name in WRITTEN:
        return WRITTEN[name]
    first, _, rest = name.partition("_")
    words = " ".join([WRITTEN.get(first, first), rest.replace("_", " ")]).strip()
    return words[:1].upper() + words[1:]


def class_number(metric: Metric) -> int | None:
    """Return the number of the class that a metric is about, such as 2 for recall_of_2."""
    found = re.fullmatch(r".*_of_(\d+)", metric.name) if metric.scores in (ranking, decisions) else None
    return int(found[1]) if found else None


def _average(found: re.Match[str]) -> str | int | None:
    return int(found[3]) if found[3] else found[2]


def own_metric(function: Any, name: str = "") -> Metric:
    """Return the metric of your own function: `function(outputs, labels)` gives a number for all examples of a client.

    Outputs and labels are numpy arrays. If lower is better, set `function.higher_is_better = False`; without this
    attribute, higher is taken as better, and `about_direction` says so.
    """
    if isinstance(function, Metric):
        return function
    if not callable(function):
        raise InputError(f"A metric must be a name, a function of outputs and labels, or a Metric. Got {function!r}.")
    if isinstance(function, type):
        raise InputError(
            f"The metric {function.__name__} is a class. A metric must be a name, a function of outputs and labels "
            "that gives a number, or a Metric."
        )
    name = short_name(name) or getattr(function, "__name__", type(function).__name__)
    better = bool(getattr(function, "higher_is_better", True))
    return Metric(name, scores=whole_output, summary=partial(_called, function, name), higher_is_better=better)


def about_direction(measures: Iterable[Metric]) -> Iterator[str]:
    """Yield a sentence for each function of your own that does not say whether higher is better."""
    for one in measures:
        called = one.summary
        if isinstance(called, partial) and called.func is _called and not hasattr(called.args[0], "higher_is_better"):
            yield (
                f"metric {one.name}: taken as better when higher. Set {one.name}.higher_is_better = False if lower is "
                "better, or = True to silence this."
            )


def whole_output(output: Tensor, target: Tensor) -> Tensor:
    """Return what a function of your own is called with. A tuple has no rows, one for each example."""
    return output


def _called(function: Callable[..., Any], name: str, scores: np.ndarray, targets: np.ndarray) -> float:
    try:
        value = function(scores, targets)
    except Exception as error:
        hint = "\nA metric of your own is called with numpy arrays." if "numpy.ndarray" in str(error) else ""
        raise TrainingError(f"The metric '{name}' failed: {said(error)}{hint}") from error
    try:
        number = float(value)
        # a model that diverges may well have an infinite error
        if isinstance(value, str) or (math.isinf(number) and np.isfinite(scores).all()):
            raise ValueError
    except (TypeError, ValueError):
        what = f"an array of shape {np.shape(value)}" if np.ndim(value) else f"{value!r}"
        raise TrainingError(
            f"The metric '{name}'{defined_at(function)} returned {what}. A metric returns one number for all examples: "
            "a finite one, or NaN where it is undefined."
        ) from None
    return number


def of_numbers(metric: Metric) -> bool:
    """Whether a metric is for labels that are numbers, never for classes."""
    return metric.scores is predicted or metric.values in (mse, mae)


def top(metric: Metric) -> int:
    """Return the k of a metric top_k, and 0 for others."""
    values = metric.values
    return int(values.args[0]) if isinstance(values, partial) and values.func is _top else 0


def short_name(name: str) -> str:
    """Return what a metric is called in results: of your own code, the function's name.

    >>> short_name("metrics.py:cost"), short_name("auroc")
    ('cost', 'auroc')
    """
    return name.rpartition(":")[2]


@cache
def is_share(name: str) -> bool:
    """Whether a metric is between 0 and 1."""
    try:
        return metric(name).range == SHARE
    except InputError:  # your own, or a loss
        return False


def is_percentage(name: str) -> bool:
    """Whether a metric is shown as a percentage."""
    return SHOWN_AS_PERCENTAGE.fullmatch(name) is not None


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
