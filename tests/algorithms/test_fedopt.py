"""Server optimisers, computed by hand."""

import numpy as np
import pytest

from fedloom.algorithms import FedAdagrad, FedAdam, FedAvgM, FedYogi
from tests.algorithms.linear import (
    LR,
    RANGES,
    START,
    Vector,
    descend,
    trained,
)

SETTINGS = {"lr": LR, "batch_size": "full", "server_lr": 0.5, "weights": "uniform"}


def change(w: Vector) -> Vector:
    return np.mean([descend(w, rows) for rows in RANGES], axis=0) - w


def test_momentum() -> None:
    w, velocity = START, np.zeros(3)
    for _ in range(2):
        velocity = 0.8 * velocity + change(w)
        w = w + 0.5 * velocity
    np.testing.assert_allclose(trained(FedAvgM(server_momentum=0.8, **SETTINGS), 2), w, rtol=1e-13)


@pytest.mark.parametrize("algorithm", [FedAdagrad(**SETTINGS), FedAdam(**SETTINGS), FedYogi(**SETTINGS)])
def test_adaptive_steps(algorithm: FedAdagrad) -> None:
    w, first, second = START, np.zeros(3), np.zeros(3)
    for _ in range(2):
        delta = change(w)
        first = 0.9 * first + 0.1 * delta
        second = {
            "FedAdagrad": second + delta**2,
            "FedAdam": 0.99 * second + 0.01 * delta**2,
            "FedYogi": second - 0.01 * delta**2 * np.sign(second - delta**2),
        }[type(algorithm).__name__]
        w = w + 0.5 * first / (np.sqrt(second) + 1e-9)
    np.testing.assert_allclose(trained(algorithm, 2), w, rtol=1e-12)
