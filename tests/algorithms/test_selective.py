"""Selective averaging, computed by hand."""

import numpy as np

from fedloom.algorithms import Selective
from fedloom.data.split import Split
from fedloom.federation.engine import fit
from tests.algorithms.linear import (
    LR,
    START,
    X,
    Y,
    descend,
    linear_task,
    vector,
)
from tests.conftest import last, numbers_federation


def test_a_client_that_is_much_worse_is_left_out() -> None:
    x, y = [*X.tolist(), [1.0, 1.0]], [*Y.tolist(), 100.0]  # no model does well on the last client's validation data
    in_order = Split(train=0.5, validation=0.5, test=0.0, shuffle=False)
    data = numbers_federation(x, y, (2, 2, 2), split=in_order)
    record = last(fit(data, linear_task(), Selective(metric="loss", lr=LR, batch_size="full"), 1))
    expected = (descend(START, np.array([0])) + descend(START, np.array([2]))) / 2
    np.testing.assert_allclose(vector(record.state["model"]), expected, rtol=1e-13)


def test_a_rule_judges_all_clients_also_those_that_are_left_out() -> None:
    x, y = [*X.tolist(), [1.0, 1.0]], [*Y.tolist(), 100.0]
    in_order = Split(train=0.5, validation=0.5, test=0.0, shuffle=False)
    data = numbers_federation(x, y, (2, 2, 2), split=in_order)
    algorithm = Selective(metric="loss", lr=LR, batch_size="full", rule="median")
    record = last(fit(data, linear_task(), algorithm, 1))
    expected = np.median([descend(START, np.array([row])) for row in (0, 2, 4)], axis=0)
    np.testing.assert_allclose(vector(record.state["model"]), expected, rtol=1e-12)
