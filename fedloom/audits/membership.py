"""Membership inference: whether somebody who has the final model can tell which examples it was trained on.

Members are the examples of all training splits. The others are those of all test splits, which the model never saw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import binomtest, norm, rankdata

from fedloom import keys
from fedloom.audits.canaries import Floats
from fedloom.data.federation import Federation
from fedloom.data.split import SplitName
from fedloom.errors import InputError
from fedloom.machine import computing
from fedloom.task import Task
from fedloom.training import generators
from fedloom.training.evaluation import outputs, passes, prepare
from fedloom.tree import Tree

FALSE_ALARMS = 0.01  # the share of others that an attacker may take for members
RESAMPLES = 1000
FEWEST = 8  # examples of a label, to know how confident the model is about it


@dataclass(frozen=True)
class Share:
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(count: int, total: int) -> Share:
        """Return `count` of `total` with the interval of Clopper and Pearson."""
        interval = binomtest(count, total).proportion_ci(0.95, "exact")
        return Share(count / total, float(interval.low), float(interval.high))


@dataclass(frozen=True)
class Inference:
    """How well an attack tells members from others. An AUC of 0.5 is guessing."""

    auc: Share
    found: Share  # the share of members that the attack finds while it takes at most `FALSE_ALARMS` for members
    members: int
    others: int


def membership(task: Task, model: Tree, federation: Federation) -> dict[str, Inference]:
    """Attack a model by the loss of each example, and by how unusual that is among examples of its label.

    The second attack is like that of Carlini et al. 2022, but it learns what is usual from half of the test examples
    instead of from models that it trains itself.
    """
    splits: tuple[SplitName, ...] = ("train", "test")
    (inside, labels), (outside, other_labels) = (_losses(task, model, federation, split) for split in splits)
    if min(len(inside), len(outside)) < 2 * FEWEST:
        raise InputError(f"Membership inference needs at least {2 * FEWEST} training and {2 * FEWEST} test examples.")
    found = {"loss": infer(-inside, -outside)}
    if federation.classes and task.loss == "cross_entropy":
        mixed = keys.permutation(keys.key(federation.seed, "membership"), len(outside))
        usual, attacked = mixed[::2], mixed[1::2]
        confidence, other_confidence = _logit(inside), _logit(outside)
        for label in np.unique(labels):
            here = other_confidence[usual][other_labels[usual] == label]
            if len(here) >= FEWEST:
                for values, of in ((confidence, labels == label), (other_confidence, other_labels == label)):
                    values[of] = (values[of] - here.mean()) / max(here.std(), 1e-9)
        found["likelihood ratio"] = infer(confidence, other_confidence[attacked])
    return found


def infer(members: Floats, others: Floats) -> Inference:
    """Measure an attack by its scores, which should be higher for members. The interval of the AUC is DeLong's."""
    ranks = rankdata(np.concatenate([members, others]))
    of_members = (ranks[: len(members)] - rankdata(members)) / len(others)
    of_others = 1 - (ranks[len(members) :] - rankdata(others)) / len(members)
    auc = float(of_members.mean())
    deviation = np.sqrt(of_members.var(ddof=1) / len(members) + of_others.var(ddof=1) / len(others))
    low, high = np.clip(norm.interval(0.95, auc, deviation), 0, 1) if deviation else (auc, auc)
    found = Share(_found(members, others), *np.quantile(_resampled(members, others), [0.025, 0.975]).tolist())
    return Inference(Share(auc, float(low), float(high)), found, len(members), len(others))


def _found(members: Floats, others: Floats) -> float:
    """Return the share of members above the threshold that few enough others exceed."""
    allowed = int(FALSE_ALARMS * len(others))
    return float((members > np.partition(others, -allowed - 1)[-allowed - 1]).mean())


def _resampled(members: Floats, others: Floats) -> list[float]:
    """Return what `_found` gives for bootstrap samples of both: the threshold is as uncertain as the members."""
    draw = keys.generator(keys.key(0, "bootstrap"))
    shares = [_found(members, draw.choice(others, len(others))) for _ in range(RESAMPLES)]
    return [draw.binomial(len(members), share) / len(members) for share in shares]


def _logit(losses: Floats) -> Floats:
    """Return log p / (1 − p) of the probability p that the model gives to the label, which is roughly normal."""
    losses = losses.clip(1e-7, 50.0)
    logit: Floats = -losses - np.log(-np.expm1(-losses))
    return logit


def _losses(task: Task, model: Tree, federation: Federation, split: SplitName) -> tuple[Floats, Floats]:
    """Return the loss and the label of every example of a split."""
    rows = federation.indices(federation.everyone, split)
    parts = [np.empty(0)]
    with computing(), generators.lent(), torch.no_grad():
        for part in passes(rows, 1000) if len(rows) else ():
            x, y = prepare(federation.x[part], federation.y[part], federation.scale, task)
            parts.append(task.losses(outputs(task, model, x), y).double().numpy())
    return np.concatenate(parts), federation.y[rows].double().numpy()
