"""FedDC, computed by hand."""

import numpy as np
import pytest

from fedloom.algorithms import FedDC
from fedloom.errors import InputError
from tests.algorithms.linear import LR, RANGES, START, gradient, trained


def test_two_rounds_of_one_step() -> None:
    alpha, w, g = 0.5, START, np.zeros(3)
    drift, update = ([np.zeros(3), np.zeros(3)] for _ in range(2))
    shares = np.array([2, 3]) / 5
    for _ in range(2):
        theta = [
            w - LR * (gradient(w, rows) + alpha * h + (g_k - g) / LR)
            for rows, h, g_k in zip(RANGES, drift, update, strict=True)
        ]
        update = [one - w for one in theta]  # the local update value, with K = 1
        drift = [h + moved for h, moved in zip(drift, update, strict=True)]
        w = sum(share * (one + h) for share, one, h in zip(shares, theta, drift, strict=True))  # all take part
        g = sum(share * moved for share, moved in zip(shares, update, strict=True))
    np.testing.assert_allclose(trained(FedDC(alpha=alpha, lr=LR, batch_size="full"), 2), w, rtol=1e-12)


@pytest.mark.parametrize("training", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_steps_that_lr_does_not_scale_are_refused(training: dict[str, object]) -> None:
    with pytest.raises(InputError, match='use optimizer = "sgd" without momentum'):
        FedDC(**training)
