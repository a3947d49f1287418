"""Several clients side by side: each lane holds one client at a time, and all lanes take a step together under vmap.

A lane whose client is done is refilled with the next one. A lane without a client computes on dummies that are never
read, so that the group size, on which bits depend, never varies within a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedloom import optimizers
from fedloom.clients import Setup
from fedloom.course import Correct, Course, Groups, Job, Step, Training, blame, clip
from fedloom.desk import Layout, empty, layout, parts_of, rebuilt
from fedloom.errors import FedloomError, TrainingError
from fedloom.evaluation import batch
from fedloom.masking import Masked
from fedloom.tape import Tape, recorded
from fedloom.task import Task
from fedloom.tree import Tree, clone, row, select


class Lanes:
    """The tensors that clients are trained in. They never move, and are reused from client to client, job to job."""

    def __init__(
        self,
        task: Task,
        training: Training,
        correct: Correct | None,
        setup: Setup,
        start: Layout,
        shared: Layout,
        own: Layout,
        inputs: Layout,
    ) -> None:
        self.task, self.training, self.correct, self.setup = task, training, correct, setup
        self.count = setup.group
        self.weights = empty(start)["model"]
        self.parameters = select(self.weights, task.trainable)
        self.others = {name: leaf for name, leaf in self.weights.items() if name not in self.parameters}
        self.begin = {name: torch.zeros_like(leaf) for name, leaf in self.parameters.items()} if correct else {}
        self.shared, self.own = empty(shared), empty(own)
        self.optimizer = optimizers.initial_state(training, self.parameters, task.trainable, self.count)
        self.losses = torch.zeros(self.count, dtype=task.torch_dtype, device=setup.device)
        batches = empty(inputs)["batch"]
        self.x, self.y = batches["x"], batches["y"]
        self.rows = torch.zeros((self.count, self.x.shape[1]), dtype=torch.int64)
        self.counts = torch.zeros(self.count, dtype=torch.int64, device=setup.device)
        self.keys = torch.zeros((self.count, 2), dtype=torch.int64, device=setup.device)
        self.step = lane_step(task, training.clip, correct, setup.masked, setup.compile)
        self.tape: Tape | None = None
        self.tried = False  # whether recording was tried
        self.courses: list[Course | None] = [None] * self.count

    def train(self, job: Job) -> None:
        """All clients of a job; whenever one is done, the next takes its lane."""
        for group, tree in self.shared.items():
            for name, leaf in tree.items():
                leaf.copy_(job.shared[group][name])
        waiting = iter(range(len(job.data)))
        self.losses.zero_()
        for lane in range(self.count):
            self.refill(lane, job, waiting)
        self.task.module.train()
        while any(self.courses):
            self.lay_out(job)
            try:
                self.advance_all()
            except FedloomError:
                raise
            except Exception as error:
                names = ", ".join(f"'{job.data.name(course.position)}'" for course in self.courses if course)
                raise TrainingError(
                    f"Round {job.data.round}: a step of the clients {names}, trained side by side, failed: "
                    f'{type(error).__name__}: {error}\nRun it with run.backend = "serial" to see which client and step.'
                ) from error
            for lane, course in enumerate(self.courses):
                if course is not None and self.count_step(lane, course, job):
                    self.refill(lane, job, waiting)

    def refill(self, lane: int, job: Job, waiting: Iterator[int]) -> None:
        """Put the next client into a lane, if there is one."""
        position = next(waiting, None)
        if position is None:
            self.courses[lane] = None
            return
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

    def lay_out(self, job: Job) -> None:
        """The next batch of every lane, the last of an epoch padded."""
        counts = []
        for lane, course in enumerate(self.courses):
            found = self.rows[lane, :0] if course is None else course.next_rows()
            self.rows[lane, : len(found)] = found
            self.rows[lane, len(found) :] = found[0] if len(found) else 0
            counts.append(len(found))
            if course is not None and self.setup.masked:
                self.keys[lane] = course.step_key()
        self.counts.copy_(torch.tensor(counts))
        x, y = batch(job.data, self.rows.reshape(-1), self.task)
        self.x.copy_(x.reshape(self.x.shape))
        self.y.copy_(y.reshape(self.y.shape))

    def advance_all(self) -> None:
        """One step of all lanes: replayed where it can be recorded, else as it is written."""
        if self.setup.replay and not self.setup.compile and not self.tried:
            self.tried = True
            self.tape = recorded(self.step_all, (self.x, self.y, self.counts, self.keys), self.changes)
        if self.tape is not None:
            self.tape.replay()
        else:
            self.step_all()

    @torch.no_grad()
    def step_all(self) -> None:
        counts = self.counts.unsqueeze(1)
        mask = (torch.arange(self.x.shape[1], device=counts.device) < counts).to(self.task.torch_dtype)
        gradient, loss, buffers = self.step(
            self.parameters, self.others, self.x, self.y, mask, self.keys, self.begin, self.shared, self.own
        )
        for name, leaf in buffers.items():
            self.others[name].copy_(leaf)
        gradients = [gradient[name] for name in self.parameters]
        parameters = list(self.parameters.values())
        optimizers.update(self.training, self.task.trainable, parameters, gradients, self.optimizer)
        self.losses += loss * self.counts

    def changes(self) -> list[Tensor]:
        """All tensors that a step may change."""
        return [*self.weights.values(), *self.optimizer.values(), self.losses]

    def count_step(self, lane: int, course: Course, job: Job) -> bool:
        """Count a step of one lane; when its client is done, write the result and say so."""
        try:
            done = course.advance(lambda: self.take_loss(lane), lambda: row(self.weights, lane))
        except Exception as error:
            raise blame(error, "local training", job.data, course.position) from error
        if done:
            course.finish(row(self.weights, lane), clone(row(self.optimizer, lane)))
        return done

    def take_loss(self, lane: int) -> float:
        """The sum of the losses of one lane since this was last asked."""
        total = float(self.losses[lane].item())
        self.losses[lane] = 0
        return total


def train_lanes(job: Job, size: int) -> None:
    """Train all clients of a job in batches of `size` rows, the last of an epoch padded and masked."""
    setup, count = job.data.setup, job.data.setup.group
    x, y = batch(job.data, torch.zeros(1, dtype=torch.int64), job.task)
    inputs = {"batch": {"x": x.expand(count, size, *x.shape[1:]), "y": y.expand(count, size, *y.shape[1:])}}
    start = {"model": {name: leaf[:1].expand(count, *leaf.shape[1:]) for name, leaf in job.start.items()}}
    own = {
        group: {name: leaf[:1].expand(count, *leaf.shape[1:]) for name, leaf in tree.items()}
        for group, tree in job.own.items()
    }
    given = (layout(job.shared), layout(own)) if job.correct else ((), ())
    layouts = (layout(start), *given, layout(inputs))
    rebuilt(_cached_lanes, _lanes, job.task, job.training, *parts_of(job.correct), setup, *layouts).train(job)


def _lanes(
    task: Task,
    training: Training,
    owner: Any,
    function: Any,
    setup: Setup,
    start: Layout,
    shared: Layout,
    own: Layout,
    inputs: Layout,
) -> Lanes:
    correct = function if owner is None else partial(function, owner)
    return Lanes(task, training, correct, setup, start, shared, own, inputs)


_cached_lanes = lru_cache(maxsize=8)(_lanes)


def lane_step(
    task: Task, clip_at: float | None, correct: Correct | None, masked: bool, compiled: bool = False
) -> Callable[..., Any]:
    """One training step of all lanes: gradients, losses and new buffers."""
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
