"""What a module keeps in Python is the same at the start of every use."""

import itertools
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedloom.errors import InputError
from fedloom.training.python_state import PythonState
from tests.conftest import Dense


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
