"""Helpers for tests of the evolution strategies."""

from typing import Any

import torch
from torch import Tensor

from fedloom import tree
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.task import Task
from fedloom.tree import flatten
from tests.algorithms.evolution.test_neuroevolution import fitness_by_hand
from tests.conftest import ALL_TRAIN, Dense, federation

QUIET = Evaluation(splits=())
DATA = federation((9, 20, 4), split=ALL_TRAIN)
TASK = Task(Dense, dtype="float64")


def flat(one: tree.Tree) -> Tensor:
    return flatten({name: leaf.unsqueeze(0) for name, leaf in one.items()})[0]


def records(algorithm: Any, rounds: int = 3, **more: Any) -> list[RoundRecord]:
    return list(fit(DATA, TASK, algorithm, rounds, seed=5, evaluation=QUIET, **more))


def by_hand(population: tree.Tree) -> Tensor:
    """Fitness with a plain loop."""
    float32 = {name: leaf.float() for name, leaf in population.items()}
    return torch.tensor(fitness_by_hand(Task(Dense), float32, DATA, (0, 1, 2)), dtype=torch.float64)
