"""What an honest answer looks like: run the client method once, on a few made-up examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedloom import keys
from fedloom.algorithm import Algorithm
from fedloom.data.build import federate
from fedloom.data.federation import Dataset
from fedloom.errors import InputError, TrainingError
from fedloom.federation.work import ClientWork, Place
from fedloom.machine import computing
from fedloom.network.protocol.messages import DataFormat
from fedloom.task import Task
from fedloom.training.clients import Setup
from fedloom.training.fast_paths import forget_trainers
from fedloom.training.probe import probe
from fedloom.tree import Groups

EXAMPLES = 12
MOST_VALUES = 2**24  # in one example or its labels
MANY_VALUES = 2**22  # in all examples: of larger ones, only the fewest are made up
FEWEST = 4
SMALLEST_LR = 1e-30
Shape = tuple[tuple[int, ...], torch.dtype]
Found = TypeVar("Found")


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


def synthetic_place(
    data: DataFormat, task: Task, setup: Setup | None = None, examples: int = EXAMPLES, fill: int | None = None
) -> Place:
    """Return a place with one client and a few made-up examples in the agents' format.

    Features are normally distributed, and whole numbers are all one: zero often means padding, and a model may take
    the mean over the rest. With `fill`, all features have this value.
    Raise `InputError` if examples of this format are too large, or if there is no `setup` and the task does not take
    them.
    """
    values = max(math.prod(data.features), math.prod(data.labels))
    if values > MOST_VALUES:
        raise InputError(f"an example has {values:,} values, and at most {MOST_VALUES:,} are allowed")
    count = examples if examples * values <= MANY_VALUES else FEWEST
    dtype, shape = getattr(torch, data.dtype), (count, *data.features)
    if dtype.is_floating_point and fill is None:
        x = torch.from_numpy(keys.generator(0).standard_normal(shape, dtype=np.float32)).to(dtype)
    else:
        x = torch.full(shape, 1 if fill is None else fill, dtype=dtype)
    # from the last class downwards: a model with too few outputs fails at once
    y = -torch.arange(1, count + 1) % len(data.classes) if data.classes else torch.linspace(0, 1, count)
    y = y.reshape(-1, *(1 for _ in data.labels)).expand(count, *data.labels).contiguous()
    federation = federate(Dataset(x, y, classes=data.classes), clients=1, split=(0.5, 0.25, 0.25))
    setup = setup or probe(federation, task).setup(group=1)
    return Place(federation, task, replace(setup, device="cpu"))


def tried(
    attempt: Callable[[Place, bool], Found], what: str, algorithm: Algorithm, task: Task, data: DataFormat, setup: Setup
) -> Found:
    """Return what an attempt on made-up examples gives; if it fails, on others, and then with `harmless` work.

    `attempt` takes a place and whether its work must be harmless; `what` names what is tried.
    """
    batch = algorithm.train.batch_size
    more = 4 * batch if isinstance(batch, int) else EXAMPLES + 4
    failed: Exception | None = None
    for fill in (None, 0, 1):  # real weights and learning rates suit real data: here they may diverge
        for examples in (EXAMPLES, more):  # batch normalisation fails on a last batch of one example
            place = synthetic_place(data, replace(task), setup, examples, fill)
            try:
                return attempt(place, fill is not None)
            except Exception as error:
                failed = failed or error
    raise TrainingError(
        f"The form of answers cannot be found: {what} could not be tried on made-up examples. "
        f"{type(failed).__name__}: {failed}"
    ) from failed


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
        compress=work.compress if work.guard is not None and work.guard.table.secure_aggregation is not None else None,
    )
    try:
        with computing():
            outcome = one.perform(place)
    finally:
        forget_trainers()  # this process trains nothing else
    groups = {group: _shapes(leaves) for group, leaves in outcome.stack.items()}
    return ExpectedUpdate(groups, _shapes(outcome.public), outcome.positions or {})


def harmless(work: ClientWork, task: Task) -> ClientWork:
    """Return the same work with the task's initial weights, zeros in all other leaves, and almost no learning rate.

    The form of an answer does not depend on them, and no loss diverges.
    """
    initial = task.initial()

    def start(name: str, leaf: Tensor) -> Tensor:
        first = initial.get(name)
        return first if first is not None and first.shape == leaf.shape else torch.zeros_like(leaf)

    algorithm = work.algorithm
    slow = algorithm.train.model_copy(update={"lr": SMALLEST_LR})
    return replace(
        work,
        algorithm=algorithm.model_copy(update={"train": slow}),
        shared={
            group: {name: start(name, leaf) for name, leaf in leaves.items()} for group, leaves in work.shared.items()
        },
    )


def _shapes(leaves: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: (tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in leaves.items()}
