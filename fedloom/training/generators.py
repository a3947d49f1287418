"""The global generators of torch, numpy and Python, lent to models that draw from them, and given back."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_numpy: Any = np.random  # whose stubs lack two functions
_LENT = np.random.MT19937(0)  # stands in for numpy's own while a model computes: exchanging is cheaper than copying


GENERATOR = threading.RLock()  # generators are there once for all threads: a thread that seeds them must be alone
_lent = threading.local()  # whether this thread has lent them already


@contextmanager
def lent() -> Iterator[None]:
    """Inside, all global generators may be seeded and drawn from; afterwards they are what they were."""
    if getattr(_lent, "now", False):
        yield
        return
    GENERATOR.acquire()
    _lent.now = True
    torch_before, python_before = torch.get_rng_state(), random.getstate()
    numpy_before = _numpy.get_bit_generator()
    _numpy.set_bit_generator(_LENT)
    try:
        yield
    finally:
        _lent.now = False
        _numpy.set_bit_generator(numpy_before)
        random.setstate(python_before)
        torch.set_rng_state(torch_before)
        GENERATOR.release()


def seed(key: int, device: str = "cpu") -> None:
    """Seed all of them from a key, so that what a model draws depends on the key alone."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    # torch.manual_seed would look for every kind of accelerator, a hundred times as slowly
    torch.default_generator.manual_seed(key >> 1) if device == "cpu" else torch.manual_seed(key >> 1)


def positions() -> tuple[object, ...]:
    """Where the generators are: it differs after any draw."""
    state = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), state["pos"], state["key"].tobytes()
