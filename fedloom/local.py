"""What a client computes: local training (the only training loop) and full gradients.

Training works on lanes: a lane holds one client at a time, takes one step with the others under vmap, and is refilled with
the next client when its own is done. With a group size of 1 there is no vmap: the plain step, on the module itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.func import functional_call

from fedloom import keys, optimizers
from fedloom.clients import Clients
from fedloom.errors import FedloomError, InputError, TrainingError
from fedloom.evaluation import batch, evaluate, passes
from fedloom.masking import Masked
from fedloom.record import Count, Decay, NonNegative, Positive, Record
from fedloom.task import Task
from fedloom.tree import Tree, row, select, stack

Groups = dict[str, Tree]


class Training(Record):
    """How a client trains: the optimiser, its steps and when to stop."""

    optimizer: Literal["sgd", "adam", "adagrad", "adadelta"] = "sgd"
    lr: Positive = 0.1
    epochs: Positive = 1.0
    batch_size: Count | Literal["full"] = 32
    optimizer_state: Literal["reset", "keep"] = "reset"
    momentum: Decay = 0.0
    weight_decay: NonNegative = 0.0
    clip: Positive | None = None
    patience: Count | None = None
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    rho: Decay = 0.9
    epsilon: Positive | None = None

    @model_validator(mode="after")
    def _fits_optimizer(self) -> Training:
        meant_for = {"momentum": "sgd", "beta1": "adam", "beta2": "adam", "rho": "adadelta"}
        for name, optimizer in meant_for.items():
            if self.optimizer != optimizer and getattr(self, name) != type(self).model_fields[name].default:
                raise InputError(f"The '{name}' parameter of Training is for optimizer = \"{optimizer}\", not \"{self.optimizer}\".")
        return self


@dataclass(frozen=True)
class Step:
    """What an algorithm's `correct` hook sees of one local step; all tensors belong to one client."""

    grad: Tree
    params: Tree
    start: Tree  # the weights this client began with
    grad_at: Callable[[Tree], Tree]  # the gradient of the same batch at other weights


Correct = Callable[[Step, Groups, Groups], Tree]


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
    """Train every client from its row of `start`; `correct` may change each gradient before it is clipped and applied."""
    own = own or {}
    out = {name: torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) for name, leaf in start.items()}
    kept = own.get("optimizer") if training.optimizer_state == "keep" else None
    job = _Job(task, data, start, training, correct, shared or {}, own, kept, out, [None] * len(data))
    alone = data.setup.group == 1 or training.batch_size == "full" or data.ids == (data.federation.everyone,)
    if alone:
        for position in range(len(data)):
            _train_plain(job, position)
    else:
        _train_lanes(job)
    finished = [course for course in job.courses if course is not None]
    if kept is not None:
        states = [course.optimizer for course in finished]
        own = {**own, "optimizer": {name: torch.stack([state[name] for state in states]) for name in kept}}
    return Trained(
        out, own, torch.tensor([course.steps for course in finished]), tuple(tuple(course.history) for course in finished)
    )


def initial_optimizer(training: Training, task: Task, model: Tree) -> Groups:
    """What a client that keeps its optimiser's state between rounds begins with."""
    if training.optimizer_state == "reset":
        return {}
    state = optimizers.initial_state(training, model, task.trainable)
    return {"optimizer": state} if state else {}


@dataclass
class _Job:
    """One call of `train`, shared by its lanes."""

    task: Task
    data: Clients
    start: Tree
    training: Training
    correct: Correct | None
    shared: Groups
    own: Groups
    optimizer: Tree | None
    out: Tree
    courses: list[_Course | None]


class _Course:
    """One client's way through its batches: order, epochs, history, early stopping."""

    def __init__(self, job: _Job, position: int) -> None:
        self.job, self.position = job, position
        training, data = job.training, job.data
        self.rows = training_rows(data, position, None if training.batch_size == "full" else training.batch_size)
        self.batch = len(self.rows) if training.batch_size == "full" else training.batch_size
        self.per_epoch = -(-len(self.rows) // self.batch)
        self.total = max(1, round(training.epochs * self.per_epoch))
        self.steps = 0
        self.optimizer: Tree = {}
        self.history: list[dict[str, float]] = []
        self.best: tuple[float, Tree] | None = None
        self.stale = 0
        self._seen = 0  # examples since the epoch began
        self._shuffle()

    def _shuffle(self) -> None:
        epoch = self.steps // self.per_epoch
        order = keys.permutation(self.job.data.key(self.position, "batches", epoch), len(self.rows))
        self.order = self.rows[torch.from_numpy(order)]
        self._seen = 0

    def next_rows(self) -> Tensor:
        """The rows of the next batch; the last one of an epoch may be smaller."""
        begin = self.steps % self.per_epoch * self.batch
        rows = self.order[begin : begin + self.batch]
        self._seen += len(rows)
        return rows

    def step_key(self) -> Tensor:
        return torch.tensor(
            keys.words(self.job.data.key(self.position, "dropout", self.steps)), device=self.job.data.setup.device
        )

    def advance(self, loss_sum: Callable[[], float], weights: Callable[[], Tree]) -> bool:
        """Count a step; at the end of an epoch note the loss and decide about stopping. True when the course is done.

        `loss_sum` gives the sum of the losses since the epoch began, and begins anew.
        """
        self.steps += 1
        done = self.steps == self.total
        if self.steps % self.per_epoch and not done:
            return False
        loss = loss_sum() / self._seen
        if not _finite(loss):
            raise TrainingError(f"the loss is {loss} in epoch {len(self.history) + 1}")
        self.history.append({"loss": loss})
        if self.job.data.setup.history or self.job.training.patience:
            done = self._validate(weights()) or done
        if not done:
            self._shuffle()
        return done

    def _validate(self, weights: Tree) -> bool:
        job = self.job
        measured = evaluate(job.task, weights, job.data, self.position, "validation").values(job.task)
        self.history[-1].update({f"validation_{name}": value for name, value in measured.items()})
        if job.training.patience is None or "loss" not in measured:
            return False
        if self.best is None or measured["loss"] < self.best[0]:
            self.best, self.stale = (measured["loss"], {name: leaf.clone() for name, leaf in weights.items()}), 0
        else:
            self.stale += 1
        return self.stale >= job.training.patience

    def finish(self, weights: Tree) -> None:
        """Write the result into the client's row: the best state seen if stopping early was asked for, else the last."""
        for name, leaf in (self.best[1] if self.best else weights).items():
            self.job.out[name][self.position].copy_(leaf)
        self.job.courses[self.position] = self


def _train_plain(job: _Job, position: int) -> None:
    """One client on the module itself, batch by batch: the readable reference."""
    task, data, training = job.task, job.data, job.training
    course = _Course(job, position)
    module = task.module.train()
    load(module, row(job.start, position))
    parameters = {name: dict(module.named_parameters())[name] for name in task.trainable}
    begin = {name: job.start[name][position] for name in task.trainable}
    own = {group: row(tree, position) for group, tree in job.own.items()}
    state = _optimizer_state(job, begin, row(job.optimizer, position) if job.optimizer else None)
    losses = 0.0

    def loss_sum() -> float:
        nonlocal losses
        total, losses = losses, 0.0
        return total

    done = False
    generator = torch.random.fork_rng(devices=[]) if data.setup.draws_globally else nullcontext()
    with generator:
        while not done:
            place = f"step {course.steps + 1} of {course.total}"
            try:
                rows = course.next_rows()
                step_key = course.step_key() if data.setup.masked else None
                if data.setup.draws_globally:
                    torch.manual_seed(data.key(position, "draws", course.steps) >> 1)
                loss, gradient = _gradient(task, module, parameters, data, rows, step_key)
                if not _finite(loss):
                    raise TrainingError(f"the loss is {loss}")
                if job.correct is not None:
                    step = Step(
                        gradient,
                        {name: leaf.detach() for name, leaf in parameters.items()},
                        begin,
                        _gradient_at(task, module, parameters, data, rows, step_key),
                    )
                    gradient = job.correct(step, job.shared, own)
                if training.clip is not None:
                    gradient = clip(gradient, training.clip)
                losses += loss * len(rows)
                with torch.no_grad():
                    optimizers.update(
                        training, task.trainable, list(parameters.values()), [gradient[n] for n in parameters], state
                    )
                done = course.advance(loss_sum, lambda: _unload(module))
            except Exception as error:
                raise blame(error, f"local training, {place}", data, position) from error
    course.optimizer = state
    course.finish(_unload(module))


def _optimizer_state(job: _Job, weights: Tree, kept: Tree | None) -> Tree:
    if kept is not None:
        return {name: leaf.clone() for name, leaf in kept.items()}
    return optimizers.initial_state(job.training, weights, job.task.trainable)


def _gradient(
    task: Task, module: nn.Module, parameters: Tree, data: Clients, rows: Tensor, key: Tensor | None
) -> tuple[float, Tree]:
    """Mean loss and its gradient over some rows, in passes of at most `micro_batch` rows, all of about one size."""
    total, gradient = 0.0, {}
    leaves = list(parameters.values())
    for number, part in enumerate(passes(rows, data.setup.micro_batch if len(rows) > data.setup.micro_batch else len(rows))):
        x, y = batch(data, part, task)
        with Masked(None if key is None else key + number) if key is not None else nullcontext():
            loss = task.losses(module(x), y).sum() / len(rows)
        found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        total += loss.item()
        gradient = (
            {name: gradient[name] + leaf for name, leaf in zip(parameters, found, strict=True)}
            if gradient
            else dict(zip(parameters, found, strict=True))
        )
    return total, gradient


def _gradient_at(
    task: Task, module: nn.Module, parameters: Tree, data: Clients, rows: Tensor, key: Tensor | None
) -> Callable[[Tree], Tree]:
    def gradient_at(weights: Tree) -> Tree:
        leaves = {name: weights[name].detach().requires_grad_() for name in parameters}
        # the buffers of this second pass are thrown away: only the real step may move running statistics
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        total: Tree = {}
        for number, part in enumerate(passes(rows, min(len(rows), data.setup.micro_batch))):
            x, y = batch(data, part, task)
            with Masked(None if key is None else key + number) if key is not None else nullcontext():
                loss = task.losses(functional_call(module, {**leaves, **buffers}, (x,)), y).sum() / len(rows)
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            total = {n: (total[n] + g if total else g) for n, g in zip(leaves, found, strict=True)}
        return total

    return gradient_at


def _train_lanes(job: _Job) -> None:
    """All clients of the job, `group` at a time, one vmapped step after another."""
    task, data, training, lanes = job.task, job.data, job.training, job.data.setup.group
    size = training.batch_size
    assert isinstance(size, int)
    weights = _lanes_like(job.start, lanes)
    parameters, others = select(weights, task.trainable), {n: w for n, w in weights.items() if n not in task.trainable}
    begin = {name: torch.zeros_like(leaf) for name, leaf in parameters.items()} if job.correct else {}
    own = {group: _lanes_like(stacked, lanes) for group, stacked in job.own.items()}
    state = _optimizer_state(job, parameters, None)
    if state:
        state["steps"] = torch.zeros(lanes, dtype=torch.int64, device=data.setup.device)
    step = _lane_step(task, training.clip, job.correct, data.setup.masked, data.setup.compile)
    waiting = iter(range(len(data)))
    courses: list[_Course | None] = [None] * lanes
    losses = torch.zeros(lanes, dtype=task.torch_dtype, device=data.setup.device)
    task.module.train()

    def fill(lane: int) -> None:
        position = next(waiting, None)
        courses[lane] = None if position is None else _Course(job, position)
        if position is None:
            return
        for name, leaf in weights.items():
            leaf[lane].copy_(job.start[name][position])
        for name, leaf in begin.items():
            leaf[lane].copy_(job.start[name][position])
        for group, tree in own.items():
            for name, leaf in tree.items():
                leaf[lane].copy_(job.own[group][name][position])
        for name, leaf in state.items():
            leaf[lane] = job.optimizer[name][position] if job.optimizer else 0

    def loss_sum(lane: int) -> float:
        total = losses[lane].item()
        losses[lane] = 0
        return float(total)

    for lane in range(lanes):
        fill(lane)
    rows = torch.zeros((lanes, size), dtype=torch.int64)
    counts = torch.zeros(lanes, dtype=torch.int64)
    step_keys = torch.zeros((lanes, 2), dtype=torch.int64)
    numbers = torch.arange(size)
    while any(courses):
        for lane, course in enumerate(courses):
            if course is None:
                counts[lane] = 0  # a dummy: its rows are masked and its result is never read
                continue
            found = course.next_rows()
            rows[lane, : len(found)] = found
            rows[lane, len(found) :] = found[0]
            counts[lane] = len(found)
            if data.setup.masked:
                step_keys[lane] = course.step_key()
        mask = (numbers < counts.unsqueeze(1)).to(task.torch_dtype)
        x, y = batch(data, rows.reshape(-1), task)
        try:
            gradient, loss, buffers = step(
                parameters,
                others,
                x.reshape(lanes, size, *x.shape[1:]),
                y.reshape(lanes, size, *y.shape[1:]),
                mask.to(data.setup.device),
                step_keys.to(data.setup.device),
                begin,
                job.shared if job.correct else {},
                own,
            )
        except FedloomError:
            raise
        except Exception as error:
            names = ", ".join(f"'{data.name(course.position)}'" for course in courses if course)
            raise TrainingError(
                f"Round {data.round}: a step of clients {names}, trained side by side, failed: {type(error).__name__}: {error}\n"
                "Run it with run.backend = \"serial\" to see which client and batch."
            ) from error
        for name, leaf in buffers.items():
            others[name].copy_(leaf)
        optimizers.update(training, task.trainable, list(parameters.values()), [gradient[n] for n in parameters], state)
        losses += loss * counts.to(data.setup.device)
        for lane, course in enumerate(courses):
            if course is None:
                continue
            try:
                done = course.advance(lambda lane=lane: loss_sum(lane), lambda lane=lane: row(weights, lane))  # type: ignore[misc]
            except Exception as error:
                raise blame(error, "local training", data, course.position) from error
            if done:
                course.optimizer = {name: leaf[lane].clone() for name, leaf in state.items()}
                course.finish(row(weights, lane))
                fill(lane)


def _lanes_like(stacked: Tree, lanes: int) -> Tree:
    """Empty lanes for trees like those of a stack."""
    return {n: torch.zeros((lanes, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device) for n, leaf in stacked.items()}


@lru_cache(maxsize=64)
def _lane_step(
    task: Task, clip_at: float | None, correct: Correct | None, masked: bool, compiled: bool = False
) -> Callable[..., Any]:
    """One training step of all lanes: gradients, losses and new buffers. Cached, because compiling it takes long."""
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
                return gradient_of(weights, others, x, y, mask, key)[0]  # type: ignore[no-any-return]

            gradient = correct(Step(gradient, parameters, begin, gradient_at), shared, own)
        if clip_at is not None:
            gradient = clip(gradient, clip_at)
        return gradient, loss, buffers

    lanes = torch.func.vmap(step, in_dims=(0, 0, 0, 0, 0, 0, 0, None, 0))
    return torch.compile(lanes) if compiled else lanes


def clip(gradient: Tree, largest: float) -> Tree:
    """The gradient scaled down to a norm of at most `largest`."""
    norm = torch.stack([leaf.square().sum() for leaf in gradient.values()]).sum().sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    return {name: leaf * factor for name, leaf in gradient.items()}


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
        load(module, row(weights, position))
        parameters = {name: dict(module.named_parameters())[name] for name in task.trainable}
        rows = training_rows(data, position)
        key = torch.tensor(keys.words(data.key(position, "dropout", 0))) if data.setup.masked else None
        try:
            loss, gradient = _gradient(task, module, parameters, data, rows, key)
            if not _finite(loss):
                raise TrainingError(f"the loss is {loss}")
        except Exception as error:
            raise blame(error, "its full gradient", data, position) from error
        gradients.append(gradient)
        losses.append(loss)
        buffers.append({n: leaf.clone() for n, leaf in _unload(module).items() if n not in task.trainable})
    return FullGradient(stack(gradients), torch.tensor(losses), stack(buffers))


def training_rows(data: Clients, position: int, batch_size: int | None = None) -> Tensor:
    """One client's training rows, checked: there are some, and batch normalisation never sees a lone example."""
    rows = data.rows(position, "train")
    name = data.name(position)
    if len(rows) == 0:
        raise InputError(f"Client '{name}' has no training examples, so it cannot train. Change data.split or the partition.")
    if data.setup.normalises_features and min(len(rows), batch_size or len(rows)) == 1:
        what = "has one training example" if len(rows) == 1 else "trains on batches of one example"
        raise InputError(
            f"Client '{name}' {what}, but the model's batch normalisation needs at least two in a batch. "
            "Leave such clients out, use a larger batch_size, or normalise with nn.LayerNorm or nn.GroupNorm."
        )
    return rows


@torch.no_grad()
def load(module: nn.Module, weights: Tree) -> None:
    """Weights into a module, in place."""
    for name, leaf in (*module.named_parameters(), *module.named_buffers()):
        if name in weights:
            leaf.copy_(weights[name])


def _unload(module: nn.Module) -> Tree:
    persistent = module.state_dict().keys()
    buffers = {name: leaf for name, leaf in module.named_buffers() if name in persistent}
    return {name: leaf.detach() for name, leaf in (*module.named_parameters(), *buffers.items())}


def _finite(value: float) -> bool:
    return value - value == 0


def blame(error: Exception, phase: str, data: Clients, position: int) -> Exception:
    """The error with the round, the client and the phase in front."""
    if isinstance(error, InputError):
        return error
    what = str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
    if what.startswith("Round "):
        return error
    advice = ". A smaller lr or a clip may help." if "the loss is" in what else ""
    return TrainingError(f"Round {data.round}, client '{data.name(position)}', {phase}: {what}{advice}")
