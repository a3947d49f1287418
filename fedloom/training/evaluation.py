"""Evaluation: loss and metrics of a model on some examples, and examples as a model takes them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fedloom.data.split import SplitName
from fedloom.task import Task
from fedloom.training import generators
from fedloom.training.clients import Clients, Setup
from fedloom.training.masking import Masked
from fedloom.tree import Tree

_NO_KEY = torch.zeros(2, dtype=torch.int64)  # what dropout in evaluation is drawn from


@dataclass(frozen=True)
class Measured:
    """Loss and metrics of one model on some examples, as sums, so that parts can be added up."""

    count: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    scores: dict[str, Tensor] = field(default_factory=dict)
    targets: Tensor | None = None

    def __add__(self, other: Measured) -> Measured:
        if not self.count or not other.count:
            return self if self.count else other
        assert self.targets is None or other.targets is not None
        return Measured(
            self.count + other.count,
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: torch.cat([value, other.scores[name]]) for name, value in self.scores.items()},
            None if self.targets is None or other.targets is None else torch.cat([self.targets, other.targets]),
        )

    def values(self, task: Task) -> dict[str, float]:
        """Loss and metrics; nothing when there were no examples."""
        if not self.count:
            return {}
        found = {name: value / self.count for name, value in self.sums.items()}
        for metric in task.measures:
            if metric.summary is not None and self.targets is not None:
                found[metric.name] = metric.summary(self.scores[metric.name].numpy(), self.targets.numpy())
        return found


def pool(parts: Sequence[Measured]) -> Measured:
    """Several clients' measurements as if one client had held all their examples."""
    parts = [part for part in parts if part.count] or [Measured()]
    targets = [part.targets for part in parts if part.targets is not None]
    whole = len(targets) == len(parts)  # scores without labels are worth nothing
    return Measured(
        sum(part.count for part in parts),
        {name: sum(part.sums[name] for part in parts) for name in parts[0].sums},
        {name: torch.cat([part.scores[name] for part in parts]) for name in parts[0].scores} if whole else {},
        torch.cat(targets) if whole else None,
    )


def evaluate(task: Task, weights: Tree, data: Clients, position: int, split: SplitName) -> Measured:
    """One model on one client's split."""
    rows = data.rows(position, split)
    return evaluate_rows(task, weights, data, rows)


@torch.no_grad()
def evaluate_rows(task: Task, weights: Tree, data: Clients, rows: Tensor) -> Measured:
    """One model on some rows of the federation, in passes of about one size."""
    measured = Measured()
    if len(rows):
        for part in passes(rows, data.setup.evaluation_batch):
            measured = measured + measure(task, weights, *batch(data, part, task), data.setup)
    return measured


def measure(task: Task, weights: Tree, x: Tensor, y: Tensor, setup: Setup = Setup()) -> Measured:
    """One model on one batch."""
    return measure_each(task, weights, x, y, [len(y)], setup)[0]


def evaluate_each(
    task: Task, weights: Tree, data: Clients, positions: Sequence[int], split: SplitName
) -> list[Measured]:
    """One model on one split of several clients: in one pass, if they have few examples and these do not mix."""
    rows = [data.rows(position, split) for position in positions]
    counts = [len(found) for found in rows]
    if not data.setup.rows_apart or not 0 < sum(counts) <= data.setup.evaluation_batch:
        return [evaluate_rows(task, weights, data, found) for found in rows]
    return measure_each(task, weights, *batch(data, torch.cat(rows), task), counts, data.setup)


@torch.no_grad()
def measure_each(
    task: Task, weights: Tree, x: Tensor, y: Tensor, counts: Sequence[int], setup: Setup = Setup()
) -> list[Measured]:
    """One model on the batches of several clients, laid end to end: `counts` examples each.

    It leaves no trace: what model and loss draw is the same every time, and what they keep in Python is forgotten.
    """
    with generators.lent(), task.python_state.fresh():
        generators.seed(0, setup.device)
        output = outputs(task, weights, x, setup.drops_evaluating)
        named = task.losses(output, y) if isinstance(task.loss, str) else None
        means = {m.name: m.values(output, y) for m in task.measures if m.values is not None}
        values = {name: each.to(torch.float64).reshape(len(y), -1).mean(1) for name, each in means.items()}
        scores = {m.name: m.scores(output).to("cpu", copy=True) for m in task.measures if m.scores is not None}
        found, begin = [], 0
        for count in counts:
            own = slice(begin, begin + count)
            begin += count
            if not count:
                found.append(Measured())
                continue
            if named is not None:
                loss = named[own].sum(dtype=torch.float64).item()
            elif count == len(y):  # what the loss function says of the client's batch, times its examples
                loss = task.batch_loss(output, y).item() * count
            else:
                with task.python_state.fresh():
                    generators.seed(0, setup.device)
                    loss = task.batch_loss(tree_map_only(Tensor, itemgetter(own), output), y[own]).item() * count
            sums = {"loss": loss, **{name: each[own].sum().item() for name, each in values.items()}}
            kept = {name: score[own] for name, score in scores.items()}
            found.append(Measured(count, sums, kept, y[own].cpu() if kept else None))
    return found


def outputs(task: Task, weights: Tree, x: Tensor, keyed: bool = False) -> Any:
    """What a model says of some examples, in evaluation mode; what it writes is written to copies.

    What it gives may be a part of these copies, which the next evaluation overwrites.
    """
    module = task.module.eval()  # training says itself that it trains
    # torch computes some models another way inside a mode: it is there only if dropout needs it
    mode = Masked(_NO_KEY.to(x.device)) if keyed else nullcontext()
    with task.tensors.replaced(task.tensors.copies({**task.transient, **weights})), mode:
        return module(x)


def batch(data: Clients, rows: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """Examples of some rows: floating features in the task's precision, one-byte features scaled."""
    held = data.federation
    x, y = held.x.index_select(0, rows), held.y.index_select(0, rows)  # many times as fast as indexing
    return prepare(x, y, held.scale, task, data.setup.device)


def prepare(x: Tensor, y: Tensor, scale: float, task: Task, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Stored examples as the model takes them."""
    if x.is_floating_point():
        x = x.to(task.torch_dtype)
    elif scale != 1.0 or x.dtype == torch.uint8:
        x = x.to(task.torch_dtype).mul_(scale)
    y = y.to(task.torch_dtype) if y.is_floating_point() else y
    return (x, y) if device == "cpu" else (x.to(device, non_blocking=True), y.to(device, non_blocking=True))


def passes(rows: Tensor, largest: int) -> Sequence[Tensor]:
    """Rows cut into passes of at most `largest`, as equal as possible: sizes depend on the number of rows alone."""
    count = -(-len(rows) // max(largest, 1))
    return torch.tensor_split(rows, count) if count > 1 else (rows,)
