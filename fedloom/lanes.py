"""Several clients side by side: each lane holds one client at a time, and all lanes take a step together under vmap.

A lane whose client is done is refilled with the next one. A lane without a client computes on dummies that are never
read, so that the group size, on which bits depend, never varies within a run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedloom import optimizers
from fedloom.course import Correct, Course, Groups, Job, Step, blame, clip
from fedloom.errors import FedloomError, TrainingError
from fedloom.evaluation import batch
from fedloom.masking import Masked
from fedloom.task import Task
from fedloom.tree import Tree, clone, row, select


class Lanes:
    """The buffers that clients are trained in. They are reused from client to client, and updated in place."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.count = job.data.setup.group
        self.weights = empty_lanes(job.start, self.count)
        self.parameters = select(self.weights, job.task.trainable)
        self.others = {name: leaf for name, leaf in self.weights.items() if name not in self.parameters}
        self.begin = {name: torch.zeros_like(leaf) for name, leaf in self.parameters.items()} if job.correct else {}
        self.own = {group: empty_lanes(stacked, self.count) for group, stacked in job.own.items()}
        self.optimizer = optimizers.initial_state(job.training, self.parameters, job.task.trainable, self.count)
        self.losses = torch.zeros(self.count, dtype=job.task.torch_dtype, device=job.data.setup.device)
        self.courses: list[Course | None] = [None] * self.count
        self.waiting = iter(range(len(job.data)))
        for lane in range(self.count):
            self.refill(lane)

    def refill(self, lane: int) -> None:
        """Put the next client into a lane, if there is one."""
        position = next(self.waiting, None)
        if position is None:
            self.courses[lane] = None
            return
        job = self.job
        self.courses[lane] = Course(job, position)
        for name, leaf in self.weights.items():
            leaf[lane].copy_(job.start[name][position])
        for name, leaf in self.begin.items():
            leaf[lane].copy_(job.start[name][position])
        for group, tree in self.own.items():
            for name, leaf in tree.items():
                leaf[lane].copy_(job.own[group][name][position])
        for name, leaf in self.optimizer.items():
            leaf[lane] = job.kept[name][position] if job.kept else 0

    def take_loss(self, lane: int) -> float:
        """The sum of the losses of one lane since this was last asked."""
        total = float(self.losses[lane].item())
        self.losses[lane] = 0
        return total

    def advance(self, lane: int, course: Course) -> None:
        """Count a step of one lane; when its client is done, write the result and take the next."""
        try:
            done = course.advance(lambda: self.take_loss(lane), lambda: row(self.weights, lane))
        except Exception as error:
            raise blame(error, "local training", self.job.data, course.position) from error
        if done:
            course.finish(row(self.weights, lane), clone(row(self.optimizer, lane)))
            self.refill(lane)


def empty_lanes(stacked: Tree, lanes: int) -> Tree:
    """Zeros with the shapes of a stack's rows."""
    return {
        name: torch.zeros((lanes, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
        for name, leaf in stacked.items()
    }


def train_lanes(job: Job, size: int) -> None:
    """Train all clients of a job in batches of `size` rows, the last of an epoch padded and masked."""
    task, data, training = job.task, job.data, job.training
    lanes = Lanes(job)
    step = lane_step(task, training.clip, job.correct, data.setup.masked, data.setup.compile)
    rows = torch.zeros((lanes.count, size), dtype=torch.int64)
    counts = torch.zeros(lanes.count, dtype=torch.int64)
    step_keys = torch.zeros((lanes.count, 2), dtype=torch.int64, device=data.setup.device)
    numbers = torch.arange(size)
    task.module.train()
    while any(lanes.courses):
        for lane, course in enumerate(lanes.courses):
            found = rows[lane, :0] if course is None else course.next_rows()
            rows[lane, : len(found)] = found
            rows[lane, len(found) :] = found[0] if len(found) else 0
            counts[lane] = len(found)
            if course is not None and data.setup.masked:
                step_keys[lane] = course.step_key()
        mask = (numbers < counts.unsqueeze(1)).to(data.setup.device, task.torch_dtype)
        x, y = batch(data, rows.reshape(-1), task)
        x, y = x.reshape(*rows.shape, *x.shape[1:]), y.reshape(*rows.shape, *y.shape[1:])
        shared = job.shared if job.correct else {}
        try:
            gradient, loss, buffers = step(
                lanes.parameters, lanes.others, x, y, mask, step_keys, lanes.begin, shared, lanes.own
            )
        except FedloomError:
            raise
        except Exception as error:
            names = ", ".join(f"'{data.name(course.position)}'" for course in lanes.courses if course)
            raise TrainingError(
                f"Round {data.round}: a step of the clients {names}, trained side by side, failed: "
                f'{type(error).__name__}: {error}\nRun it with run.backend = "serial" to see which client and step.'
            ) from error
        for name, leaf in buffers.items():
            lanes.others[name].copy_(leaf)
        gradients = [gradient[name] for name in lanes.parameters]
        optimizers.update(training, task.trainable, list(lanes.parameters.values()), gradients, lanes.optimizer)
        lanes.losses += loss * counts.to(data.setup.device)
        for lane, course in enumerate(lanes.courses):
            if course is not None:
                lanes.advance(lane, course)


def lane_step(
    task: Task, clip_at: float | None, correct: Correct | None, masked: bool, compiled: bool = False
) -> Callable[..., Any]:
    """One training step of all lanes: gradients, losses and new buffers. Cached, because compiling it takes long."""
    # two methods of equal algorithms are not equal, and every message brings another algorithm: look at the parts
    owner, function = getattr(correct, "__self__", None), getattr(correct, "__func__", correct)
    try:
        return _cached_step(task, clip_at, owner, function, masked, compiled)
    except TypeError:  # an algorithm with a list or dict among its fields cannot be looked up
        return _lane_step(task, clip_at, owner, function, masked, compiled)


def _lane_step(
    task: Task, clip_at: float | None, owner: Any, function: Any, masked: bool, compiled: bool
) -> Callable[..., Any]:
    correct: Correct | None = function if owner is None else partial(function, owner)
    module = task.module

    def loss_of(parameters: Tree, others: Tree, x: Tensor, y: Tensor, mask: Tensor, key: Tensor) -> tuple[Tensor, Any]:
        # the model updates its buffers in place: give it copies, and hand those back
        buffers = {name: leaf.clone() for name, leaf in others.items()}
        with Masked(key, mask) if masked else nullcontext():
            output = functional_call(module, {**parameters, **buffers}, (x,))
        losses = task.losses(output, y)
        loss = torch.where(mask > 0, losses, 0.0).sum() / mask.sum().clamp(min=1)
        return loss, (loss, buffers)

    def step(
        parameters: Tree,
        others: Tree,
        x: Tensor,
        y: Tensor,
        mask: Tensor,
        key: Tensor,
        begin: Tree,
        shared: Groups,
        own: Groups,
    ) -> tuple[Tree, Tensor, Tree]:
        gradient_of = torch.func.grad(loss_of, has_aux=True)
        gradient, (loss, buffers) = gradient_of(parameters, others, x, y, mask, key)
        if correct is not None:

            def gradient_at(weights: Tree) -> Tree:
                return dict(gradient_of(weights, others, x, y, mask, key)[0])

            gradient = correct(Step(gradient, parameters, begin, gradient_at), shared, own)
        if clip_at is not None:
            gradient = clip(gradient, clip_at)
        return gradient, loss, buffers

    lanes = torch.func.vmap(step, in_dims=(0, 0, 0, 0, 0, 0, 0, None, 0))
    return torch.compile(lanes) if compiled else lanes


_cached_step = lru_cache(maxsize=64)(_lane_step)
