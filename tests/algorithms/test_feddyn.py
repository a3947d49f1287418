"""FedDyn, computed by hand."""

import numpy as np

from fedloom.algorithms import FedDyn
from tests.algorithms.linear import (
    LR,
    RANGES,
    START,
    gradient,
    trained,
)


def test_two_rounds() -> None:
    alpha, w, bend, kept = 0.5, START, np.zeros(3), [np.zeros(3), np.zeros(3)]
    for _ in range(2):
        moved = [w - LR * (gradient(w, rows) - own) for rows, own in zip(RANGES, kept, strict=True)]
        kept = [own - alpha * (w_k - w) for own, w_k in zip(kept, moved, strict=True)]
        bend = bend - alpha * (np.mean(moved, axis=0) - w)
        w = np.mean(moved, axis=0) - bend / alpha
    np.testing.assert_allclose(trained(FedDyn(alpha=alpha, lr=LR, batch_size="full"), 2), w, rtol=1e-13)
