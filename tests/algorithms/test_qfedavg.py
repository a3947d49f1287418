"""q-FedAvg, computed by hand."""

import numpy as np

from fedloom.algorithms import FedAvg, QFedAvg
from tests.algorithms.linear import (
    LR,
    RANGES,
    START,
    X,
    Y,
    after,
    descend,
    trained,
    vector,
)


def test_a_larger_loss_counts_for_more() -> None:
    q, steepness, numerator, denominator = 2.0, 1 / LR, np.zeros(3), 0.0
    for rows in RANGES:
        inputs = np.column_stack([X[rows], np.ones(len(rows))])
        loss = np.mean((inputs @ START - Y[rows]) ** 2)
        change = steepness * (START - descend(START, rows))
        numerator += loss**q * change
        denominator += q * loss ** (q - 1) * change @ change + steepness * loss**q
    found = trained(QFedAvg(q=q, lr=LR, batch_size="full"), 1)
    np.testing.assert_allclose(found, START - numerator / denominator, rtol=1e-12)


def test_with_q_zero_it_is_fedavg() -> None:
    settings = {"lr": LR, "batch_size": "full", "weights": "examples"}
    np.testing.assert_allclose(trained(QFedAvg(q=0.0, **settings), 2), trained(FedAvg(**settings), 2), rtol=1e-13)


def test_with_q_zero_it_is_fedavg_also_with_a_schedule() -> None:
    halves = {"lr": 0.2, "schedule": {"name": "exponential", "factor": 0.5}}
    same = [after(kind, 3).state["model"] for kind in (QFedAvg(q=0.0, **halves), FedAvg(weights="uniform", **halves))]
    np.testing.assert_allclose(vector(same[0]), vector(same[1]), rtol=1e-12)
