"""What an honest answer looks like: the coordinator runs the same method once, on a few examples that it makes up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedloom import keys
from fedloom.data.build import federate
from fedloom.data.federation import Dataset
from fedloom.federation.work import ClientWork, Place
from fedloom.machine import computing
from fedloom.task import Task
from fedloom.training.clients import Setup
from fedloom.training.fast_paths import forget_trainers
from fedloom.training.local import Groups

EXAMPLES = 12
Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Template:
    """Names, shapes and kinds of numbers of everything that a client method answers."""

    groups: dict[str, dict[str, Shape]]
    public: dict[str, Shape]
    positions: dict[str, str] = field(default_factory=dict)  # as in `Update`

    @property
    def bytes(self) -> int:
        shapes = [shape for leaves in self.groups.values() for shape in leaves.values()] + [*self.public.values()]
        return sum(torch.Size(shape).numel() * torch.empty(0, dtype=kind).element_size() for shape, kind in shapes)


@dataclass(frozen=True)
class Made:
    """A few made-up examples of the kind that the agents have."""

    features: Sequence[int]
    dtype: str
    classes: Sequence[str]

    def place(self, task: Task, setup: Setup) -> Place:
        kind = getattr(torch, self.dtype)
        shape = (EXAMPLES, *self.features)
        if kind.is_floating_point:
            x = torch.from_numpy(keys.generator(0).normal(size=shape)).to(kind)
        else:
            x = torch.zeros(shape, dtype=kind)
        y = torch.arange(EXAMPLES) % len(self.classes) if self.classes else torch.linspace(0, 1, EXAMPLES)
        dataset = Dataset(x, y, classes=tuple(self.classes))
        return Place(federate(dataset, clients=1, split=(0.5, 0.25, 0.25)), task, replace(setup, device="cpu"))


def template(work: ClientWork, own: Groups, place: Place) -> Template:
    """What the first client of a call would answer; `own` is what clients keep before they first take part."""
    graph = None
    if work.graph is not None:
        graph = work.graph[:1].clone()
        graph[0, 0] = True  # it hears somebody
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
    forget_trainers()  # a coordinator trains nothing else
    return Template(
        {group: _shapes(leaves) for group, leaves in outcome.stack.items()},
        _shapes(outcome.public),
        outcome.positions or {},
    )


def _shapes(leaves: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: (tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in leaves.items()}
