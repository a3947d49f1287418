"""Averaging by validation score, computed by hand."""

import numpy as np
import pytest

from fedloom.algorithms import EvaluationWeighted
from fedloom.data.split import Split
from fedloom.errors import InputError
from fedloom.federation.engine import fit
from tests.algorithms.linear import (
    LR,
    START,
    X,
    Y,
    after,
    descend,
    linear_task,
    vector,
)
from tests.conftest import last, numbers_federation


def test_a_lower_validation_loss_counts_for_more() -> None:
    in_order = Split(train=0.6, validation=0.4, test=0.0, shuffle=False)
    data = numbers_federation(X.tolist(), Y.tolist(), (2, 3), split=in_order)
    models, weights = [], []
    for train, validation in (([0], [1]), ([2], [3, 4])):
        models.append(descend(START, np.array(train)))
        inputs = np.column_stack([X[validation], np.ones(len(validation))])
        weights.append(1 / np.mean((inputs @ models[-1] - Y[validation]) ** 2))
    record = last(fit(data, linear_task(), EvaluationWeighted(metric="loss", lr=LR, batch_size="full"), 1))
    np.testing.assert_allclose(vector(record.state["model"]), np.average(models, axis=0, weights=weights), rtol=1e-12)


def test_a_client_without_the_metric_is_named() -> None:
    with pytest.raises(InputError, match="has no accuracy to be weighted by: there are no validation examples"):
        after(EvaluationWeighted(), 1)
