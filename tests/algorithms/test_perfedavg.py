"""Per-FedAvg, computed by hand."""

import numpy as np

from fedloom.algorithms import FedAvg, PerFedAvg
from tests.algorithms.linear import (
    LR,
    RANGES,
    START,
    gradient,
    mean,
    trained,
)


def test_the_gradient_is_taken_after_a_step_of_adaptation() -> None:
    models = [START - LR * gradient(START - 0.2 * gradient(START, rows), rows) for rows in RANGES]
    found = trained(PerFedAvg(alpha=0.2, lr=LR, batch_size="full"), 1)
    np.testing.assert_allclose(found, mean(*models), rtol=1e-13)


def test_without_adaptation_it_is_fedavg() -> None:
    settings = {"lr": LR, "batch_size": "full"}
    np.testing.assert_allclose(trained(PerFedAvg(alpha=0.0, **settings), 2), trained(FedAvg(**settings), 2), rtol=1e-13)
