"""Metrics that are computed from all examples at once: from scores (AUROC), from decisions (F1) or from numbers (R²).

What is kept of every example is a row of scores. For classes there is one column for each class, and for several labels
one for each label; only the scores of two classes are one number. A metric is then a mean over the columns ("macro"),
one number from all columns together ("micro"), or that of one column.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]
Truth = NDArray[np.bool_]
OneColumn = Callable[[Any, Truth], float]  # scores or decisions, and the truth, of one class
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
        return _over_columns(one, average, columns, truth)
    return _over_columns(one, average, scores, _truth(targets, scores.shape[1]))


def _truth(targets: Numbers, classes: int) -> Truth:
    return targets > 0 if targets.ndim == 2 else targets[:, None] == np.arange(classes)


def _over_columns(one: OneColumn, average: str | int | None, columns: Numbers, truth: Truth) -> float:
    """Return a metric of one class, of all decisions together, or its mean over classes.

    Which classes count in a mean depends on the examples alone, never on the model: those that some examples have and
    others do not. So examples of a single class have no such mean.
    """
    if average == "micro":
        return one(columns.ravel(), truth.ravel())
    if isinstance(average, int):
        return one(columns[:, average], truth[:, average]) if average < columns.shape[1] else math.nan
    known = [place for place in range(columns.shape[1]) if _both_kinds(truth[:, place])]
    return float(np.mean([one(columns[:, place], truth[:, place]) for place in known])) if known else math.nan


def _both_kinds(truth: Truth) -> bool:
    return bool(truth.any() and not truth.all())


def _can_rank(scores: Numbers, truth: Truth) -> bool:
    """Whether there is something to rank: not for examples of one kind, or a model that gives NaN or infinity."""
    return _both_kinds(truth) and bool(np.isfinite(scores).all())


def auroc(scores: Numbers, truth: Truth) -> float:
    """Return the area under the ROC curve; nan if all examples are of one kind."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth, scores)) if _can_rank(scores, truth) else math.nan


def auprc(scores: Numbers, truth: Truth) -> float:
    """Return the area under the precision-recall curve (average precision); nan if all examples are of one kind."""
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(truth, scores)) if _can_rank(scores, truth) else math.nan


def specificity_at(sensitivity: float, scores: Numbers, truth: Truth) -> float:
    """Return the highest specificity of a threshold that finds this share of the positive examples."""
    from sklearn.metrics import roc_curve

    if not _can_rank(scores, truth):
        return math.nan
    false_positives, true_positives, _ = roc_curve(truth, scores, drop_intermediate=False)
    return float(1 - false_positives[true_positives >= sensitivity - 1e-12].min())


# --- metrics of decisions


def decided(formula: str, average: str | int | None, chosen: Numbers, targets: Numbers) -> float:
    """Return a metric of decisions. Without an average: of the second of two classes, or the mean over more."""
    if average is None and targets.ndim == 1 and chosen.shape[1] == 2:
        average = 1
    return _over_columns(FORMULAS[formula], average, chosen.astype(bool), _truth(targets, chosen.shape[1]))


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan


def recall(chosen: Truth, truth: Truth) -> float:
    """Return the share of the positive examples that were chosen; nan without positive examples."""
    return _share((chosen & truth).sum(), truth.sum())


def specificity(chosen: Truth, truth: Truth) -> float:
    """Return the share of the negative examples that were not chosen; nan without negative examples."""
    return recall(~chosen, ~truth)


def precision(chosen: Truth, truth: Truth) -> float:
    """Return the share of the chosen examples that are positive: 0 if none was chosen; nan if all are of one kind."""
    return float((chosen & truth).sum() / max(chosen.sum(), 1)) if _both_kinds(truth) else math.nan


def f1(chosen: Truth, truth: Truth) -> float:
    """Return the harmonic mean of precision and recall; nan if all examples are of one kind."""
    return float(2 * (chosen & truth).sum() / (chosen.sum() + truth.sum())) if _both_kinds(truth) else math.nan


FORMULAS: dict[str, OneColumn] = {
    "precision": precision,
    "recall": recall,
    "sensitivity": recall,
    "specificity": specificity,
    "f1": f1,
}


def balanced_accuracy(chosen: Numbers, targets: Numbers) -> float:
    """Return the mean recall of all classes. A label is two classes: it has a sensitivity and a specificity."""
    if targets.ndim == 1:
        return decided("recall", "macro", chosen, targets)
    return (decided("sensitivity", "macro", chosen, targets) + decided("specificity", "macro", chosen, targets)) / 2


# --- others


def calibration_error(scores: Numbers, targets: Numbers) -> float:
    """Return the mean distance of confidence and accuracy in 15 bins, weighted by examples (Guo et al. 2017)."""
    if targets.ndim == 2:
        each = [_calibration(scores[:, label], targets[:, label] > 0) for label in range(scores.shape[1])]
        return float(np.mean(each))
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


RANKED: dict[str, OneColumn] = {"auroc": auroc, "auprc": auprc}


def at_sensitivity(percent: int) -> OneColumn:
    """Return the metric of specificity at a sensitivity in per cent."""
    return partial(specificity_at, percent / 100)
