"""What a client does in a round: its batches and epochs, and when it stops.

Nothing here computes weights. `local.py` has the loop and the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom import keys
from fedloom.task import Task
from fedloom.training.best_epoch import BestEpoch
from fedloom.training.clients import Clients
from fedloom.training.correction import Correct
from fedloom.training.finite_loss import check_finite
from fedloom.training.settings import Training
from fedloom.training.training_rows import training_rows
from fedloom.tree import Groups, Tree, clone


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
    """What local training of one client gives besides the weights."""

    optimizer: Tree
    steps: int
    history: tuple[dict[str, float], ...]  # losses and metrics of every epoch
    lr_sum: float  # the sum of the steps' learning rates


class ClientSchedule:
    """The batches of one client: which rows come next, when an epoch ends, and when training stops."""

    def __init__(self, job: TrainingJob, position: int) -> None:
        self.job, self.position = job, position
        self.training = training = job.training.of(job.data.name(position))
        size = training.batch_size
        self.rows = training_rows(job.data, position, None if size == "full" else size, training.drop_last)
        self.batch_size = len(self.rows) if size == "full" else size
        self.per_epoch = -(-len(self.rows) // self.batch_size)
        if training.drop_last:
            self.per_epoch = max(len(self.rows) // self.batch_size, 1)
        self.total = max(1, round(training.epochs * self.per_epoch))
        self.steps = 0
        self.history: list[dict[str, float]] = []
        self.best = BestEpoch(job.task, job.data, position, job.training.patience)
        self._shuffle()

    def _shuffle(self) -> None:
        self.seen = 0  # examples since the epoch began
        self.order = self.rows
        if self.training.batch_size != "full":  # the order within a full batch means nothing
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

    def rate(self, ahead: int = 0) -> float:
        """Return the learning rate of the next step, or of the step that is `ahead` steps later, as a share of `lr`."""
        return self._lr_at(self.steps + ahead) / self.job.training.lr

    def _lr_at(self, step: int) -> float:
        return self.training.lr_at(self.job.data.round, step, self.total)

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
        check_finite(loss, self.job.task, self.job.data, self.position, self.job.start, self.job.correct)
        self.history.append({"loss": loss})
        if self.job.data.watch_epochs or self.job.training.patience:
            done = self.best.measure(self.history[-1], *state(), self.steps) or done
        if not done:
            self._shuffle()
        return done

    def finish(self, weights: Tree, optimizer: Tree) -> ClientResult:
        """Write the client's weights to its row: with patience those of the best epoch, else these."""
        weights, optimizer, steps = self.best.kept or (weights, optimizer, self.steps)
        for name, leaf in self.job.trained.items():
            leaf[self.position].copy_(weights[name])
        changes = self.job.training.changes_rate
        lr_sum = math.fsum(map(self._lr_at, range(steps))) if changes else steps * self.training.lr
        return ClientResult(clone(optimizer), steps, tuple(self.history), lr_sum)
