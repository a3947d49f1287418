"""A round whose result is not finite ends the run."""

import pytest
import torch
from torch import Tensor, nn

from fedloom.algorithms import ALGORITHMS, FedAvg, LocalOnly, Pooled
from fedloom.errors import TrainingError
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from tests.conftest import FEATURES, Dense, federation, last
from tests.federation.helpers import LIGHT, SIZES

EVERY_ALGORITHM = {
    **{name: kind(**LIGHT) for name, kind in ALGORITHMS.items()},
    "fedavg that keeps adam": FedAvg(optimizer="adam", lr=0.01, batch_size=8, optimizer_state="keep"),
    "local that keeps momentum": LocalOnly(momentum=0.9, optimizer_state="keep", **LIGHT),
    "local that forgets": LocalOnly(momentum=0.9, **LIGHT),
    "pooled adam": Pooled(optimizer="adam", lr=0.01, batch_size=8),
}


class Causal(nn.Module):
    """A buffer of minus infinities, as attention masks are."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 3)
        self.register_buffer("mask", torch.zeros(FEATURES).index_fill_(0, torch.tensor([3]), -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x + self.mask).softmax(-1))


def test_weights_that_are_not_finite_end_the_run() -> None:
    algorithm = FedAvg(lr=3e38, batch_size="full")
    with pytest.raises(
        TrainingError,
        match=r"^Round 1: the new model is not finite; the largest update, .* is that of 'client-3'\. A s",
    ):
        last(fit(federation(SIZES), Task(Dense), algorithm, 2, evaluation=Evaluation(splits=())))


def test_a_mask_of_infinities_in_a_buffer_is_not_a_sign_of_divergence() -> None:
    record = last(fit(federation(SIZES), Task(Causal), FedAvg(**LIGHT), 2))
    assert torch.equal(record.state["model"]["mask"], Causal().mask)
