"""FedProx, computed by hand."""

import numpy as np

from fedloom.algorithms import FedAvg, FedProx
from tests.algorithms.linear import (
    LR,
    RANGES,
    START,
    descend,
    gradient,
    mean,
    trained,
)


def test_the_second_local_step_is_pulled_to_the_global_model() -> None:
    models = []
    for rows in RANGES:
        first = descend(START, rows)
        models.append(first - LR * (gradient(first, rows) + 0.5 * (first - START)))
    found = trained(FedProx(mu=0.5, lr=LR, batch_size="full", epochs=2), 1)
    np.testing.assert_allclose(found, mean(*models), rtol=1e-13)


def test_without_a_pull_it_is_fedavg_bit_for_bit() -> None:
    settings = {"lr": LR, "batch_size": 1, "epochs": 2}
    assert trained(FedProx(mu=0.0, **settings), 2).tolist() == trained(FedAvg(**settings), 2).tolist()
