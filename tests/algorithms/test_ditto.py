"""Ditto, computed by hand."""

import numpy as np

from fedloom.algorithms import Ditto, FedAvg
from tests.algorithms.linear import (
    LR,
    RANGES,
    START,
    after,
    descend,
    gradient,
    trained,
    vector,
)


def test_personal_models_are_pulled_to_the_global_one() -> None:
    settings = {"lr": LR, "batch_size": "full"}
    record = after(Ditto(lam=0.5, **settings), 2)
    assert vector(record.state["model"]).tolist() == trained(FedAvg(**settings), 2).tolist()
    shared = trained(FedAvg(**settings), 1)
    for client, rows in enumerate(RANGES):
        own = descend(START, rows)  # in the first round, both models are the same
        own = own - LR * (gradient(own, rows) + 0.5 * (own - shared))
        np.testing.assert_allclose(vector(record.own[client]["personal"]), own, rtol=1e-13)
