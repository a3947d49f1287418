"""What a client computes: local training (the only training loop) and full gradients.

With a group size of 1 clients are trained one after another, at a desk (`desk.py`). Larger groups are trained side by
side, in `lanes.py`. Both walk the same course (`course.py`) and give the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom import optimizers
from fedloom.clients import Clients
from fedloom.course import (
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
from fedloom.desk import Desk, Parts, desk_for, gradient_of, load, ready_together, unload
from fedloom.evaluation import batch, passes
from fedloom.lanes import train_lanes
from fedloom.task import Task
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
    data = job.data
    course = Course(job, position)
    desk.seat(job, position)
    together = ready_together(job, course.batch) if replayed else 1
    done = False
    with torch.no_grad(), _own_generator(data):
        while not done:
            place = f"local training, step {course.steps + 1} of {course.total}"
            try:
                rows = course.next_rows(together)
                steps = -(-len(rows) // course.batch)
                keys = [course.step_key(ahead) for ahead in range(steps)] if data.setup.masked else []
                if replayed:
                    columns = [torch.split(part, course.batch) for part in batch(data, rows, job.task)]
                    desk.replay(*columns, *([keys] if keys else []))
                else:
                    seed = data.key(position, "draws", course.steps)
                    parts = _parts(job.task, data, rows, keys[0] if keys else None, seed)
                    check_finite(desk.step(parts, len(rows)).item())
                done = course.advance(desk.take_loss, lambda: unload(desk.module), steps)
            except Exception as error:
                if replayed:  # seen some steps later: find the very step
                    _train_alone(job, desk, position, replayed=False)
                raise blame(error, place, data, position) from error
    course.finish(unload(desk.module), clone(desk.state))


def _parts(task: Task, data: Clients, rows: Tensor, key: Tensor | None, seed: int) -> Parts:
    """Some rows in passes of at most `micro_batch`, all of about one size, with draws that every reading repeats."""

    def parts() -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        if data.setup.draws_globally:
            torch.manual_seed(seed >> 1)
        for number, part in enumerate(passes(rows, data.setup.micro_batch)):
            yield *batch(data, part, task), None if key is None else key + number

    return parts


def _own_generator(data: Clients) -> AbstractContextManager[Any]:
    """Models that draw from torch's global generator may seed it as they like in here: it is given back as it was."""
    return torch.random.fork_rng(devices=[]) if data.setup.draws_globally else nullcontext()


@dataclass(frozen=True)
class FullGradient:
    """Every client's gradient over all its examples, stacked; its loss; and its buffers after having seen them."""

    gradient: Tree
    losses: Tensor
    buffers: Tree


def full_gradient(task: Task, data: Clients, weights: Tree) -> FullGradient:
    """The gradient of every client's mean training loss at its row of `weights`."""
    gradients, losses, buffers = [], [], []
    module = task.module.train()
    for position in range(len(data)):
        load(module, {**task.transient, **row(weights, position)})
        named = dict(module.named_parameters())
        at = {name: named[name] for name in task.trainable}
        rows = training_rows(data, position)
        key = key_tensor(data, position, 0) if data.setup.masked else None
        try:
            with _own_generator(data):
                parts = _parts(task, data, rows, key, data.key(position, "draws", 0))
                loss, gradient = gradient_of(module, task, parts, len(rows), at)
            check_finite(loss.item())
        except Exception as error:
            raise blame(error, "its full gradient", data, position) from error
        gradients.append(gradient)
        losses.append(loss.item())
        buffers.append({n: leaf.clone() for n, leaf in unload(module).items() if n not in task.trainable})
    return FullGradient(stack(gradients), torch.tensor(losses, dtype=task.torch_dtype), stack(buffers))
