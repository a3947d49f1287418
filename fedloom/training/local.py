"""What a client computes: local training (the only training loop) and full gradients.

With a group size of 1 clients are trained one after another, at a desk (`desk.py`). Larger groups are trained side by
side, in `lanes.py`. Both walk the same course (`course.py`) and give the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedloom import keys
from fedloom.errors import InputError
from fedloom.task import Task
from fedloom.training import generators, optimizers
from fedloom.training.clients import Clients
from fedloom.training.evaluation import batch, passes
from fedloom.training.lanes import train_lanes
from fedloom.training.schedule import (
    Correct,
    Course,
    Groups,
    Job,
    Step,
    Training,
    blame,
    check_finite,
    key_tensor,
    training_rows,
)
from fedloom.training.single import Desk, Parts, desk_for, gradient_of, load, ready_together, unload
from fedloom.tree import Tree, clone, row, stack

__all__ = ["Correct", "FullGradient", "Groups", "Step", "Trained", "Training", "full_gradient", "load", "train"]


@dataclass(frozen=True)
class Trained:
    """The result of local training, stacked over clients."""

    model: Tree
    own: Groups
    steps: Tensor
    history: tuple[tuple[dict[str, float], ...], ...] = ()  # per client, per epoch


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
    """Train every client from its row of `start`; `correct` may change each gradient before it is applied."""
    own = own or {}
    out = {name: torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) for name, leaf in start.items()}
    kept = own.get("optimizer") if training.optimizer_state == "keep" else None
    job = Job(task, data, start, training, correct, shared or {}, own, kept, out)
    # a full batch fills the machine by itself, and so does the one client that owns everything
    size = training.batch_size
    if data.setup.group == 1 or size == "full" or data.ids == (data.federation.everyone,):
        desk = desk_for(job)
        for position in range(len(data)):
            _train_alone(job, desk, position, replayed=data.setup.replay and size != "full")
    else:
        train_lanes(job, size)
    courses = [job.courses[position] for position in range(len(data))]
    job.courses.clear()  # they know their job: in a circle they would keep its tensors until garbage is collected
    if kept is not None:
        own = {**own, "optimizer": stack([course.optimizer for course in courses])}
    steps = torch.tensor([course.steps for course in courses])
    return Trained(out, own, steps, tuple(tuple(course.history) for course in courses))


def initial_optimizer(training: Training, task: Task, model: Tree) -> Groups:
    """What a client that keeps its optimiser's state between rounds begins with."""
    if training.optimizer_state == "reset":
        return {}
    state = optimizers.initial_state(training, model, task.trainable)
    return {"optimizer": state} if state else {}


def _train_alone(job: Job, desk: Desk, position: int, replayed: bool) -> None:
    """One client, batch by batch: each a step as it is written, or the replay of a recorded one."""
    data, task = job.data, job.task
    course = Course(job, position)
    desk.seat(job, position)
    together = ready_together(job, course.batch) if replayed else 1
    done = False
    with torch.no_grad(), generators.lent(), task.python_state.fresh():
        while not done:
            place = f"local training, step {course.steps + 1} of {course.total}"
            try:
                rows = course.next_rows(together)
                steps = -(-len(rows) // course.batch)
                tape = None
                if replayed:
                    columns = [list(torch.split(part, course.batch)) for part in batch(data, rows, task)]
                    columns += [[course.step_key(ahead) for ahead in range(steps)]] if data.setup.masked else []
                    given = [column[0] for column in columns]
                    tape, inputs = desk.tape_for(given, partial(_other_batch, job, course, given))
                if tape is not None:
                    desk.replay(tape, inputs, columns, course.watched - course.steps)
                else:
                    for ahead in range(steps):
                        seed = data.key(position, "draws", course.steps + ahead)
                        part = rows[ahead * course.batch : (ahead + 1) * course.batch]
                        parts = _parts(task, data, part, course.step_key(ahead), seed)
                        check_finite(desk.step(parts, len(part)).item())
                done = course.advance(desk.take_loss, lambda: (unload(desk.module), desk.at.optimizer), steps)
            except Exception as error:
                if replayed:  # seen some steps later: find the very step
                    _train_alone(job, desk, position, replayed=False)
                raise blame(error, place, data, position) from error
    course.finish(unload(desk.module), clone(desk.at.optimizer))


def _other_batch(job: Job, course: Course, like: Sequence[Tensor]) -> list[Tensor]:
    """Another batch of the same size to try a recording on: rows drawn with repetition, some of them changed."""
    drawn = keys.hashes(job.data.key(course.position, "trial"), len(like[1])) * len(course.rows) >> 32
    x, y = batch(job.data, course.rows[torch.from_numpy(drawn)], job.task)
    if x.is_floating_point():
        x[: (len(x) + 1) // 2] *= 0.5
    return [x, y, *(key + 1 for key in like[2:])]


def _parts(task: Task, data: Clients, rows: Tensor, key: Tensor, seed: int) -> Parts:
    """Some rows in one pass, or where batches may be cut in several of about one size; every reading draws the same."""

    def parts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        generators.seed(seed, data.setup.device)
        for number, part in enumerate(passes(rows, data.setup.micro_batch) if data.setup.cuts_batches else [rows]):
            yield *batch(data, part, task), key + number

    return parts


@dataclass(frozen=True)
class FullGradient:
    """Every client's gradient over all its examples, stacked; its loss; and its buffers after having seen them."""

    gradient: Tree
    losses: Tensor
    buffers: Tree


def full_gradient(task: Task, data: Clients, weights: Tree) -> FullGradient:
    """The gradient of every client's mean training loss at its row of `weights`."""
    if not data.setup.loss_is_mean:
        raise InputError(
            "A full gradient is a mean over examples, and this loss is not: what it gives for a batch is not the mean "
            'of what it gives for each example. Use a loss that is such a mean, or fedavg with batch_size = "full".'
        )
    gradients, losses, buffers = [], [], []
    module = task.module.train()
    places = task.places
    for position in range(len(data)):
        load(module, {**task.transient, **row(weights, position)})
        at = {name: places.parameters[name] for name in task.trainable}
        rows = training_rows(data, position)
        key = key_tensor(data, position, 0)
        try:
            with generators.lent(), task.python_state.fresh(), places.settled():
                parts = _parts(task, data, rows, key, data.key(position, "draws", 0))
                loss, gradient = gradient_of(module, task, parts, len(rows), at)
            check_finite(loss.item())
        except Exception as error:
            raise blame(error, "its full gradient", data, position) from error
        gradients.append({name: torch.zeros_like(at[name]) if g is None else g for name, g in gradient.items()})
        losses.append(loss.item())
        buffers.append({n: leaf.clone() for n, leaf in unload(module).items() if n not in task.trainable})
    return FullGradient(stack(gradients), torch.tensor(losses, dtype=task.torch_dtype), stack(buffers))
