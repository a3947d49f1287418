"""FSVRG and SVRG with an L2 term: `weight_decay` is part of the objective, with the same step as the rest."""

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import nn

from fedloom import keys
from fedloom.algorithms import FSVRG, SVRG
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from tests.conftest import last, numbers_federation

QUIET = Evaluation(splits=())
SIZES = (6, 25, 13)
DECAY = 0.4
Vector = NDArray[np.float64]

DRAWS = np.random.default_rng(2)
X = DRAWS.normal(size=(sum(SIZES), 3))
Y = X @ np.array([1.5, -1.0, 0.3]) + 0.5 + 0.3 * DRAWS.normal(size=len(X))
INPUTS = np.column_stack([X, np.ones(len(X))])
OPTIMUM = np.linalg.solve(2 * INPUTS.T @ INPUTS / len(X) + DECAY * np.eye(4), 2 * INPUTS.T @ Y / len(X))


def trained(algorithm: FSVRG, rounds: int) -> Vector:
    data = numbers_federation(X.tolist(), Y.tolist(), SIZES)
    task = Task(nn.Linear, "mse", [], args={"in_features": 3, "out_features": 1}, dtype="float64")
    model = last(fit(data, task, algorithm, rounds, seed=4, evaluation=QUIET)).state["model"]
    return np.append(model["weight"].numpy().ravel(), model["bias"].numpy())


def start() -> Vector:
    task = Task(nn.Linear, "mse", [], args={"in_features": 3, "out_features": 1}, dtype="float64")
    model = task.initial()
    return np.append(model["weight"].numpy().ravel(), model["bias"].numpy())


def gradient(w: Vector, rows: NDArray[np.int64]) -> Vector:
    return 2 * INPUTS[rows].T @ (INPUTS[rows] @ w - Y[rows]) / len(rows)


@pytest.mark.parametrize("kind", [FSVRG, SVRG])
def test_it_arrives_at_the_optimum_of_the_loss_with_its_l2_term(kind: type[FSVRG]) -> None:
    found = trained(kind(h=1.0, weight_decay=DECAY), 120)
    np.testing.assert_allclose(found, OPTIMUM, rtol=0, atol=1e-9)


@pytest.mark.parametrize("pooled", [False, True], ids=["fsvrg", "svrg"])
def test_a_round_with_weight_decay_by_hand(pooled: bool) -> None:
    h, w, borders = 0.6, start(), np.cumsum([0, *SIZES])
    ranges = [np.arange(len(X))] if pooled else [np.arange(*borders[k : k + 2]) for k in range(3)]
    full, changes = gradient(w, np.arange(len(X))), np.zeros(4)
    for client, rows in enumerate(ranges):
        local, number = w.copy(), 3 if pooled else client
        for i in rows[keys.permutation(keys.key(4, "batches", 1, 1, number, 0), len(rows))]:
            here = np.array([i])
            step = gradient(local, here) - gradient(w, here) + full + DECAY * local
            local = local - h / len(rows) * step
        changes += len(rows) / len(X) * (local - w)
    found = trained((SVRG if pooled else FSVRG)(h=h, weight_decay=DECAY, scaling="identity"), 1)
    np.testing.assert_allclose(found, w + changes, rtol=1e-12)


@pytest.mark.parametrize("kind", [FSVRG, SVRG])
def test_a_clip_of_gradients_that_are_scaled_otherwise_is_refused_and_patience_has_nothing_to_stop(
    kind: type[FSVRG],
) -> None:
    with pytest.raises(InputError, match="clip"):
        kind(clip=1.0)
    assert kind(patience=2) == kind()
