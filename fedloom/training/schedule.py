"""What a client does in a round: the settings of local training, its batches and epochs, and when it stops.

Nothing here computes weights. `local.py` has the loop and the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import model_validator
from torch import Tensor

from fedloom import keys
from fedloom.errors import InputError, TrainingError
from fedloom.record import Count, Decay, NonNegative, Positive, Record
from fedloom.task import Task
from fedloom.training.clients import Clients
from fedloom.training.evaluation import evaluate
from fedloom.tree import Groups, Tree, clone


class Training(Record):
    """How a client trains: the optimiser, its steps and when to stop."""

    optimizer: Literal["sgd", "adam", "adagrad", "adadelta"] = "sgd"
    """The local optimiser."""
    lr: Positive = 0.1
    """The learning rate."""
    epochs: Positive = 1.0
    """Passes over a client's training split in a round. Fractions are allowed."""
    batch_size: Count | Literal["full"] = 32
    """Examples in a step, or `full` for all examples of the client."""
    drop_last: bool = False
    """Leave out the smaller batch at the end of an epoch. A client's only batch is always used."""
    optimizer_state: Literal["reset", "keep"] = "reset"
    """Start every round with a new optimiser, or let each client keep its own between rounds."""
    momentum: Decay = 0.0
    """The momentum of `sgd`."""
    weight_decay: NonNegative = 0.0
    """L2 penalty: this times the weights is added to the gradient."""
    clip: Positive | None = None
    """Scale down gradients whose norm is larger than this."""
    patience: Count | None = None
    """Stop local training after this many epochs without a better loss on the validation split, and return the best
    weights.
    """
    beta1: Decay = 0.9
    """Decay of the mean gradient of `adam`."""
    beta2: Decay = 0.999
    """Decay of the mean squared gradient of `adam`."""
    rho: Decay = 0.9
    """Decay of the running means of `adadelta`."""
    epsilon: Positive | None = None
    """Added to the denominators of `adam`, `adagrad` and `adadelta`. By default, as in torch."""

    @model_validator(mode="after")
    def _fits_optimizer(self) -> Training:
        meant_for = {"momentum": "sgd", "beta1": "adam", "beta2": "adam", "rho": "adadelta"}
        for name, optimizer in meant_for.items():
            if self.optimizer != optimizer and getattr(self, name) != type(self).model_fields[name].default:
                raise InputError(f'\'{name}\' is for optimizer = "{optimizer}", not for "{self.optimizer}".')
        if self.optimizer == "sgd" and self.epsilon is not None:
            raise InputError("'epsilon' is for the optimizers adam, adagrad and adadelta, not for \"sgd\".")
        return self


@dataclass(frozen=True)
class Step:
    """What an algorithm's `correct` hook sees of one local step. All tensors belong to one client."""

    grad: Tree
    params: Tree
    start: Tree  # the weights that this client began the round with
    grad_at: Callable[[Tree], Tree]  # returns the gradient of the same batch at other weights


Correct = Callable[[Step, Groups, Groups], Tree]


@dataclass(frozen=True)
class TrainingJob:
    """One call of `local.train`: several clients, each with its row in the stacked trees."""

    task: Task
    data: Clients
    start: Tree
    training: Training
    correct: Correct | None
    shared: Groups
    own: Groups
    optimizer: Tree | None  # the optimisers' states, where clients keep them between rounds
    trained: Tree  # each client's trained weights are written to its row


@dataclass(frozen=True)
class ClientResult:
    """What local training of one client gives beside the weights."""

    optimizer: Tree
    steps: int
    history: tuple[dict[str, float], ...]  # losses and metrics of every epoch


class ClientSchedule:
    """The batches of one client: which rows come next, when an epoch ends, and when training stops."""

    def __init__(self, job: TrainingJob, position: int) -> None:
        self.job, self.position = job, position
        size = job.training.batch_size
        self.rows = training_rows(job.data, position, None if size == "full" else size, job.training.drop_last)
        self.batch_size = len(self.rows) if size == "full" else size
        self.per_epoch = -(-len(self.rows) // self.batch_size)
        if job.training.drop_last:
            self.per_epoch = max(len(self.rows) // self.batch_size, 1)
        self.total = max(1, round(job.training.epochs * self.per_epoch))
        self.steps = 0
        self.history: list[dict[str, float]] = []
        self.best: tuple[float, Tree, Tree, int] | None = None  # loss, weights, optimiser, and the steps so far
        self.epochs_without_gain = 0
        self._shuffle()

    def _shuffle(self) -> None:
        self.seen = 0  # examples since the epoch began
        self.order = self.rows
        if self.job.training.batch_size != "full":  # the order within a full batch means nothing
            epoch = self.steps // self.per_epoch
            order = keys.permutation(self.job.data.key(self.position, "batches", epoch), len(self.rows))
            self.order = self.rows[torch.from_numpy(order)]

    def next_rows(self, most: int = 1) -> Tensor:
        """Return the rows of up to `most` equal batches. A short last batch is returned alone."""
        step = self.steps % self.per_epoch
        count = max(min(most, len(self.order) // self.batch_size - step, self.total - self.steps), 1)
        rows = self.order[step * self.batch_size : (step + count) * self.batch_size]
        self.seen += len(rows)
        return rows

    def dropout_key(self, ahead: int = 0) -> Tensor:
        """Return the key of dropout in the next step, or in the step that is `ahead` steps later."""
        return self.job.data.dropout_key(self.position, self.steps + ahead)

    def advance(self, loss_sum: Callable[[], float], state: Callable[[], tuple[Tree, Tree]], steps: int = 1) -> bool:
        """Count steps. At the end of an epoch, keep its loss and decide whether to stop. Return True when done.

        `loss_sum` returns the sum of the examples' losses in this epoch and resets it; `state` returns the weights and
        the optimiser's state.
        """
        self.job.data.go_on()
        self.steps += steps
        done = self.steps == self.total
        if self.steps % self.per_epoch and not done:
            return False
        loss = loss_sum() / self.seen
        check_finite(loss)
        self.history.append({"loss": loss})
        if self.job.data.watch_epochs or self.job.training.patience:
            done = self._validate(*state()) or done
        if not done:
            self._shuffle()
        return done

    def _validate(self, weights: Tree, optimizer: Tree) -> bool:
        """Evaluate the validation split. Return True when patience is used up."""
        job = self.job
        measured = evaluate(job.task, weights, job.data, self.position, "validation").values(job.task)
        job.task.module.train()
        self.history[-1].update({f"validation_{name}": value for name, value in measured.items()})
        if job.training.patience is None:
            return False
        if not measured:
            raise needs_validation(job.data.name(self.position))
        if self.best is None or measured["loss"] < self.best[0] or math.isnan(self.best[0]):
            self.best, self.epochs_without_gain = (measured["loss"], clone(weights), clone(optimizer), self.steps), 0
        else:
            self.epochs_without_gain += 1
        return self.epochs_without_gain >= job.training.patience

    def finish(self, weights: Tree, optimizer: Tree) -> ClientResult:
        """Write the client's weights to its row: with patience those of the best epoch, else these."""
        steps = self.steps
        if self.best is not None:
            _, weights, optimizer, steps = self.best  # count only the steps that led to these weights
        for name, leaf in weights.items():
            self.job.trained[name][self.position].copy_(leaf)
        return ClientResult(clone(optimizer), steps, tuple(self.history))


def training_rows(data: Clients, position: int, batch_size: int | None = None, drop_last: bool = False) -> Tensor:
    """Return one client's training rows. Raise if there are none, or if batch normalisation would see one alone."""
    rows = data.rows(position, "train")
    check_size(data.name(position), len(rows), data.setup.normalises_features, batch_size, drop_last)
    return rows


def check_size(name: str, count: int, normalises: bool, batch_size: int | None, drop_last: bool) -> None:
    """Raise if a client with `count` training examples cannot train, or if batch normalisation would see one alone."""
    if count == 0:
        raise InputError(
            f"Client '{name}' has no training examples, so it cannot train. Change data.split or the partition."
        )
    if normalises and min(count, batch_size or count) == 1:
        what = "has one training example" if count == 1 else "trains on batches of one example"
        raise InputError(
            f"Client '{name}' {what}, but the model's batch normalisation needs at least two in a batch. "
            "Leave such clients out, use a larger batch_size, or normalise with nn.LayerNorm or nn.GroupNorm."
        )
    if normalises and batch_size and not drop_last and count % batch_size == 1:
        raise InputError(
            f"Client '{name}' has {count} training examples, so with batch_size = {batch_size} its last batch has "
            "one, and the model's batch normalisation needs at least two. Use drop_last = true, another batch_size, or "
            "normalise with nn.LayerNorm or nn.GroupNorm."
        )


def needs_validation(name: str) -> InputError:
    """Return the error for a client that stops early and has nothing to decide by."""
    return InputError(
        f"Client '{name}' has no validation examples, which patience (early stopping) needs. Change data.split, or "
        "leave patience out."
    )


def check_finite(loss: float) -> None:
    """Raise if the loss is NaN or infinite."""
    if loss - loss != 0:
        raise TrainingError(f"the loss is {loss}. A smaller lr or a clip may help.")
