"""Data and a task for small runs."""

from __future__ import annotations

import numpy as np
import pytest

import fedloom as fl
from tests.experiment.small_run import Net


@pytest.fixture
def federation() -> fl.Federation:
    random = np.random.default_rng(3)
    x = random.normal(size=(60, 3)).astype("float32")
    return fl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), client=np.repeat(["a", "b", "c"], 20))


@pytest.fixture
def task() -> fl.Task:
    return fl.Task(Net)
