"""A model that mixes the examples of a batch is not trained with differential privacy of examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.errors import InputError
from fedloom.privacy.dp.apart import check_apart
from fedloom.privacy.dp.example_level import per_example_module
from fedloom.privacy.table import PrivacyTable

pytest.importorskip("opacus")
MIXES = r"example_dp cannot train this model: .* depends on the other examples"


class Net(nn.Module):
    """A layer with something before or after it."""

    def __init__(self, before: Callable[[Tensor], Tensor] = nn.Identity(), after: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.before, self.after = nn.Linear(3, 2), before, after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x)))


MIXED = {
    "normalised by the batch": lambda x: (x - x.mean(0)) / (x.std(0, correction=0) + 1e-6),
    "a little of the mean": lambda x: x - 0.05 * x.mean(0),
    "sorted": lambda x: x.sort(0)[0],
    "divided by the size": lambda x: x / len(x),
    "random, and mixed": lambda x: torch.dropout(x, 0.5, True) - x.mean(0),
}


def tried(net: nn.Module) -> None:
    task = fl.Task(net)
    check_apart(task, per_example_module(task.module), torch.rand(5, 3), torch.tensor([0, 1, 0, 1, 1]))


@pytest.mark.parametrize("before", MIXED.values(), ids=MIXED)
def test_a_model_that_mixes_examples_is_refused(before: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(InputError, match=MIXES):
        tried(Net(before))
    with pytest.raises(InputError, match=MIXES):
        tried(Net(after=nn.LogSoftmax(dim=0)))


@pytest.mark.parametrize(
    "net",
    [
        Net(),
        Net(after=nn.LogSoftmax(dim=1)),
        Net(lambda x: torch.dropout(x, 0.5, True)),
        nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Dropout(0.3), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)),
    ],
    ids=["plain", "softmax of each", "random", "groups", "layers"],
)
def test_a_model_of_single_examples_is_not(net: nn.Module) -> None:
    tried(net)


def test_words_are_made_up_as_numbers_of_words() -> None:
    class Words(nn.Module):
        def __init__(self, mixes: bool) -> None:
            super().__init__()
            self.words, self.out, self.mixes = nn.Embedding(9, 4), nn.Linear(4, 2), mixes

        def forward(self, x: Tensor) -> Tensor:
            seen = self.words(x).mean(1)
            return self.out(seen - seen.mean(0) if self.mixes else seen)

    for mixes in (False, True):
        task = fl.Task(Words(mixes))
        module, x, y = per_example_module(task.module), torch.randint(9, (5, 6)), torch.zeros(5, dtype=torch.int64)
        if mixes:
            with pytest.raises(InputError, match=MIXES):
                check_apart(task, module, x, y)
        else:
            check_apart(task, module, x, y)


@pytest.mark.parametrize("raises", [True, False])
def test_real_examples_are_tried_if_the_model_takes_no_made_up_ones(raises: bool) -> None:
    def only_positive(x: Tensor) -> Tensor:
        if raises and bool((x < 0).any()):
            raise ValueError("a logarithm of a negative number")
        x = torch.where(x < 0, torch.nan, x)
        return x.log1p() - x.log1p().mean(0)

    task, x = fl.Task(Net(only_positive)), torch.rand(5, 3)
    with pytest.raises(InputError, match=MIXES):
        check_apart(task, per_example_module(task.module), x, torch.zeros(5, dtype=torch.int64))


def test_a_run_is_refused_before_it_trains(tmp_path: Path) -> None:
    data = fl.Federation.from_arrays(torch.rand(40, 3), torch.arange(40) % 2, clients=2)
    private = PrivacyTable(example_dp={"epsilon": 4.0})
    with pytest.raises(InputError, match=MIXES):
        fl.run(data, fl.Task(Net(MIXED["normalised by the batch"])), fl.FedAvg(), 2, out=tmp_path, privacy=private)
    assert not list(tmp_path.glob("cells/*/*"))
