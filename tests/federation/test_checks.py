"""Settings that do not fit are refused before the first round."""

import pytest
import torch

from fedloom import FedAdam, FedAvg, Task
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, fit
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


def all_frozen() -> torch.nn.Module:
    return Dense().requires_grad_(False)


def test_a_model_without_anything_to_learn_can_only_be_evaluated() -> None:
    data, task, plain = federation((20, 30)), Task(all_frozen), Task(Dense)
    with pytest.raises(InputError, match=r"^All parameters of the model are frozen .* set rounds = 0 to evaluate"):
        next(fit(data, task, FedAvg(lr=0.1), 1))
    everything = Evaluation(server=("test",))
    found, wanted = (last(fit(data, one, FedAvg(lr=0.1), 0, evaluation=everything)) for one in (task, plain))
    assert found.state == {"model": {}}
    assert found.clients == wanted.clients
    assert found.server == wanted.server != {}


def test_a_frozen_complex_parameter_is_none_of_an_algorithms_business() -> None:
    def half() -> torch.nn.Module:
        module = Turning()
        module.turn.requires_grad_(False)
        return module

    assert "turn" not in last(fit(federation((20, 30)), Task(half), FedAdam(lr=0.1), 1)).state["model"]


def test_a_cohort_larger_than_the_population_is_refused() -> None:
    with pytest.raises(InputError, match=r"^cohort\.count = 3, but there are only 2 clients\."):
        next(fit(federation((20, 30)), Task(Dense), FedAvg(), 1, sampling=Sampling(count=3)))
