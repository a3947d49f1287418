"""Settings that do not fit are refused before the first round."""

import pytest
import torch

from fedloom import FedAdam, FedAvg, Task
from fedloom.errors import InputError
from fedloom.federation.engine import fit
from fedloom.federation.sampling import Sampling
from tests.conftest import Dense, federation, last


class Turning(Dense):
    """Has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = torch.nn.Parameter(torch.ones(3, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * self.turn).abs()


def test_complex_parameters_are_averaged_and_refused_where_formulas_are_for_real_ones() -> None:
    data, task = federation((20, 30)), Task(Turning)
    record = last(fit(data, task, FedAvg(lr=0.1), 1))
    assert record.state["model"]["turn"].dtype == torch.complex64
    for algorithm in (FedAdam(lr=0.1), FedAvg(lr=0.1, rule="median")):
        with pytest.raises(InputError, match="The model has complex parameters"):
            last(fit(data, task, algorithm, 1))


def test_a_cohort_larger_than_the_population_is_refused() -> None:
    with pytest.raises(InputError, match=r"^cohort\.count = 3, but there are only 2 clients\."):
        next(fit(federation((20, 30)), Task(Dense), FedAvg(), 1, sampling=Sampling(count=3)))
