"""A module is used without leaving traces."""

import itertools
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.task import Task
from fedloom.training.evaluation import measure
from fedloom.training.modules import ModuleTensors
from fedloom.training.python_state import PythonState
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


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.names, self.table = 0, ["a"], {"x": [1]}
        self.generator, self.numbers, self.dice = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.ticks, self.queue, self.cache, self.array = itertools.count(), deque([1]), torch.ones(2), np.ones(2)
        self.seen = {1}


CHANGES: dict[str, Any] = {
    "a counter": lambda m: setattr(m, "count", m.count + 1),
    "something new": lambda m: setattr(m, "more", 1),
    "something gone": lambda m: delattr(m, "count"),
    "a list": lambda m: m.names.append("b"),
    "a list in a dict": lambda m: m.table["x"].append(2),
    "torch's generator": lambda m: torch.rand(1, generator=m.generator),
    "numpy's generator": lambda m: m.numbers.random(),
    "Python's generator": lambda m: m.dice.random(),
    "ticks": lambda m: next(m.ticks),
    "a queue": lambda m: m.queue.append(2),
    "a tensor": lambda m: m.cache.add_(1),
    "an array": lambda m: m.array.__iadd__(1),
    "a set": lambda m: m.seen.add(2),
    "its mode": lambda m: setattr(m, "names", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_module_keeps_in_python_begins_afresh(name: str) -> None:
    module = Keeps()
    state = PythonState(module)
    for _ in range(2):
        with state.fresh():
            assert not state.changed()
            CHANGES[name](module)
            assert state.changed()
        assert not state.changed()


def test_a_use_inside_another_begins_afresh_and_gives_back() -> None:
    module = Keeps()
    state = PythonState(module)
    with state.fresh():
        module.count = 5
        module.names.append("b")
        with state.fresh():
            assert (module.count, module.names) == (0, ["a"])
            module.count = 0
        assert (module.count, module.names) == (5, ["a", "b"])
    assert (module.count, module.names) == (0, ["a"])


def test_what_cannot_be_copied_is_named() -> None:
    module = Dense()
    module.stream = (number for number in range(3))
    with pytest.raises(InputError, match=r"keeps a generator as 'stream', which cannot be copied"):
        PythonState(module)
