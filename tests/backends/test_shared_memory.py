"""Federations in memory that several processes map."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.backends import shared_memory
from fedloom.backends.shared_memory import attach, share
from fedloom.data.federation import Federation
from tests.conftest import (
    federation,
)


def test_a_federation_is_shared_without_a_change() -> None:
    extra = federation((5,), seed=2)
    data = federation((12, 30), server={"test": (extra.x, extra.y)}, scale=0.5, seed=0)
    data = replace(data, x=data.x[:, ::2], seed=17)  # not contiguous
    handle = share(data)
    again = attach(handle)
    assert torch.equal(again.x, data.x)
    assert torch.equal(again.y, data.y)
    assert again.offsets.tolist() == data.offsets.tolist()
    assert torch.equal(again.server["test"][0], extra.x)
    assert (again.scale, again.seed, again.classes, again.split) == (0.5, 17, data.classes, data.split)
    assert [again.name(client) for client in range(3)] == ["client-0", "client-1", "everyone"]
    assert torch.equal(again.indices(1, "train"), data.indices(1, "train"))


def test_what_one_process_writes_by_mistake_stays_there() -> None:
    data = federation((12,))
    handle = share(data)
    attach(handle).x.zero_()
    assert torch.equal(attach(handle).x, data.x)


def test_shared_memory_is_given_back() -> None:
    handle = share(federation((12,)))
    path = Path(handle.path)
    assert path.exists()
    del handle
    assert not path.exists()


def test_what_a_killed_process_shared_is_swept_and_what_others_use_is_not() -> None:
    code = """
import os, signal
from fedloom.backends.shared_memory import share
from tests.conftest import federation
handle = share(federation((12,)))
print(handle.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    mine = share(federation((30,)))
    left = Path(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    )
    assert left.suffix == ".shared"
    assert left.exists()
    shared_memory.sweep()
    assert not left.exists()
    assert attach(mine).clients == 1


def test_a_client_without_examples_can_be_shared() -> None:
    empty = Federation(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), np.array([0, 0]))
    assert attach(share(empty)).x.shape == (0, 3)


def test_very_many_clients_are_named_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    data = federation((12, 30))
    monkeypatch.setattr(shared_memory, "MOST_NAMES", 2)
    assert attach(share(data)).name(1) == "client-1"
    monkeypatch.setattr(shared_memory, "MOST_NAMES", 1)
    assert attach(share(data)).name(1) == "1"
