"""Messages between processes arrive as they were sent."""

import socket
from threading import Thread

import numpy as np
import pytest
import torch

from fedloom.backends import worker_messages


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
