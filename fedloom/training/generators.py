"""The global generators of torch, numpy and Python: lend them to models, and restore them afterwards."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

_numpy: Any = np.random  # its stubs lack two functions
_LENT = np.random.MT19937(0)  # replaces numpy's own while a model computes: exchanging is cheaper than copying


GENERATOR = threading.RLock()  # all threads share the generators: only one thread may seed them at a time
_lent = threading.local()  # whether this thread uses them already, and whether your code does


@contextmanager
def lent() -> Iterator[None]:
    """Allow seeding and drawing from all global generators. They are restored afterwards."""
    if getattr(_lent, "now", False):
        with _kept() if getattr(_lent, "yours", False) else nullcontext():
            yield
        return
    GENERATOR.acquire()
    _lent.now = True
    torch_before, python_before = torch.get_rng_state(), random.getstate()
    numpy_before, numpy_state = _numpy.get_bit_generator(), np.random.get_state(legacy=False)
    _numpy.set_bit_generator(_LENT)
    try:
        yield
    finally:
        _lent.now = False
        _numpy.set_bit_generator(numpy_before)
        if numpy_state["has_gauss"]:  # numpy draws normal numbers in pairs, and exchanging drops one that is left
            np.random.set_state(numpy_state)
        random.setstate(python_before)
        torch.set_rng_state(torch_before)
        GENERATOR.release()


def seed(key: int, device: str = "cpu") -> None:
    """Seed all global generators from a key, so that a model's draws depend only on the key."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    # torch.manual_seed looks for every kind of accelerator, which is a hundred times slower
    torch.default_generator.manual_seed(key >> 1) if device == "cpu" else torch.manual_seed(key >> 1)


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed all global generators from a key for a while, even where they are lent already."""
    with GENERATOR, _kept():
        seed(key)
        yield


@contextmanager
def yours(key: int) -> Iterator[Callable[[], bool]]:
    """Seed all global generators from a key for code of yours; yield a function that says whether it drew.

    What fedloom draws in between, such as for a training step, leaves no trace.
    """
    seed(key)
    before, _lent.yours = positions(), True
    try:
        yield lambda: positions() != before
    finally:
        _lent.yours = False


@contextmanager
def _kept() -> Iterator[None]:
    """Restore the generators afterwards. This copies their states, which `lent` avoids for numpy's."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def positions() -> tuple[object, ...]:
    """Return the states of the generators, which any draw changes."""
    state = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), state["pos"], state["key"].tobytes()
