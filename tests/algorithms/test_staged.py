"""Hierarchical averaging against FedAvg."""

import numpy as np
import pytest

from fedloom.algorithms import FedAvg, Staged
from fedloom.errors import InputError
from tests.algorithms.linear import (
    LR,
    trained,
)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_it_equals_flat_averaging(groups: int) -> None:
    settings = {"lr": LR, "batch_size": "full"}
    found = trained(Staged(groups=groups, **settings), 2)
    np.testing.assert_allclose(found, trained(FedAvg(**settings), 2), rtol=1e-13)


def test_it_has_no_robust_rule() -> None:
    with pytest.raises(InputError, match="cannot use a rule"):
        Staged(rule="median")
