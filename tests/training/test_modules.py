"""A module is used without leaving traces."""

import pytest
import torch
from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.task import Task
from fedloom.training.evaluation import measure
from fedloom.training.modules import ModuleTensors
from tests.conftest import FEATURES, Dense


class Twice(Dense):
    """One layer under two names, one tensor in two layers, and a buffer that is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.hidden
        self.tied = nn.Linear(FEATURES, 7)
        self.tied.weight = self.hidden.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)
        return self.out(torch.tanh(self.again(x) + self.tied(x)))


def test_a_module_has_its_own_tensors_again_after_it_held_others() -> None:
    module = Twice()
    before = {id(leaf) for leaf in (*module.parameters(), *module.buffers())}
    tensors = ModuleTensors(module)
    others = {name: torch.zeros_like(leaf) for name, leaf in (tensors.parameters | tensors.buffers).items()}
    with tensors.replaced(others):
        assert module.hidden.weight is module.again.weight is module.tied.weight is others["hidden.weight"]
        assert torch.equal(module(torch.ones(2, FEATURES)), torch.zeros(2, 3))
    assert others["seen"] == 2
    assert module.seen == 0
    assert {id(leaf) for leaf in (*module.parameters(), *module.buffers())} == before
    assert all(isinstance(leaf, nn.Parameter) for leaf in module.parameters())


def test_also_after_an_error() -> None:
    module = Twice()
    tensors = ModuleTensors(module)
    with pytest.raises(RuntimeError), tensors.replaced({"out.bias": torch.zeros(1)}):
        module(torch.ones(2, 3))
    assert isinstance(module.out.bias, nn.Parameter)
    assert len(module.out.bias) == 3


def test_measuring_leaves_parameters_where_they_were() -> None:
    task = Task(Twice)
    before = [id(leaf) for leaf in task.module.parameters()]
    measure(task, task.initial(), torch.ones(4, FEATURES), torch.zeros(4, dtype=torch.int64))
    assert [id(leaf) for leaf in task.module.parameters()] == before


def test_a_saved_buffer_keeps_its_shape() -> None:
    module = nn.BatchNorm1d(2)
    tensors = ModuleTensors(module)
    message = r"changes its 'running_mean' from shape \(2,\) to shape \(3,\)"
    with pytest.raises(InputError, match=message), tensors.replaced({"running_mean": torch.zeros(2)}):
        module.running_mean = torch.zeros(3)
    assert module.running_mean is tensors.buffers["running_mean"]
