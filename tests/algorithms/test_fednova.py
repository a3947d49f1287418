"""FedNova, computed from what each client trains alone."""

import numpy as np
import pytest

from fedloom.algorithms import FedAvg, FedNova
from fedloom.errors import InputError
from tests.algorithms.linear import (
    LR,
    START,
    trained,
)
from tests.conformance.transcriptions import Attendance


def test_changes_are_averaged_per_step() -> None:
    settings = {"lr": LR, "batch_size": 2}  # one step at the first client, two at the second
    alone = [trained(FedAvg(**settings), 1, sampling=Attendance(rounds=((client,),))) for client in range(2)]
    steps, shares = (1, 2), (2 / 5, 3 / 5)
    per_step = sum(p * (w - START) / a for p, w, a in zip(shares, alone, steps, strict=True))
    effective = sum(p * a for p, a in zip(shares, steps, strict=True))
    np.testing.assert_allclose(trained(FedNova(**settings), 1), START + effective * per_step, rtol=1e-13)


def test_it_counts_only_steps_of_sgd() -> None:
    with pytest.raises(InputError, match='FedNova counts steps of optimizer = "sgd"'):
        FedNova(optimizer="adam")


def test_it_refuses_different_learning_rates_within_a_round() -> None:
    FedNova(schedule={"name": "exponential", "factor": 0.5})
    with pytest.raises(
        InputError, match="FedNova's formula has one learning rate for all steps and clients of a round"
    ):
        FedNova(local_schedule={"name": "exponential", "factor": 0.5})
