"""Evaluate a model on some examples: its loss and metrics. Also prepare examples as a model takes them."""

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

NO_KEY = torch.zeros(2, dtype=torch.int64)  # the key of dropout in evaluations and trials


@dataclass(frozen=True)
class Measured:
    """Loss and metrics of one model on some examples: as sums and scores, so that parts can be pooled.

    On a network, other metrics than means are `summaries`, computed where the examples are. They cannot be pooled.
    """

    count: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    scores: dict[str, Tensor] = field(default_factory=dict)
    targets: Tensor | None = None
    summaries: dict[str, float] = field(default_factory=dict)

    def values(self, task: Task) -> dict[str, float]:
        """Return the loss and metrics; an empty dict if there were no examples."""
        if not self.count:
            return {}
        found = {name: value / self.count for name, value in self.sums.items()}
        for metric in task.measures:
            if metric.of_mean is not None and metric.name in found:
                found[metric.name] = metric.of_mean(found[metric.name])
            if metric.name in self.summaries:
                found[metric.name] = self.summaries[metric.name]
            elif metric.summary is not None and self.targets is not None and metric.name in self.scores:
                found[metric.name] = metric.summary(self.scores[metric.name].numpy(), self.targets.numpy())
        return found


def pool(parts: Sequence[Measured]) -> Measured:
    """Combine measurements as if one client held all the examples."""
    parts = [part for part in parts if part.count] or [Measured()]
    targets = [part.targets for part in parts if part.targets is not None]
    whole = len(targets) == len(parts)  # scores are useless without labels
    scored = [name for name in parts[0].scores if whole and all(name in part.scores for part in parts)]
    return Measured(
        sum(part.count for part in parts),
        {name: sum(part.sums[name] for part in parts) for name in parts[0].sums},
        {name: torch.cat([part.scores[name] for part in parts]) for name in scored},
        torch.cat(targets) if whole else None,
    )


def evaluate(task: Task, weights: Tree, data: Clients, position: int, split: SplitName) -> Measured:
    """Evaluate a model on one client's split."""
    return evaluate_rows(task, weights, data, data.rows(position, split))


@torch.no_grad()
def evaluate_rows(task: Task, weights: Tree, data: Clients, rows: Tensor) -> Measured:
    """Evaluate a model on some rows of the federation, in passes of about equal size."""
    parts = passes(rows, data.setup.evaluation_batch) if len(rows) else ()
    return pool([measure(task, weights, *batch(data, part, task), data.setup) for part in parts])


def measure(task: Task, weights: Tree, x: Tensor, y: Tensor, setup: Setup = Setup()) -> Measured:
    """Evaluate a model on one batch."""
    return measure_each(task, weights, x, y, [len(y)], setup)[0]


def evaluate_each(
    task: Task, weights: Tree, data: Clients, positions: Sequence[int], split: SplitName
) -> list[Measured]:
    """Evaluate a model on one split of several clients: in one pass, if they have few examples that do not mix."""
    rows = [data.rows(position, split) for position in positions]
    counts = [len(found) for found in rows]
    if not data.setup.rows_apart or not 0 < sum(counts) <= data.setup.evaluation_batch:
        return [evaluate_rows(task, weights, data, found) for found in rows]
    return measure_each(task, weights, *batch(data, torch.cat(rows), task), counts, data.setup)


@torch.no_grad()
def measure_each(
    task: Task, weights: Tree, x: Tensor, y: Tensor, counts: Sequence[int], setup: Setup = Setup()
) -> list[Measured]:
    """Evaluate a model on the batches of several clients, one after the other: `counts` examples each.

    An evaluation changes nothing: the model and the loss draw the same numbers every time, and what they keep in Python
    is restored.
    """
    with generators.lent(), task.python_state.fresh():
        generators.seed(0, setup.device)
        output = outputs(task, weights, x, setup.drops_evaluating)
        named = task.losses(output, y) if isinstance(task.loss, str) else None
        shown, labels = in_units(output, y, setup.target)
        means = {m.name: m.values(shown, labels) for m in task.measures if m.values is not None}
        values = {name: each.to(torch.float64).reshape(len(y), -1).mean(1) for name, each in means.items()}
        scores = {m.name: m.scores(shown, labels).to("cpu", copy=True) for m in task.measures if m.scores is not None}
        found, begin = [], 0
        for count in counts:
            own = slice(begin, begin + count)
            begin += count
            if not count:
                found.append(Measured())
                continue
            if named is not None:
                loss = named[own].sum(dtype=torch.float64).item()
            elif count == len(y):  # the loss function's value for the client's batch, times its examples
                loss = task.batch_loss(output, y).item() * count
            else:
                with task.python_state.fresh():
                    generators.seed(0, setup.device)
                    loss = task.batch_loss(tree_map_only(Tensor, itemgetter(own), output), y[own]).item() * count
            sums = {"loss": loss, **{name: each[own].sum().item() for name, each in values.items()}}
            kept = {name: score[own] for name, score in scores.items()}
            found.append(Measured(count, sums, kept, labels[own].cpu() if kept else None))
    return found


def in_units(output: Any, y: Tensor, target: tuple[float, float] | None) -> tuple[Any, Tensor]:
    """Return outputs and labels in the labels' own units, if labels were scaled by this mean and deviation."""
    if target is None:
        return output, y
    mean, std = target
    return output * std + mean, y * std + mean


def outputs(task: Task, weights: Tree, x: Tensor, keyed: bool = False) -> Any:
    """Return a model's outputs for some examples, in evaluation mode, computed on copies of the weights.

    An output may be a part of these copies, which the next evaluation overwrites.
    """
    module = task.module.eval()  # training switches back by itself
    # inside a mode, torch computes some models in another way: use it only if dropout needs it
    mode = Masked(NO_KEY.to(x.device)) if keyed else nullcontext()
    with task.tensors.replaced(task.tensors.copies({**task.given, **weights})), mode:
        return module(x)


def batch(data: Clients, rows: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """Return the examples and labels of some rows as the model takes them, such as rows `data.rows(i, "train")`.

    Floating features are in the task's precision, one-byte features scaled.
    """
    held = data.federation
    x, y = held.x.index_select(0, rows), held.y.index_select(0, rows)  # many times as fast as indexing
    return prepare(x, y, held.scale, task, data.setup.device)


def prepare(x: Tensor, y: Tensor, scale: float, task: Task, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return stored examples as the model takes them."""
    if x.is_floating_point():
        x = x.to(task.torch_dtype)
    elif scale != 1.0 or x.dtype == torch.uint8:
        x = x.to(task.torch_dtype).mul_(scale)
    y = y.to(task.torch_dtype) if y.is_floating_point() else y
    return (x, y) if device == "cpu" else (x.to(device, non_blocking=True), y.to(device, non_blocking=True))


def passes(rows: Tensor, largest: int) -> Sequence[Tensor]:
    """Cut rows into passes of at most `largest`, as equal as possible. Sizes depend only on the number of rows."""
    count = -(-len(rows) // max(largest, 1))
    return torch.tensor_split(rows, count) if count > 1 else (rows,)
