"""Train several clients side by side: each lane holds one client, and all lanes take a step together under vmap.

When a client is done, the next one takes its lane. A lane without a client computes on leftovers that are never read:
the results' bits depend on the number of lanes, so it never varies within a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fedloom.errors import TrainingError
from fedloom.task import Task
from fedloom.training import generators, optimizers
from fedloom.training.clients import Setup
from fedloom.training.correction import Correct, Step, called
from fedloom.training.evaluation import batch
from fedloom.training.fast_paths import load_shared, must_agree, watched_step
from fedloom.training.local import StepTensors, client_step, clip, load_client, one_pass
from fedloom.training.masking import Masked
from fedloom.training.schedule import ClientResult, ClientSchedule, TrainingJob
from fedloom.training.settings import Training
from fedloom.training.tape import CannotRecord, Tape, recorded
from fedloom.tree import Groups, Tree, clone, row, select


class LaneTrainer:
    """The tensors of all lanes, stacked. They never move, and are reused from client to client and job to job."""

    def __init__(
        self,
        task: Task,
        training: Training,
        correct: Correct | None,
        setup: Setup,
        start: Tree,
        shared: Groups,
        own: Groups,
        x: Tensor,
        y: Tensor,
    ) -> None:
        """`start` and `own` are like one client's; `x` and `y` are like one batch."""
        self.task, self.training, self.correct, self.setup = task, training, correct, setup
        self.count = setup.group
        weights = self._stacked({**start, **task.given})
        parameters = select(weights, task.tensors.parameters)
        trainable = select(parameters, task.trainable)
        self.tensors = StepTensors(
            parameters,
            {name: leaf for name, leaf in weights.items() if name not in parameters},
            clone(trainable) if correct else {},
            {group: clone(tree) for group, tree in shared.items()} if correct else {},
            {group: self._stacked(tree) for group, tree in own.items()} if correct else {},
            optimizers.initial_state(training, trainable, task.trainable, self.count),
            torch.zeros(self.count, dtype=task.torch_dtype, device=setup.device),
            torch.ones(self.count, dtype=torch.float64, device=setup.device) if training.changes_rate else None,
        )
        # views of the same memory: one client's tensors, and its weights
        self.lanes = [self._lane(number) for number in range(self.count)]
        self.weights = [select({**lane.parameters, **lane.buffers}, start) for lane in self.lanes]
        self.x, self.y = (torch.stack([value] * self.count) for value in (x, y))
        self.rows = torch.zeros((self.count, len(x)), dtype=torch.int64)
        self.counts = torch.zeros(self.count, dtype=torch.int64, device=setup.device)
        self.keys = torch.zeros((self.count, 2), dtype=torch.int64, device=setup.device)
        self.step = lane_step(task, training.clip, correct, setup.masked)
        self.tape: Tape | None = None
        self.tried_to_record = False
        self.watched = [-1] * self.count  # per lane, the step that is also computed the plain way

    def _stacked(self, tree: Tree) -> Tree:
        return {name: torch.stack([leaf.detach()] * self.count) for name, leaf in tree.items()}

    def _lane(self, number: int) -> StepTensors:
        stacked = self.tensors._replace(shared={})
        lane: StepTensors = tree_map_only(Tensor, itemgetter(number), stacked)
        return lane._replace(shared=self.tensors.shared)

    @torch.no_grad()
    def train(self, job: TrainingJob) -> list[ClientResult]:
        """Train all clients of a job. Whenever one is done, the next takes its lane."""
        load_shared(self.tensors.shared, job)
        waiting = iter(range(len(job.data)))
        schedules = [self._start_next(lane, job, waiting) for lane in range(self.count)]
        results: dict[int, ClientResult] = {}
        self.task.module.train()
        with generators.lent(), self.task.python_state.fresh():
            while any(schedules):
                self._load_batches(job, schedules)
                self._take_step(schedules)
                for lane, schedule in enumerate(schedules):
                    if schedule is not None and self._advance(lane, schedule):
                        results[schedule.position] = schedule.finish(self.weights[lane], self.lanes[lane].optimizer)
                        schedules[lane] = self._start_next(lane, job, waiting)
        return [results[position] for position in range(len(job.data))]

    def _start_next(self, lane: int, job: TrainingJob, waiting: Iterator[int]) -> ClientSchedule | None:
        """Put the next client into a lane, if there is one."""
        position = next(waiting, None)
        if position is None:
            return None
        schedule = ClientSchedule(job, position)
        load_client(self.lanes[lane], job, position)
        self.watched[lane] = watched_step(job.data, position, schedule.total)
        return schedule

    def _load_batches(self, job: TrainingJob, schedules: Sequence[ClientSchedule | None]) -> None:
        """Copy the next batch of every lane. A short batch is padded."""
        counts = []
        for lane, schedule in enumerate(schedules):
            found = self.rows[lane, :0] if schedule is None else schedule.next_rows()
            self.rows[lane, : len(found)] = found
            self.rows[lane, len(found) :] = found[0] if len(found) else 0
            counts.append(len(found))
            if schedule is not None and self.setup.masked:
                self.keys[lane] = schedule.dropout_key()
            if schedule is not None and self.tensors.rate is not None:
                self.tensors.rate[lane] = schedule.rate()
        self.counts.copy_(torch.tensor(counts))
        x, y = batch(job.data, self.rows.reshape(-1), self.task)
        self.x.copy_(x.reshape(self.x.shape))
        self.y.copy_(y.reshape(self.y.shape))

    def _take_step(self, schedules: Sequence[ClientSchedule | None]) -> None:
        """Take one step in all lanes: replayed if it can be recorded."""
        if self.setup.replay and not self.tried_to_record:
            self.tried_to_record = True
            self.tape = self._record()
        watched = [lane for lane, one in enumerate(schedules) if one and one.steps == self.watched[lane]]
        if watched:
            self._watch(watched)
        if self.tape is not None:
            self.tape.replay()
        else:
            self.step_all(self.tensors, *self.inputs)

    def _advance(self, lane: int, schedule: ClientSchedule) -> bool:
        """Count a step of one lane. Return True when its client is done."""
        tensors = self.lanes[lane]
        try:
            return schedule.advance(tensors.take_loss, lambda: (self.weights[lane], tensors.optimizer))
        except Exception as error:
            raise schedule.job.data.blame(error, "local training", schedule.position) from error

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The batches of all lanes: examples, labels, how many of them are real, and dropout keys."""
        return self.x, self.y, self.counts, self.keys

    def _record(self) -> Tape | None:
        # try the recording on another batch: the same rows in another order, some changed; idle lanes stay idle
        others = [self.x.flip(1), self.y.flip(1), self.counts, self.keys + 1]
        if others[0].is_floating_point():
            others[0][:, ::2] *= 0.5
        try:
            return recorded(self.step_all, (self.tensors, *self.inputs), self.inputs, self.tensors.changing, others)
        except CannotRecord:
            return None

    def gradients(
        self, tensors: StepTensors, x: Tensor, y: Tensor, counts: Tensor, keys: Tensor
    ) -> tuple[Tree, Tensor, Tree]:
        """Return the gradients, losses and new buffers of all lanes."""
        mask = (torch.arange(x.shape[1], device=counts.device) < counts.unsqueeze(1)).to(self.task.torch_dtype)
        trainable = select(tensors.parameters, self.task.trainable)
        others = {name: leaf for name, leaf in (tensors.parameters | tensors.buffers).items() if name not in trainable}
        given = (others, x, y, mask, keys)
        found: tuple[Tree, Tensor, Tree] = self.step(trainable, given, tensors.start, tensors.own, tensors.shared)
        return found

    @torch.no_grad()
    def step_all(self, tensors: StepTensors, x: Tensor, y: Tensor, counts: Tensor, keys: Tensor) -> None:
        """Take one step in all lanes, under vmap."""
        gradient, loss, buffers = self.gradients(tensors, x, y, counts, keys)
        for name, leaf in tensors.buffers.items():
            leaf.copy_(buffers[name])
        names = [name for name in tensors.parameters if name in gradient]
        parameters, gradients = [tensors.parameters[name] for name in names], [gradient[name] for name in names]
        optimizers.update(self.training, names, parameters, gradients, tensors.optimizer, tensors.rate)
        tensors.loss_sum.add_(loss * counts)

    def _watch(self, lanes: Sequence[int]) -> None:
        """Compare some lanes with plain steps. A difference counts only if it remains in double precision."""
        try:
            self.compare(lanes)
        except TrainingError:
            if self.task.dtype == "float64":
                raise
            self._in_double_precision().compare(lanes, 1e-6)

    def _in_double_precision(self) -> LaneTrainer:
        """Return a copy in double precision, where rounding cannot explain a difference."""
        task = replace(self.task, dtype="float64")
        task.__dict__["frozen"] = tree_map_only(Tensor, _wide, self.task.frozen)
        given = (self.weights[0], self.tensors.shared, self.lanes[0].own, self.x[0], self.y[0])
        copy = LaneTrainer(task, self.training, self.correct, self.setup, *tree_map_only(Tensor, _wide, given))
        both = zip(tree_leaves((copy.tensors, copy.inputs)), tree_leaves((self.tensors, self.inputs)), strict=True)
        for there, here in both:
            if here is not None:  # there is no rate if it never changes
                there.copy_(here)
        task.module.train()
        return copy

    def compare(self, lanes: Iterable[int], tolerance: float = 1e-3) -> None:
        """Compute the next step of some lanes also the plain way. Raise if gradients or buffers differ."""
        gradient, _, buffers = self.gradients(self.tensors, *(value.clone() for value in self.inputs))
        training = Training(lr=1.0, clip=self.training.clip)
        for lane in lanes:
            before = clone({**self.lanes[lane].parameters, **self.lanes[lane].buffers})
            alone = self._copy_of(lane)
            count, key = int(self.counts[lane]), self.keys[lane] if self.setup.masked else None
            passes = one_pass(self.x[lane, :count], self.y[lane, :count], key)
            client_step(self.task, training, self.correct, alone, passes, count)
            found = {name: before[name] - gradient[name][lane] if name in gradient else before[name] for name in before}
            found.update({name: buffers[name][lane] for name in alone.buffers})
            wanted = {name: leaf.detach() for name, leaf in (alone.parameters | alone.buffers).items()}
            must_agree(before, wanted, found, "Training clients side by side", tolerance)

    def _copy_of(self, lane: int) -> StepTensors:
        """Return a copy of one lane's tensors, for plain steps without an optimiser's state."""
        tensors, total = self.lanes[lane], torch.zeros((), dtype=torch.float64)
        parameters = clone(tensors.parameters)
        for name in self.task.trainable:
            parameters[name].requires_grad_()
        copied = tensors._replace(parameters=parameters, buffers=clone(tensors.buffers), optimizer={}, loss_sum=total)
        return copied._replace(rate=None)


def lane_trainer(job: TrainingJob, batch_size: int) -> LaneTrainer:
    """Build the lanes for a job, and for later jobs like it."""
    x, y = batch(job.data, torch.zeros(batch_size, dtype=torch.int64), job.task)
    start, own = row(job.start, 0), {group: row(tree, 0) for group, tree in job.own.items()}
    return LaneTrainer(job.task, job.training, job.correct, job.data.setup, start, job.shared, own, x, y)


def lane_step(task: Task, clip_at: float | None, correct: Correct | None, masked: bool) -> Callable[..., Any]:
    """Return the function that computes gradients, losses and new buffers of all lanes."""
    module, tensors = task.module, task.tensors

    def loss_of(parameters: Tree, others: Tree, x: Tensor, y: Tensor, mask: Tensor, key: Tensor) -> tuple[Tensor, Any]:
        # the model changes its buffers in place: give it copies, and return those
        buffers = {name: leaf.clone() for name, leaf in others.items()}
        with Masked(key, mask) if masked else nullcontext(), tensors.replaced({**parameters, **buffers}):
            losses = task.losses(module(x), y)
        loss = torch.where(mask > 0, losses, 0.0).sum() / mask.sum().clamp(min=1)
        return loss, (loss, buffers)

    def step(parameters: Tree, given: tuple[Any, ...], start: Tree, own: Groups, shared: Groups) -> Any:
        gradient_of = torch.func.grad(loss_of, has_aux=True)
        gradient, (loss, buffers) = gradient_of(parameters, *given)
        if correct is not None:

            def gradient_at(weights: Tree) -> Tree:
                return dict(gradient_of(weights, *given)[0])

            gradient = called(correct, Step(gradient, parameters, start, gradient_at), shared, own)
        if clip_at is not None:
            gradient = clip(gradient, clip_at)
        return gradient, loss, buffers

    return torch.func.vmap(step, in_dims=(0, 0, 0, 0, None))


def _wide(leaf: Tensor) -> Tensor:
    return leaf.double() if leaf.dtype == torch.float32 else leaf
