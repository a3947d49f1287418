"""What a client computes: local training (the only training loop) and full gradients.

With a group size of 1 a client is trained by plain steps on the module itself: the readable reference, in this file.
Larger groups are trained side by side, in `lanes.py`. Both walk the same course (`course.py`) and give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

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
    clip,
    key_tensor,
    training_rows,
)
from fedloom.evaluation import batch, passes
from fedloom.lanes import train_lanes
from fedloom.masking import Masked
from fedloom.task import Task
from fedloom.tree import Tree, clone, row, stack

__all__ = ["Correct", "FullGradient", "Groups", "Step", "Trained", "Training", "full_gradient", "train"]


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
    if data.setup.group == 1 or training.batch_size == "full" or data.ids == (data.federation.everyone,):
        for position in range(len(data)):
            _train_plain(job, position)
    else:
        train_lanes(job, training.batch_size)
    courses = [job.courses[position] for position in range(len(data))]
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


def _train_plain(job: Job, position: int) -> None:
    """One client on the module itself, batch by batch."""
    task, data, training = job.task, job.data, job.training
    course = Course(job, position)
    module = task.module.train()
    load(module, {**task.transient, **row(job.start, position)})
    named = dict(module.named_parameters())
    parameters: Tree = {name: named[name] for name in task.trainable}
    begin = {name: job.start[name][position] for name in task.trainable}
    own = {group: row(stacked, position) for group, stacked in job.own.items()}
    state = clone(row(job.kept, position)) if job.kept else optimizers.initial_state(training, begin, task.trainable)
    losses = 0.0

    def take_loss() -> float:
        nonlocal losses
        total, losses = losses, 0.0
        return total

    done = False
    with _own_generator(data):
        while not done:
            place = f"local training, step {course.steps + 1} of {course.total}"
            try:
                rows = course.next_rows()
                key = course.step_key() if data.setup.masked else None
                seed = data.key(position, "draws", course.steps)
                buffers = clone(dict(module.named_buffers())) if job.correct else {}
                loss, gradient = _gradient(module, task, data, rows, key, seed, parameters)
                check_finite(loss)
                losses += loss * len(rows)
                if job.correct is not None:
                    params = {name: leaf.detach() for name, leaf in parameters.items()}
                    step = Step(gradient, params, begin, _gradient_at(module, task, data, rows, key, seed, buffers))
                    gradient = job.correct(step, job.shared, own)
                if training.clip is not None:
                    gradient = clip(gradient, training.clip)
                with torch.no_grad():
                    gradients = [gradient[name] for name in parameters]
                    optimizers.update(training, task.trainable, list(parameters.values()), gradients, state)
                done = course.advance(take_loss, lambda: _unload(module))
            except Exception as error:
                raise blame(error, place, data, position) from error
    course.finish(_unload(module), state)


def _own_generator(data: Clients) -> AbstractContextManager[Any]:
    """Models that draw from torch's global generator may seed it as they like in here: it is given back as it was."""
    return torch.random.fork_rng(devices=[]) if data.setup.draws_globally else nullcontext()


def _gradient(
    model: Callable[[Tensor], Any],
    task: Task,
    data: Clients,
    rows: Tensor,
    key: Tensor | None,
    seed: int,
    at: Mapping[str, Tensor],
) -> tuple[float, Tree]:
    """Mean loss over some rows and its gradient, in passes of at most `micro_batch` rows, all of about one size."""
    if data.setup.draws_globally:
        torch.manual_seed(seed >> 1)
    total, leaves = 0.0, list(at.values())
    sums: list[Tensor] = []
    for number, part in enumerate(passes(rows, data.setup.micro_batch)):
        x, y = batch(data, part, task)
        with nullcontext() if key is None else Masked(key + number):
            loss = task.losses(model(x), y).sum() / len(rows)
        found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        total += loss.item()
        sums = [before + new for before, new in zip(sums, found, strict=True)] if sums else list(found)
    return total, dict(zip(at, sums, strict=True))


def _gradient_at(
    module: nn.Module, task: Task, data: Clients, rows: Tensor, key: Tensor | None, seed: int, buffers: Tree
) -> Callable[[Tree], Tree]:
    """The gradient of the same batch, with the same draws and buffers, at other weights."""

    def gradient_at(weights: Tree) -> Tree:
        at = {name: weights[name].detach().requires_grad_() for name in task.trainable}
        used = clone(buffers)  # whatever this second pass does to them is thrown away: only the real step counts
        return _gradient(lambda x: functional_call(module, {**at, **used}, (x,)), task, data, rows, key, seed, at)[1]

    return gradient_at


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
                loss, gradient = _gradient(module, task, data, rows, key, data.key(position, "draws", 0), at)
            check_finite(loss)
        except Exception as error:
            raise blame(error, "its full gradient", data, position) from error
        gradients.append(gradient)
        losses.append(loss)
        buffers.append({n: leaf.clone() for n, leaf in _unload(module).items() if n not in task.trainable})
    return FullGradient(stack(gradients), torch.tensor(losses, dtype=task.torch_dtype), stack(buffers))


@torch.no_grad()
def load(module: nn.Module, weights: Tree) -> None:
    """Weights into a module, in place."""
    for name, leaf in (*module.named_parameters(), *module.named_buffers()):
        if name in weights:
            leaf.copy_(weights[name])


def _unload(module: nn.Module) -> Tree:
    """The module's own weights: not a copy."""
    persistent = module.state_dict().keys()
    buffers = {name: leaf for name, leaf in module.named_buffers() if name in persistent}
    return {name: leaf.detach() for name, leaf in (*module.named_parameters(), *buffers.items())}
