"""Trials find models that cannot be trained side by side."""

import pytest
from torch import Tensor, nn

from fedloom.task import Task
from fedloom.training.probe import probe
from tests.conftest import FEATURES, Noisy, federation
from tests.training.helpers import BatchMean, TimeMajor


def test_a_model_that_draws_by_itself_says_why_it_is_not_grouped() -> None:
    assert "global generator" in probe(federation((20,)), Task(Noisy)).cannot_group


class OverTime(nn.Module):
    """Normalises examples and moments together, so that rows are more than examples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x.reshape(-1, 4)).reshape(-1, FEATURES))


@pytest.mark.parametrize("first", ["different", "equal", "zero"])
@pytest.mark.parametrize("model", [OverTime, BatchMean, TimeMajor])
def test_a_model_that_padding_would_disturb_is_not_grouped_whatever_the_first_examples_are(
    model: type[nn.Module], first: str
) -> None:
    data = federation((20,))
    if first != "different":
        data.x[:2] = data.x[2] if first == "equal" else 0.0
    found = probe(data, Task(model))
    assert found.cannot_group != ""
    assert found.setup(group=4).group == 1
