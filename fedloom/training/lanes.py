"""Several clients side by side: each lane holds one client at a time, and all lanes take a step together under vmap.

A lane whose client is done is refilled with the next one. A lane without a client computes on dummies that are never
read, so that the group size, on which bits depend, never varies within a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedloom.errors import FedloomError, TrainingError
from fedloom.task import Task
from fedloom.training import generators, optimizers
from fedloom.training.clients import Setup
from fedloom.training.evaluation import batch
from fedloom.training.masking import Masked
from fedloom.training.schedule import Correct, Course, Groups, Job, Step, Training, blame, clip
from fedloom.training.single import Layout, Tensors, client_step, empty, layout, must_agree, parts_of, rebuilt
from fedloom.training.tape import CannotRecord, Tape, recorded
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
        weights = empty(start)["model"]
        parameters = select(weights, task.places.parameters)
        buffers = {name: leaf for name, leaf in weights.items() if name not in parameters}
        buffers.update({name: torch.stack([leaf] * self.count) for name, leaf in task.transient.items()})
        trainable = select(parameters, task.trainable)
        self.at = Tensors(
            parameters,
            buffers,
            {name: torch.zeros_like(leaf) for name, leaf in trainable.items()} if correct else {},
            empty(shared),
            empty(own),
            optimizers.initial_state(training, trainable, task.trainable, self.count),
            torch.zeros(self.count, dtype=task.torch_dtype, device=setup.device),
        )
        self.weights = {**parameters, **select(buffers, weights)}
        batches = empty(inputs)["batch"]
        self.x, self.y = batches["x"], batches["y"]
        self.rows = torch.zeros((self.count, self.x.shape[1]), dtype=torch.int64)
        self.counts = torch.zeros(self.count, dtype=torch.int64, device=setup.device)
        self.keys = torch.zeros((self.count, 2), dtype=torch.int64, device=setup.device)
        self.step = lane_step(task, training.clip, correct, setup.masked)
        self.tape: Tape | None = None
        self.tried = False  # whether recording was tried
        self.courses: list[Course | None] = [None] * self.count

    @torch.no_grad()
    def train(self, job: Job) -> None:
        """All clients of a job; whenever one is done, the next takes its lane."""
        for group, tree in self.at.shared.items():
            for name, leaf in tree.items():
                leaf.copy_(job.shared[group][name])
        waiting = iter(range(len(job.data)))
        self.at.loss.zero_()
        for lane in range(self.count):
            self.refill(lane, job, waiting)
        self.task.module.train()
        with generators.lent(), self.task.python_state.fresh():
            while any(self.courses):
                self.lay_out(job)
                self.advance_all(job)
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
        for name, leaf in self.task.transient.items():
            self.at.buffers[name][lane].copy_(leaf)
        for name, leaf in self.at.begin.items():
            leaf[lane].copy_(job.start[name][position])
        for group, tree in self.at.own.items():
            for name, leaf in tree.items():
                leaf[lane].copy_(job.own[group][name][position])
        for name, leaf in self.at.optimizer.items():
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

    def advance_all(self, job: Job) -> None:
        """One step of all lanes: replayed where it can be recorded, else as it is written."""
        if self.setup.replay and not self.tried:
            self.tried = True
            self.tape = self._record()
        try:
            watched = [lane for lane, course in enumerate(self.courses) if course and course.steps == course.watched]
            if watched:
                self.watch(watched)
            if self.tape is not None:
                self.tape.replay()
            else:
                self.step_all(self.at, *self._inputs)
        except FedloomError:
            raise
        except Exception as error:
            names = ", ".join(f"'{job.data.name(course.position)}'" for course in self.courses if course)
            raise TrainingError(
                f"Round {job.data.round}: a step of the clients {names}, trained side by side, failed: "
                f'{type(error).__name__}: {error}\nRun it with run.backend = "serial" to see which client and step.'
            ) from error

    @property
    def _inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.y, self.counts, self.keys

    def _record(self) -> Tape | None:
        # another batch for the trial: the same rows in another order, some of them changed; idle lanes stay idle
        others = [self.x.flip(1), self.y.flip(1), self.counts, self.keys + 1]
        if others[0].is_floating_point():
            others[0][:, ::2] *= 0.5
        try:
            return recorded(self.step_all, (self.at, *self._inputs), self._inputs, self.at.changing, others)
        except CannotRecord:
            return None

    def gradients(self, at: Tensors, x: Tensor, y: Tensor, counts: Tensor, keys: Tensor) -> tuple[Tree, Tensor, Tree]:
        """Gradients, losses and new buffers of all lanes."""
        mask = (torch.arange(x.shape[1], device=counts.device) < counts.unsqueeze(1)).to(self.task.torch_dtype)
        trainable = select(at.parameters, self.task.trainable)
        others = {name: leaf for name, leaf in (at.parameters | at.buffers).items() if name not in trainable}
        found: tuple[Tree, Tensor, Tree] = self.step(trainable, others, x, y, mask, keys, at.begin, at.shared, at.own)
        return found

    @torch.no_grad()
    def step_all(self, at: Tensors, x: Tensor, y: Tensor, counts: Tensor, keys: Tensor) -> None:
        gradient, loss, buffers = self.gradients(at, x, y, counts, keys)
        for name, leaf in at.buffers.items():
            leaf.copy_(buffers[name])
        names = [name for name in at.parameters if name in gradient]
        parameters, gradients = [at.parameters[name] for name in names], [gradient[name] for name in names]
        optimizers.update(self.training, names, parameters, gradients, at.optimizer)
        at.loss.add_(loss * counts)

    def watch(self, lanes: Sequence[int]) -> None:
        """Compare some lanes with clients alone; what looks wrong must also be wrong in double precision."""
        try:
            self.compare(lanes)
        except TrainingError:
            if self.task.dtype == "float64":
                raise
            self.doubled().compare(lanes, 1e-6)

    def doubled(self) -> Lanes:
        """The same in double precision, where rounding is not to blame."""
        task = replace(self.task, dtype="float64")

        def wide(layouts: Groups) -> Layout:
            return layout({group: {n: _wide(leaf) for n, leaf in tree.items()} for group, tree in layouts.items()})

        given = ({"model": self.weights}, self.at.shared, self.at.own, {"batch": {"x": self.x, "y": self.y}})
        twin = Lanes(task, self.training, self.correct, self.setup, *(wide(groups) for groups in given))
        both = zip(tree_leaves((twin.at, twin._inputs)), tree_leaves((self.at, self._inputs)), strict=True)
        for there, here in both:
            there.copy_(here)
        task.module.train()
        return twin

    def compare(self, lanes: Iterable[int], tolerance: float = 1e-3) -> None:
        """Compute the next step of some lanes by themselves as well: gradients and buffers must agree."""
        gradient, _, buffers = self.gradients(self.at, *(value.clone() for value in self._inputs))
        training = Training(lr=1.0, clip=self.training.clip)
        for lane in lanes:
            before = clone(row({**self.at.parameters, **self.at.buffers}, lane))
            alone = self.alone(lane)
            count, key = int(self.counts[lane]), self.keys[lane] if self.setup.masked else None
            part = self.x[lane, :count], self.y[lane, :count]
            # copies: a model may change what it is given, and a correction may ask it again
            parts = partial(_copied_part, *part, key)
            client_step(self.task, training, self.correct, alone, parts, count)
            found = {name: before[name] - gradient[name][lane] if name in gradient else before[name] for name in before}
            found.update({name: buffers[name][lane] for name in alone.buffers})
            wanted = {name: leaf.detach() for name, leaf in (alone.parameters | alone.buffers).items()}
            must_agree(before, wanted, found, "training clients side by side", tolerance)

    def alone(self, lane: int) -> Tensors:
        """A copy of one lane's tensors, as a client by itself has them."""
        parameters = clone(row(self.at.parameters, lane))
        return Tensors(
            {name: leaf.requires_grad_(name in self.task.trainable) for name, leaf in parameters.items()},
            clone(row(self.at.buffers, lane)),
            row(self.at.begin, lane),
            self.at.shared,
            {group: row(tree, lane) for group, tree in self.at.own.items()},
            {},
            torch.zeros((), dtype=torch.float64),
        )

    def count_step(self, lane: int, course: Course, job: Job) -> bool:
        """Count a step of one lane; when its client is done, write the result and say so."""
        try:
            state = lambda: (row(self.weights, lane), row(self.at.optimizer, lane))  # noqa: E731
            done = course.advance(lambda: self.take_loss(lane), state)
        except Exception as error:
            raise blame(error, "local training", job.data, course.position) from error
        if done:
            course.finish(row(self.weights, lane), clone(row(self.at.optimizer, lane)))
        return done

    def take_loss(self, lane: int) -> float:
        """The sum of the losses of one lane since this was last asked."""
        total = float(self.at.loss[lane].item())
        self.at.loss[lane] = 0
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


def lane_step(task: Task, clip_at: float | None, correct: Correct | None, masked: bool) -> Callable[..., Any]:
    """One training step of all lanes: gradients, losses and new buffers."""
    module, places = task.module, task.places

    def loss_of(parameters: Tree, others: Tree, x: Tensor, y: Tensor, mask: Tensor, key: Tensor) -> tuple[Tensor, Any]:
        # the model updates its buffers in place: give it copies, and hand those back
        buffers = {name: leaf.clone() for name, leaf in others.items()}
        with Masked(key, mask) if masked else nullcontext(), places.holding({**parameters, **buffers}):
            losses = task.losses(module(x), y)
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

    return torch.func.vmap(step, in_dims=(0, 0, 0, 0, 0, 0, 0, None, 0))


def _wide(leaf: Tensor) -> Tensor:
    return leaf.double() if leaf.dtype == torch.float32 else leaf


def _copied_part(x: Tensor, y: Tensor, key: Tensor | None) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    return [(x.clone(), y.clone(), key)]
