"""What an honest answer looks like, found out on made-up examples."""

from __future__ import annotations

import pytest
import torch

import fedloom as fl
from fedloom.federation.work import ClientWork
from fedloom.network.protocol.expected_update import EXAMPLES, expected_update, synthetic_place
from fedloom.network.protocol.messages import DataFormat
from fedloom.task import Task
from fedloom.training.clients import Setup
from fedloom.training.probe import probe
from tests.conftest import Dense
from tests.conftest import federation as some_clients


def test_an_update_has_the_names_shapes_and_dtypes_of_the_model() -> None:
    data, task = some_clients((12, 9, 7)), Task(Dense)
    place = synthetic_place(DataFormat.of(data), task, probe(data, task).setup(group=1))
    algorithm, initial = fl.FedAvg(lr=0.1), task.initial()
    work = ClientWork(algorithm, "client", algorithm.init(task, initial), (2, 0), {}, 1, 1, 0, "sum")
    found = expected_update(work, {}, place)
    assert found.groups == {"model": {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in initial.items()}}
    assert found.bytes == sum(leaf.nbytes for leaf in initial.values())
    assert found.positions == {"model": "model"}
    assert found.public == {}


@pytest.mark.parametrize(
    ("dtype", "classes", "label"), [("float32", ("a", "b"), torch.int64), ("int64", (), torch.float32)]
)
def test_made_up_examples_have_the_format_of_the_agents_data(
    dtype: str, classes: tuple[str, ...], label: torch.dtype
) -> None:
    place = synthetic_place(DataFormat(features=(3, 2), dtype=dtype, classes=classes), Task(Dense), Setup())
    assert place.federation.x.shape == (EXAMPLES, 3, 2)
    assert place.federation.x.dtype == getattr(torch, dtype)
    assert place.federation.y.dtype == label
    assert place.federation.clients == 1
