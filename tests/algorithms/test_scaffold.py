"""SCAFFOLD, computed by hand."""

import numpy as np
import pytest

from fedloom.algorithms import Scaffold
from fedloom.errors import InputError
from tests.algorithms.linear import (
    LR,
    RANGES,
    START,
    after,
    gradient,
    vector,
)


def test_the_second_round_uses_the_controls_of_the_first() -> None:
    controls = [gradient(START, rows) for rows in RANGES]  # after one step, (w − w_k) / lr is the gradient
    w, control = START - LR * np.mean(controls, axis=0), np.mean(controls, axis=0)
    moved = [w - LR * (gradient(w, rows) - own + control) for rows, own in zip(RANGES, controls, strict=True)]
    record = after(Scaffold(lr=LR, batch_size="full"), 2)
    np.testing.assert_allclose(vector(record.state["model"]), np.mean(moved, axis=0), rtol=1e-13)
    kept = [own - control + (w - w_k) / LR for own, w_k in zip(controls, moved, strict=True)]
    for client in range(2):
        np.testing.assert_allclose(vector(record.own[client]["control"]), kept[client], rtol=1e-12)


def test_it_needs_plain_gradient_steps() -> None:
    with pytest.raises(InputError, match='use optimizer = "sgd" without momentum'):
        Scaffold(momentum=0.9)


def test_controls_are_divided_by_the_learning_rates_that_were_used() -> None:
    controls = [gradient(START, rows) for rows in RANGES]
    halves = {"name": "exponential", "factor": 0.5}
    record = after(Scaffold(lr=LR, batch_size="full", schedule={"warmup": 2}, local_schedule=halves), 1)
    for client in range(2):  # the first round has half the rate, and its one step all of that
        np.testing.assert_allclose(vector(record.own[client]["control"]), controls[client], rtol=1e-12)
    moved = [START - LR / 2 * control for control in controls]
    np.testing.assert_allclose(vector(record.state["model"]), np.mean(moved, axis=0), rtol=1e-13)
