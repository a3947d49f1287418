"""Metrics that are computed from all examples at once: from scores (AUROC), from decisions (F1) or from numbers (R²).

What is kept of every example is a row of scores. For classes there is one column for each class, and for several labels
one for each label; only the scores of two classes are one number. A metric is then a mean over the columns ("macro"),
one number from all columns together ("micro"), or that of one column.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]
Truth = NDArray[np.bool_]
OneColumn = Callable[[Numbers, Truth], float]  # scores and truth of one class, to a number
BINS = 15  # of confidences, for the calibration error


def is_binary(output: Tensor) -> bool:
    """Whether an output has one logit per example, not one per class."""
    return output.dim() == 1 or output.shape[-1] == 1


def flat(output: Tensor) -> Tensor:
    """Return one number per example."""
    return output.reshape(output.shape[0], -1).squeeze(-1) if output.dim() > 1 else output


def has_labels(output: Tensor, target: Tensor) -> bool:
    """Whether every example has several labels of 0 or 1, with a logit for each."""
    return target.dim() == 2 and output.shape == target.shape


# --- what is kept of every example


def ranking(output: Tensor, target: Tensor) -> Tensor:
    """Return one score for two classes, a probability for each of several classes, or a logit for each label."""
    if has_labels(output, target):
        return output
    if is_binary(output):
        return flat(output)
    return output[:, 1] - output[:, 0] if output.shape[-1] == 2 else torch.softmax(output, -1)


def decisions(output: Tensor, target: Tensor) -> Tensor:
    """Return whether each class is the predicted one, or each label is predicted: examples × classes."""
    if has_labels(output, target):
        return output > 0
    if is_binary(output):
        return torch.stack([flat(output) <= 0, flat(output) > 0], 1)
    return torch.nn.functional.one_hot(output.argmax(-1), output.shape[-1]).bool()


def confidences(output: Tensor, target: Tensor) -> Tensor:
    """Return the probability of the predicted class and its number, or the probability of each label."""
    if has_labels(output, target):
        return torch.sigmoid(output)
    logits = torch.stack([torch.zeros_like(flat(output)), flat(output)], 1) if is_binary(output) else output
    best, number = torch.softmax(logits, -1).max(-1)
    return torch.stack([best, number.to(best.dtype)], 1)


def predicted(output: Tensor, target: Tensor) -> Tensor:
    """Return the predicted numbers."""
    return output.reshape(target.shape) if output.numel() == target.numel() else flat(output)


# --- metrics of ranks


def ranked(one: OneColumn, average: str | int | None, scores: Numbers, targets: Numbers) -> float:
    """Return a metric of scores and truth. Without an average: of the second of two classes, or the mean over more."""
    if scores.ndim == 1:
        truth, columns = (targets > 0)[:, None], scores[:, None]
        if average is not None:  # both classes: the first one has the opposite scores
            truth, columns = np.hstack([~truth, truth]), np.hstack([-columns, columns])
    else:
        columns = scores
        truth = targets > 0 if targets.ndim == 2 else targets[:, None] == np.arange(scores.shape[1])
    if average == "micro":
        return one(columns.ravel(), truth.ravel())
    if isinstance(average, int):
        return one(columns[:, average], truth[:, average]) if average < columns.shape[1] else math.nan
    return _mean([one(columns[:, place], truth[:, place]) for place in range(columns.shape[1])])


def auroc(scores: Numbers, truth: Truth) -> float:
    """Return the area under the ROC curve; nan if all examples are of one kind."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth, scores)) if len(np.unique(truth)) == 2 else math.nan


def auprc(scores: Numbers, truth: Truth) -> float:
    """Return the area under the precision-recall curve (average precision); nan without positive examples."""
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(truth, scores)) if truth.any() else math.nan


def specificity_at(sensitivity: float, scores: Numbers, truth: Truth) -> float:
    """Return the highest specificity of a threshold that finds this share of the positive examples."""
    from sklearn.metrics import roc_curve

    if len(np.unique(truth)) < 2:
        return math.nan
    false_positives, true_positives, _ = roc_curve(truth, scores, drop_intermediate=False)
    return float(1 - false_positives[true_positives >= sensitivity - 1e-12].min())


# --- metrics of decisions


def decided(formula: str, average: str | int | None, chosen: Numbers, targets: Numbers) -> float:
    """Return a metric of decisions. Without an average: of the second of two classes, or the mean over more."""
    picked = chosen.astype(bool)
    truth = targets > 0 if targets.ndim == 2 else targets[:, None] == np.arange(picked.shape[1])
    right, wrong = (picked & truth).sum(0), (picked & ~truth).sum(0)
    missed = (~picked & truth).sum(0)
    counts = np.array([right, wrong, missed, len(picked) - right - wrong - missed])
    if average == "micro":
        return FORMULAS[formula](*counts.sum(1))
    if average is None and targets.ndim == 1 and picked.shape[1] == 2:
        average = 1
    if isinstance(average, int):
        return FORMULAS[formula](*counts[:, average]) if average < picked.shape[1] else math.nan
    return _mean([FORMULAS[formula](*column) for column in counts.T])


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan


def _precision(right: float, wrong: float, missed: float, rest: float) -> float:
    return _share(right, right + wrong) if right + wrong or not missed else 0.0  # there are some, and none was found


FORMULAS: dict[str, Callable[..., float]] = {  # of right, wrongly chosen, missed and rightly left examples of a class
    "precision": _precision,
    "recall": lambda right, wrong, missed, rest: _share(right, right + missed),
    "sensitivity": lambda right, wrong, missed, rest: _share(right, right + missed),
    "specificity": lambda right, wrong, missed, rest: _share(rest, rest + wrong),
    "f1": lambda right, wrong, missed, rest: _share(2 * right, 2 * right + wrong + missed),
}


# --- others


def calibration_error(scores: Numbers, targets: Numbers) -> float:
    """Return the mean distance of confidence and accuracy in 15 bins, weighted by examples (Guo et al. 2017)."""
    if targets.ndim == 2:
        return _mean([_calibration(scores[:, label], targets[:, label] > 0) for label in range(scores.shape[1])])
    return _calibration(scores[:, 0], scores[:, 1] == targets)


def _calibration(confidence: Numbers, right: Truth) -> float:
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    distances = np.abs(np.bincount(place, confidence, BINS) - np.bincount(place, right, BINS))
    return float(distances.sum() / len(confidence))


def r2(scores: Numbers, targets: Numbers) -> float:
    """Return the share of the labels' variance that predictions explain; nan if labels do not vary."""
    residual, whole = ((scores - targets) ** 2).sum(0), ((targets - targets.mean(0)) ** 2).sum(0)
    return float(np.mean(1 - residual / whole)) if np.all(whole > 0) else math.nan


def c_index(scores: Numbers, targets: Numbers) -> float:
    """Return the share of comparable pairs in the right order (Harrell's C); equal scores count half.

    With one label, higher scores belong to higher labels. With two, they are the time and whether the event happened
    then (1) or the time is only known to be longer (0). The score is then a risk: higher scores belong to earlier
    events.
    """
    times, event, sign = (targets, np.ones(len(targets)), 1.0) if targets.ndim == 1 else (*targets.T, -1.0)
    scores = sign * scores.reshape(len(scores), -1)[:, 0]
    right = pairs = 0.0
    for time, score in zip(times[event > 0], scores[event > 0], strict=True):
        later = scores[(times > time) | ((times == time) & (event == 0))]  # lost at that time, so the event is later
        pairs += len(later)
        right += (later > score).sum() + (later == score).sum() / 2
    return _share(right, pairs)


def _mean(values: list[float]) -> float:
    """Return the mean of the values that are defined."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


RANKED: dict[str, OneColumn] = {"auroc": auroc, "auprc": auprc}


def at_sensitivity(percent: int) -> OneColumn:
    """Return the metric of specificity at a sensitivity in per cent."""
    return partial(specificity_at, percent / 100)
