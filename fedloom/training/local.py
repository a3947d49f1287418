"""Local training with plain torch: train some clients, each from its own weights, one batch after another.

This is the reference for what training means. `recorded.py` and `lanes.py` compute the same faster, and `trainers.py`
chooses between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.task import Task
from fedloom.training import generators, optimizers
from fedloom.training.batch_view import Passes
from fedloom.training.clients import Clients
from fedloom.training.correction import Correct, Step, corrected, reads_batch
from fedloom.training.evaluation import batch, passes
from fedloom.training.finite_loss import check_finite
from fedloom.training.masking import Masked
from fedloom.training.modules import load
from fedloom.training.schedule import ClientResult, ClientSchedule, TrainingJob
from fedloom.training.settings import Training
from fedloom.training.tape import Sealed
from fedloom.tree import Groups, Tree, clone, row, stack

__all__ = ["Correct", "Groups", "Step", "Trained", "Training", "train"]


@dataclass(frozen=True)
class Trained:
    """The result of local training, stacked over clients."""

    model: Tree
    own: Groups
    steps: Tensor
    history: tuple[tuple[dict[str, float], ...], ...] = ()  # per client, per epoch
    lr_sums: Tensor | None = None  # the sum of each client's learning rates over its steps


def train(
    task: Task,
    data: Clients,
    start: Tree,
    training: Training,
    *,
    correct: Correct | None = None,
    shared: Groups | None = None,
    own: Groups | None = None,
) -> Trained:
    """Train every client from its row of `start`. `correct` may change each gradient before it is applied."""
    own = own or {}
    trained = {name: torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) for name, leaf in start.items()}
    optimizer = own.get("optimizer") if training.optimizer_state == "keep" else None
    job = TrainingJob(task, data, start, training, correct, shared or {}, own, optimizer, trained)
    from fedloom.training.trainers import trainer_for  # here, because the faster trainers build on this module

    results = trainer_for(job).train(job)
    if optimizer is not None:
        own = {**own, "optimizer": stack([result.optimizer for result in results])}
    steps = torch.tensor([result.steps for result in results])
    lr_sums = torch.tensor([result.lr_sum for result in results], dtype=torch.float64)
    return Trained(trained, own, steps, tuple(result.history for result in results), lr_sums)


def initial_optimizer(training: Training, task: Task, model: Tree) -> Groups:
    """Return what a client starts with if it keeps its optimiser's state between rounds."""
    if training.optimizer_state == "reset":
        return {}
    state = optimizers.initial_state(training, model, task.trainable)
    return {"optimizer": state} if state else {}


class StepTensors(NamedTuple):
    """The tensors that one client's step reads and changes, besides the batch."""

    parameters: Tree  # all of the module's, also the frozen ones
    buffers: Tree
    start: Tree  # the weights at the start of the round, if a `correct` hook may read them
    shared: Groups
    own: Groups
    optimizer: Tree
    loss_sum: Tensor  # the sum of the examples' losses in this epoch
    rate: Tensor | None = None  # the learning rate of the next step divided by `lr`; None if it never changes

    def changing(self) -> list[Tensor]:
        """Return the tensors that a step may change."""
        parameters = [leaf.detach() for leaf in self.parameters.values()]
        return [*parameters, *self.buffers.values(), *self.optimizer.values(), self.loss_sum]

    def take_loss(self) -> float:
        """Return the sum of the losses, and reset it."""
        total = float(self.loss_sum.item())
        self.loss_sum.zero_()
        return total


class SingleClientTrainer:
    """Trains one client after another in the task's module, with plain steps."""

    def train(self, job: TrainingJob) -> list[ClientResult]:
        """Train all clients of a job."""
        return [train_client(job, position, client_tensors(job, position)) for position in range(len(job.data))]


def client_tensors(job: TrainingJob, position: int) -> StepTensors:
    """Return the module's own tensors, and copies of what a client's steps need besides them."""
    task, tensors = job.task, job.task.tensors
    trainable = {name: tensors.parameters[name].detach() for name in task.trainable}
    hooked = job.correct is not None
    return StepTensors(
        tensors.parameters,
        tensors.buffers,
        clone(trainable) if hooked else {},
        {group: clone(tree) for group, tree in job.shared.items()} if hooked else {},
        {group: clone(row(tree, position)) for group, tree in job.own.items()} if hooked else {},
        optimizers.initial_state(job.training, trainable, task.trainable),
        torch.zeros((), dtype=torch.float64, device=job.data.setup.device),
        torch.ones((), dtype=torch.float64, device=job.data.setup.device) if job.training.changes_rate else None,
    )


def load_client(tensors: StepTensors, job: TrainingJob, position: int) -> None:
    """Copy what one client starts with into tensors that clients use one after another."""
    weights = {**job.task.given, **row(job.start, position)}
    load({**tensors.parameters, **tensors.buffers}, weights)
    with torch.no_grad():
        for name, leaf in tensors.start.items():
            leaf.copy_(weights[name])
        for group, tree in tensors.own.items():
            for name, leaf in tree.items():
                leaf.copy_(job.own[group][name][position])
        for name, leaf in tensors.optimizer.items():
            leaf.copy_(job.optimizer[name][position]) if job.optimizer else leaf.zero_()
        tensors.loss_sum.zero_()


def plain_step(job: TrainingJob, schedule: ClientSchedule, tensors: StepTensors) -> int:
    """Train on the next batch. Return the number of steps, which is 1."""
    step_on_rows(job, schedule, tensors, schedule.next_rows())
    return 1


def train_client(
    job: TrainingJob,
    position: int,
    tensors: StepTensors,
    take_steps: Callable[[TrainingJob, ClientSchedule, StepTensors], int] = plain_step,
) -> ClientResult:
    """Train one client until its schedule ends. `take_steps` trains on one or more batches."""
    task, data = job.task, job.data
    schedule = ClientSchedule(job, position)
    task.module.train()
    load_client(tensors, job, position)
    done = False
    # the model may draw from global generators and keep things in Python: every client gets its own
    with torch.no_grad(), generators.lent(), task.python_state.fresh():
        while not done:
            place = f"local training, step {schedule.steps + 1} of {schedule.total}"
            try:
                steps = take_steps(job, schedule, tensors)
                done = schedule.advance(tensors.take_loss, lambda: (task.tensors.weights(), tensors.optimizer), steps)
            except Exception as error:
                raise data.blame(error, place, position) from error
    return schedule.finish(task.tensors.weights(), tensors.optimizer)


def step_on_rows(
    job: TrainingJob, schedule: ClientSchedule, tensors: StepTensors, rows: Tensor, ahead: int = 0
) -> None:
    """Train on one batch: some rows of the client, `ahead` steps after the next."""
    if tensors.rate is not None:
        tensors.rate.fill_(schedule.rate(ahead))
    whole = reads_batch(job.correct)
    batch_passes = passes_over(job.task, job.data, schedule.position, rows, schedule.steps + ahead, whole)
    loss = client_step(job.task, job.training, job.correct, tensors, batch_passes, len(rows))
    check_finite(loss.item(), job.task, job.data, schedule.position, job.start, job.correct)


def passes_over(task: Task, data: Clients, position: int, rows: Tensor, step: int, whole: bool = False) -> Passes:
    """Return a function that reads rows in one pass, or in several where that gives the same. It always draws alike."""
    key, seed = data.dropout_key(position, step), data.key(position, "draws", step)

    def read() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        generators.seed(seed, data.setup.device)
        cut = passes(rows, data.setup.micro_batch) if data.setup.cuts_batches and not whole else [rows]
        for number, part in enumerate(cut):
            yield *batch(data, part, task), key + number

    return read


def one_pass(x: Tensor, y: Tensor, key: Tensor | None) -> Passes:
    """Return a function that gives a batch in one pass, as copies: models may change their input."""
    return lambda: [(x.clone(), y.clone(), key)]


@torch.enable_grad()
def client_step(
    task: Task, training: Training, correct: Correct | None, tensors: StepTensors, batch_passes: Passes, count: int
) -> Tensor:
    """Take one step of local training on `count` examples, as a loop in plain torch does. Return the loss."""
    leaves = {name: tensors.parameters[name] for name in task.trainable}
    buffers = clone(tensors.buffers) if correct else {}
    with task.tensors.replaced({**tensors.parameters, **tensors.buffers}):
        loss, found = gradient_of(task, batch_passes, count, leaves)
    if correct is not None:
        gradient_at = partial(gradient_of, task, batch_passes, count)
        found = corrected(correct, task, tensors, buffers, batch_passes, gradient_at, found)
    gradient = {name: found[name] for name in leaves if found[name] is not None}
    if training.clip is not None:
        gradient = clip(gradient, training.clip)
    with torch.no_grad():
        changed = [leaves[name] for name in gradient]
        optimizers.update(training, list(gradient), changed, list(gradient.values()), tensors.optimizer, tensors.rate)
        tensors.loss_sum.add_(loss.detach(), alpha=count)
    return loss.detach()


def gradient_of(
    task: Task, batch_passes: Passes, count: int, leaves: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss over `count` examples and its gradient, which is None for leaves that the batch does not use."""
    total: Tensor | None = None
    sums: dict[str, Any] = dict.fromkeys(leaves)
    every_leaf = (*leaves.values(), *task.tensors.parameters.values())
    for x, y, key in batch_passes():
        with nullcontext() if key is None else Masked(key, with_gradient=True):
            loss = task.batch_loss(task.module(x), y)
            loss = loss if len(y) == count else loss * (len(y) / count)
        for leaf in every_leaf:
            leaf.grad = None
        for name, new in zip(leaves, _backward(loss, list(leaves.values())), strict=True):
            sums[name] = new if sums[name] is None else sums[name] if new is None else sums[name] + new
        total = loss.detach() if total is None else total.to(torch.float64) + loss.detach()
    for leaf in every_leaf:
        leaf.grad = None
    assert total is not None, "a step needs examples"
    return total, sums


def _backward(loss: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    if isinstance(loss, Sealed):  # while a step is recorded: this leaves out copies that `backward` makes
        found: list[Tensor | None] = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    else:
        loss.backward()  # type: ignore[no-untyped-call]
        found = [leaf.grad for leaf in leaves]
    return [g if g is None or g.layout == torch.strided else g.to_dense() for g in found]


def clip(gradient: Mapping[str, Tensor], largest: float) -> Tree:
    """Scale a gradient down to a norm of at most `largest`."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(leaf) for leaf in gradient.values()]))
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    return {name: leaf * factor for name, leaf in gradient.items()}
