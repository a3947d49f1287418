"""Two clients with a linear regression that is small enough to compute by hand."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedloom.algorithm import Algorithm, Tree
from fedloom.data.federation import Federation
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.task import Task
from tests.conftest import last, numbers_federation

X = np.array([[1.0, 2.0], [3.0, -1.0], [0.0, 1.0], [2.0, 2.0], [-1.0, 3.0]])
Y = np.array([1.0, 2.0, 0.0, 3.0, 1.0])
SIZES = (2, 3)
RANGES = [np.arange(0, 2), np.arange(2, 5)]
LR = 0.1
START = np.array([0.5, -0.25, 0.1])  # two weights and a bias

Vector = NDArray[np.float64]


def two_clients() -> Federation:
    return numbers_federation(X.tolist(), Y.tolist(), SIZES)


def linear_task() -> Task:
    model = nn.Linear(2, 1).double()
    start = torch.from_numpy(START)
    model.load_state_dict({"weight": start[None, :2], "bias": start[2:]})
    return Task(model, loss="mse", metrics=[], dtype="float64")


def gradient(w: Vector, rows: NDArray[np.int64]) -> Vector:
    """Return the gradient of the mean squared error of some rows."""
    inputs = np.column_stack([X[rows], np.ones(len(rows))])
    return 2 * inputs.T @ (inputs @ w - Y[rows]) / len(rows)


def descend(w: Vector, rows: NDArray[np.int64]) -> Vector:
    """Take one step on the mean squared error of some rows."""
    return w - LR * gradient(w, rows)


def mean(first: Vector, second: Vector) -> Vector:
    """Average two clients by their numbers of examples."""
    return (2 * first + 3 * second) / 5


def vector(model: Tree) -> Vector:
    """Return weights and bias as one vector."""
    return np.append(model["weight"].numpy().ravel(), model["bias"].numpy())


def after(algorithm: Algorithm, rounds: int, **more: Any) -> RoundRecord:
    """Train on the two clients, and return the last record."""
    return last(fit(two_clients(), linear_task(), algorithm, rounds, evaluation=Evaluation(splits=()), **more))


def trained(algorithm: Algorithm, rounds: int, **more: Any) -> Vector:
    """Train on the two clients, and return the server's weights and bias."""
    return vector(after(algorithm, rounds, **more).state["model"])
