"""What an honest answer looks like: run the client method once, on a few made-up examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedloom import keys
from fedloom.data.build import federate
from fedloom.data.federation import Dataset
from fedloom.federation.work import ClientWork, Place
from fedloom.machine import computing
from fedloom.network.protocol.messages import DataFormat
from fedloom.task import Task
from fedloom.training.clients import Setup
from fedloom.training.fast_paths import forget_trainers
from fedloom.tree import Groups

EXAMPLES = 12
Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class ExpectedUpdate:
    """Names, shapes and dtypes of everything that a client method returns."""

    groups: dict[str, dict[str, Shape]]
    public: dict[str, Shape]
    positions: dict[str, str] = field(default_factory=dict)  # as in `Update`

    @property
    def bytes(self) -> int:
        shapes = [shape for leaves in self.groups.values() for shape in leaves.values()] + [*self.public.values()]
        return sum(torch.Size(shape).numel() * torch.empty(0, dtype=kind).element_size() for shape, kind in shapes)

    @property
    def tensors(self) -> int:
        """How many tensors an answer has: leaves, public numbers, and a weight and perhaps a mark for each group."""
        return sum(len(leaves) + 2 for leaves in self.groups.values()) + len(self.public)


def synthetic_place(data: DataFormat, task: Task, setup: Setup) -> Place:
    """Return a place with one client and a few made-up examples in the agents' format."""
    dtype = getattr(torch, data.dtype)
    shape = (EXAMPLES, *data.features)
    if dtype.is_floating_point:
        x = torch.from_numpy(keys.generator(0).normal(size=shape)).to(dtype)
    else:
        x = torch.zeros(shape, dtype=dtype)
    y = torch.arange(EXAMPLES) % len(data.classes) if data.classes else torch.linspace(0, 1, EXAMPLES)
    dataset = Dataset(x, y, classes=data.classes)
    return Place(federate(dataset, clients=1, split=(0.5, 0.25, 0.25)), task, replace(setup, device="cpu"))


def expected_update(work: ClientWork, own: Groups, place: Place) -> ExpectedUpdate:
    """Return what the first client of a call would answer; `own` is a client's state before it first takes part."""
    graph = None
    if work.graph is not None:
        graph = work.graph[:1].clone()
        graph[0, 0] = True  # the client receives at least one tree
    one = replace(
        work.part(0, 1),
        ids=(0,),
        own={group: {name: leaf[None] for name, leaf in leaves.items()} for group, leaves in own.items()},
        keep="stack",
        graph=graph,
        measure=(),
        universal=False,
        watch_epochs=False,
        first=0,
    )
    with computing():
        outcome = one.perform(place)
    forget_trainers()  # this process trains nothing else
    groups = {group: _shapes(leaves) for group, leaves in outcome.stack.items()}
    return ExpectedUpdate(groups, _shapes(outcome.public), outcome.positions or {})


def _shapes(leaves: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: (tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in leaves.items()}
