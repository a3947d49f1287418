"""Trials of a model on a few examples: does a faster way to compute give what the plain step gives?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fedloom import keys
from fedloom.data.federation import Federation
from fedloom.errors import TrainingError
from fedloom.task import Task
from fedloom.training import evaluation, generators
from fedloom.training.clients import Setup
from fedloom.training.correction import has_hooks
from fedloom.training.lanes import LaneTrainer
from fedloom.training.local import StepTensors, client_step, gradient_of, one_pass
from fedloom.training.modules import load
from fedloom.training.recorded import RecordedTrainer
from fedloom.training.settings import Training
from fedloom.tree import clone

ROWS, MANY_ROWS = 8, 256  # examples in a trial


@dataclass(frozen=True)
class Trial:
    """One model on a few examples, for comparing ways to compute."""

    task: Task
    layers: Setup  # what its dropout and batch normalisation need
    x: Tensor
    y: Tensor

    @property
    def close(self) -> float:
        return 1e-9 if self.task.dtype == "float64" else 1e-4

    def same(self, one: Any, other: Any) -> bool:
        leaves = zip(tree_leaves(one), tree_leaves(other), strict=True)
        return all(
            torch.equal(a, b) or torch.allclose(a, b, rtol=self.close, atol=self.close, equal_nan=True)
            if isinstance(a, Tensor)
            else a == b
            for a, b in leaves
        )

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return real examples and, if possible, random ones: real ones may be equal or empty, and show nothing."""
        drawn = keys.generator(0).normal(size=tuple(self.x.shape))
        made = [(torch.from_numpy(drawn).to(self.x.dtype), self.y)] if self.x.is_floating_point() else []
        return [(self.x, self.y), *made]

    def outputs(self, x: Tensor) -> Any:
        with torch.no_grad(), generators.lent(), self.task.python_state.fresh():
            generators.seed(0)
            # a model may change what it is given, and give back a part of itself
            given = evaluation.outputs(self.task, self.task.initial(), x.clone(), self.layers.drops_evaluating)
            return tree_map_only(Tensor, Tensor.clone, given)

    def loss_is_mean(self, x: Tensor, y: Tensor) -> bool:
        """Whether losses of batches of several sizes are the means of their examples' losses, with their gradients."""
        noise = keys.generator(1)
        some = tree_map_only(Tensor, itemgetter(torch.arange(len(y)) % ROWS), self.outputs(x[:ROWS]))
        outputs = tree_map_only(Tensor, lambda leaf: with_noise(leaf, noise), some)  # quick to make, enough for a loss
        sizes = {len(y): len(y), 64: len(y), 7: 7 * ROWS, 3: 3 * ROWS, 2: 2 * ROWS}  # of a batch, and of all tried
        for size, count in sizes.items():
            rows = torch.from_numpy(keys.permutation(keys.key(size, "loss"), len(y)))[:count]
            if not all(self.is_mean(outputs, y, part) for part in torch.split(rows, size)):
                return False
        return True

    def is_mean(self, outputs: Any, y: Tensor, rows: Tensor) -> bool:
        """Whether the loss of a batch is the mean of its rows' losses, and a row's loss is what it is alone."""
        given = tree_map_only(Tensor, differentiable, tree_map_only(Tensor, itemgetter(rows), outputs))
        leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.requires_grad]
        with torch.enable_grad(), generators.lent(), self.task.python_state.fresh():
            whole, each = self.task.batch_loss(given, y[rows]), self.task.losses(given, y[rows])
            both = [
                torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
                for loss in (whole, each.mean())
            ]
            alone = self.task.losses(tree_map_only(Tensor, itemgetter(slice(0, 1)), given), y[rows][:1])
        same = self.same((whole, both[0], each[:1]), (each.mean(), both[1], alone))
        return same and bool(torch.isfinite(whole))

    def rows_apart(self) -> bool:
        with suppress(Exception):
            for x, _ in self.batches():
                many, whole = self.outputs(x[torch.arange(MANY_ROWS) % ROWS]), self.outputs(x)
                if any(isinstance(leaf, Tensor) and len(leaf) != len(x) for leaf in tree_leaves(whole)):
                    return False
                parts = ((many, slice(0, 1)), (whole, slice(0, 3)), (whole, slice(3, ROWS)), (whole, slice(5, 6)))
                for output, own in parts:
                    if not self.same(tree_map_only(Tensor, itemgetter(own), output), self.outputs(x[own])):
                        return False
            return True
        return False

    def mixes(self) -> bool:
        """Whether, in evaluation, the output for an example depends on the others."""
        with suppress(Exception):
            for x, _ in self.batches():
                among = [self.outputs(x), self.outputs(torch.cat([x[:1], x[1:].flip(0)[:1].expand_as(x[1:])]))]
                if any(isinstance(leaf, Tensor) and len(leaf) != len(x) for leaf in tree_leaves(among[0])):
                    return False  # such as one number for the batch, which a loss of the user's may take
                if not self.same(*(tree_map_only(Tensor, itemgetter(0), output) for output in among)):
                    return True
        return False

    def tensors(self) -> StepTensors:
        """Return the initial weights, for a step of plain gradient descent."""
        weights = clone({**self.task.given, **self.task.initial()})
        named = self.task.tensors.parameters
        parameters = {name: weights[name].requires_grad_(leaf.requires_grad) for name, leaf in named.items()}
        buffers = {name: weights[name] for name in self.task.tensors.buffers}
        return StepTensors(parameters, buffers, {}, {}, {}, {}, torch.zeros((), dtype=torch.float64))

    def stepped(self, parts: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return parameters and buffers after one step on a batch that is read in these parts."""
        tensors = self.tensors()
        self.task.module.train()

        def passes() -> list[tuple[Tensor, Tensor, Tensor]]:
            return [(x.clone(), y.clone(), evaluation.NO_KEY + number) for number, (x, y) in enumerate(parts)]

        with torch.no_grad(), generators.lent(), self.task.python_state.fresh():
            generators.seed(0)
            client_step(self.task, Training(lr=1.0), None, tensors, passes, sum(len(y) for _, y in parts))
        return tensors.changing()

    def varies(self) -> str:
        """Return what gives other numbers when it is computed again with the same random numbers, or nothing."""
        with suppress(Exception):  # a step that fails is refused or explained elsewhere
            part = [(self.x, self.y)]
            if not self.same(self.stepped(part), self.stepped(part)):
                return "training"
            if not self.same(self.outputs(self.x), self.outputs(self.x)):
                return "evaluation"
        return ""

    def cuts_batches(self) -> bool:
        with suppress(Exception):
            return all(
                self.same(self.stepped([(x, y)]), self.stepped([(x[:5], y[:5]), (x[5:], y[5:])]))
                for x, y in self.batches()
            )
        return False

    def cannot_group(self) -> str:
        """Return why two clients, one with a short batch, cannot be trained side by side; empty if they can."""
        task = self.task
        if has_hooks(task.tensors.parameters.values()):
            return "the model has hooks on its parameters"
        if shared := task.tensors.sharing_memory():
            return f"{' and '.join(shared[:2])} have memory in common"
        if unused := self.unused():
            return f"not every batch uses {', '.join(unused)}"
        try:
            with warnings.catch_warnings(record=True) as raised, torch.no_grad(), task.python_state.fresh():
                warnings.simplefilter("always")
                least = 2 if self.layers.normalises_features else 1
                self.pair_of_lanes(ROWS, (least, 5))
                self.pair_of_lanes(MANY_ROWS, (least,))  # shows what depends on the number of rows
                if task.python_state.changed():
                    return "the model or the loss keeps something in Python from one call to the next"
        except TrainingError:
            return "side by side, clients would not be trained as they are alone"
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        slow = [str(warning.message) for warning in raised if "performance drop" in str(warning.message)]
        return f"vmap would only loop over them: {slow[0].splitlines()[0]}" if slow else ""

    def unused(self) -> list[str]:
        """Return the names of parameters that have no gradient on a batch."""
        task, tensors = self.task, self.tensors()
        leaves = {name: tensors.parameters[name] for name in task.trainable}
        task.module.train()
        held = {**tensors.parameters, **tensors.buffers}
        with suppress(Exception):
            with generators.lent(), task.python_state.fresh(), task.tensors.replaced(held), torch.enable_grad():
                found = gradient_of(task, one_pass(self.x, self.y, evaluation.NO_KEY), ROWS, leaves)[1]
            return [name for name, gradient in found.items() if gradient is None]
        return []  # the comparison that follows reports what is wrong

    def pair_of_lanes(self, size: int, counts: Sequence[int]) -> None:
        """Train two clients, one on whole and one on short batches. Raise if that differs from plain steps."""
        many = torch.arange(size) % ROWS
        start = self.task.initial()
        setup = replace(self.layers, group=2)
        lanes = LaneTrainer(self.task, Training(lr=0.1), None, setup, start, {}, {}, self.x[many], self.y[many])
        noise = keys.generator(2)
        for name in start:  # different weights in each lane
            if name in self.task.trainable:
                leaf = lanes.tensors.parameters[name]
                leaf.copy_(with_noise(leaf, noise, 0.1))
        self.task.module.train()
        for x, y in self.batches():
            order = torch.from_numpy(keys.permutation(0, size)) % ROWS
            for partial in counts:
                for lane, (count, rows) in enumerate(((size, many), (partial, order))):
                    padded = torch.cat([rows[:count], rows[:1].expand(size - count)])
                    lanes.x[lane], lanes.y[lane] = x[padded], y[padded]
                    lanes.counts[lane] = count
                    lanes.keys[lane] = lane + 1
                lanes.compare(range(2), self.close)
                lanes.step_all(lanes.tensors, *lanes.inputs)

    def recorded(self) -> tuple[int | None, str]:
        """Return the number of kernels of a recorded step, or None and why a step cannot be recorded."""
        task, weights = self.task, {**self.task.given, **self.task.initial()}
        task.module.train()
        with torch.no_grad():
            load(task.tensors.own, weights)
            tensors = self.tensors()._replace(parameters=task.tensors.parameters, buffers=task.tensors.buffers)
            trainer = RecordedTrainer(task, Training(batch_size=ROWS), None, tensors)
            key = [evaluation.NO_KEY] if self.layers.masked else []
            other = [self.x.roll(1, 0), self.y.roll(1, 0), *(word + 1 for word in key)]
            tape, _ = trainer.tape_for([self.x, self.y, *key], lambda: other)
        return (None, trainer.cannot_record) if tape is None else (len(tape), "")


def prepared(federation: Federation, task: Task, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return some rows of a federation as the model takes them."""
    return evaluation.prepare(federation.x[rows], federation.y[rows], federation.scale, task)


def some_examples(federation: Federation, task: Task, count: int) -> tuple[Tensor, Tensor]:
    """Return examples that differ: one of each label if there is room, and others drawn by a key."""
    labels = federation.y[:200_000].reshape(min(len(federation.y), 200_000), -1)
    _, first = np.unique(labels.numpy(), return_index=True)
    distinct = torch.from_numpy(np.unique(first // labels.shape[1]))
    # every other one is drawn, so that many labels do not leave only the first of each
    order = torch.from_numpy(keys.permutation(keys.key(0, "labels"), len(distinct)))
    drawn = torch.from_numpy(keys.hashes(keys.key(0, "examples"), count) * len(federation.y) >> 32)
    labelled = distinct[order][: count if count > ROWS else count // 2]
    return prepared(federation, task, torch.cat([labelled, drawn])[: max(count, len(labelled))])


def differentiable(leaf: Tensor) -> Tensor:
    """Return a copy of an output, with respect to which a loss can be differentiated."""
    made = leaf.detach().clone()
    return made.requires_grad_() if made.is_floating_point() or made.is_complex() else made


def with_noise(leaf: Tensor, noise: np.random.Generator, scale: float = 1.0) -> Tensor:
    """Return a floating tensor with noise added, so that equal ones become different."""
    if not leaf.is_floating_point():
        return leaf.detach()
    return leaf.detach() + torch.from_numpy(noise.normal(size=tuple(leaf.shape))).to(leaf.dtype) * scale
