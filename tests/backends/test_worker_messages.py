"""Messages between processes arrive as they were sent."""

import socket
from threading import Lock, Thread

import numpy as np
import pytest
import torch
from torch import nn

from fedloom.backends import worker_messages
from fedloom.errors import InputError
from fedloom.task import Task


def through_a_socket(payload: object) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = Thread(target=worker_messages.send, args=(ours, worker_messages.pack(payload)))
        sender.start()
        found = worker_messages.unpack(worker_messages.receive(theirs))
        sender.join()
    return found


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
        torch.tensor(3),
    ],
    ids=["not contiguous", "bfloat16", "complex", "bool", "empty", "scalar"],
)
def test_tensors_keep_kind_shape_and_values(tensor: torch.Tensor) -> None:
    found = through_a_socket({"a": tensor})["a"]  # type: ignore[index]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)


def test_tensors_travel_beside_the_pickle() -> None:
    head, *beside = worker_messages.pack({"a": torch.zeros(1000), "b": np.ones(10)})
    assert sorted(memoryview(part).nbytes for part in beside) == [80, 4000]
    assert len(head) < 1000


def test_functions_of_a_script_can_be_sent() -> None:
    twice = lambda x: 2 * x  # noqa: E731
    assert through_a_socket(twice)(4) == 8  # type: ignore[operator]


def test_a_closed_connection_is_the_end() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(EOFError):
        worker_messages.receive(theirs)


def test_what_cannot_be_sent_is_named_by_the_way_that_leads_to_it() -> None:
    lock = Lock()

    def own_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with lock:
            return (output - target).square()

    task = Task(nn.Linear(2, 1), loss=own_loss)
    with pytest.raises(InputError, match=r"cannot have `loss\.lock`, a lock: cannot pickle .*backend = \"serial\""):
        worker_messages.pack(({"handle": 1}, task))
    around: dict[str, object] = {}
    around["self"] = around
    around["file"] = lock
    with pytest.raises(InputError, match="cannot have `self"):
        worker_messages.pack(around)
