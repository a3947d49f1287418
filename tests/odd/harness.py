"""Small federations for the odd models and losses, and what each entry of the tables is compared as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from fedloom.backends.vector import Workers
from fedloom.data.federation import Federation
from fedloom.task import Task
from fedloom.testing.comparison import Comparison
from fedloom.testing.ways import ONE, PAIRS
from fedloom.training.settings import Training
from tests.odd.table import CLASSES, FEATURES, LENGTH, TOKENS, Odd

SIZES = (15, 39, 24)  # of which 9, 23 and 14 are for training, and 3, 8 and 5 for the test
# one after another, replayed, in another order, and side by side: what most mistakes show in
FEW_WAYS = (f"{ONE}, step by step", ONE, "the cohort cut after client 1", PAIRS)
TRAINING: Sequence[dict[str, Any]] = (
    {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    # with the usual epsilon, a gradient that is zero but for rounding would be blown up to a whole step
    {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01, "epsilon": 1e-4},
    {"optimizer": "sgd", "lr": 0.1, "clip": 0.5},
)


@cache
def federation(kind: str) -> Federation:
    """Three unequal clients with examples of one kind, in float64 where they are not whole numbers."""
    draws = np.random.default_rng(7)
    count = sum(SIZES)
    offsets = np.cumsum([0, *SIZES])
    y: Any = draws.integers(0, CLASSES, count)
    x: Any = draws.normal(size=(count, FEATURES)) + 0.5 * y[:, None]
    classes: tuple[str, ...] = ("a", "b", "c")
    if kind in ("tokens", "next words"):
        x = draws.integers(1, TOKENS, (count, LENGTH))
        x[np.arange(LENGTH) >= draws.integers(1 if kind == "tokens" else 2, LENGTH - 1, count)[:, None]] = 0
    elif kind in ("pictures", "outlines"):
        x = draws.normal(size=(count, 2, 6, 6)) + 0.3 * y[:, None, None, None]
    if kind == "tags":
        y, classes = (y > 0).astype(np.int64), ("no", "yes")
    elif kind == "ignored":
        y[[*offsets[:-1], *(offsets[:-1] + 1)]] = -100  # never a whole batch: that would have no loss
    elif kind in LABELS:
        y, classes = LABELS[kind](draws, x), ()
    return Federation(torch.from_numpy(np.asarray(x)), torch.from_numpy(np.asarray(y)), offsets, classes=classes)


LABELS: dict[str, Callable[[np.random.Generator, Any], Any]] = {
    "numbers": lambda draws, x: x[:, 0] - 0.5 * x[:, 1] + 0.1 * draws.normal(size=len(x)),
    "weighted numbers": lambda draws, x: np.stack([x[:, 0], draws.uniform(0.1, 3.0, len(x))], 1),
    "survival": lambda draws, x: np.stack([draws.exponential(size=len(x)), draws.integers(0, 2, len(x)) * 1.0], 1),
    "shares": lambda draws, x: draws.dirichlet(np.ones(CLASSES), len(x)),
    "labels": lambda draws, x: (x[:, :4] > 0.5) * 1.0,
    "next words": lambda draws, x: np.roll(x, -1, 1) * (np.arange(LENGTH) < LENGTH - 1),
    "letters": lambda draws, x: (
        draws.integers(1, 5, (len(x), 3)) * (np.arange(3) < draws.integers(1, 4, len(x))[:, None])
    ),
    "outlines": lambda draws, x: (x[:, 0] > 0.5).astype(np.int64),
}


def compared(entry: Odd, number: int, crews: Sequence[Workers] = ()) -> Comparison:
    """An entry of the table, ready to be compared; its number decides what it is trained with."""

    def task(build: Any) -> Task:
        return Task(build, loss=entry.loss, metrics=["accuracy"] if entry.measured else [], dtype="float64")

    settings = entry.training or TRAINING[number % len(TRAINING)]
    training = Training(**{"epochs": 2, "batch_size": entry.batch, **settings})
    reference = task(entry.reference) if entry.reference else None
    # so that the test splits of 3, 8 and 5 rows are one batch, two and one
    return Comparison(
        task(entry.build), federation(entry.data), training, evaluation_batch=6, crews=crews, reference_task=reference
    )


def problems(comparison: Comparison, ways: Sequence[str] = ()) -> list[str]:
    """What is wrong in any of the ways that a task can be computed, or in some of them."""
    _ = comparison.reference  # compute this first, so that nothing a way breaks can affect it
    tried = [comparison.try_out(way) for way in comparison.ways() if not ways or way.name in ways]
    return [found.sentence for found in tried if found.sentence]
