"""Early stopping: measure the validation split after an epoch, and keep the best epoch so far."""

from __future__ import annotations

import math

from fedloom.task import Task
from fedloom.training.clients import Clients
from fedloom.training.evaluation import evaluate
from fedloom.training.training_rows import needs_validation
from fedloom.tree import Tree, clone


class BestEpoch:
    """The best epoch so far of one client's training. Without `patience`, epochs are measured and none is kept."""

    def __init__(self, task: Task, data: Clients, position: int, patience: int | None) -> None:
        self.task, self.data, self.position, self.patience = task, data, position, patience
        self.kept: tuple[Tree, Tree, int] | None = None  # weights, optimiser, and the steps that led to them
        self._loss = math.nan
        self._epochs_since = 0

    def measure(self, history: dict[str, float], weights: Tree, optimizer: Tree, steps: int) -> bool:
        """Add an epoch's loss and metrics on the validation split to its history. Return True to stop training."""
        measured = evaluate(self.task, weights, self.data, self.position, "validation").values(self.task)
        self.task.module.train()
        history.update({f"validation_{name}": value for name, value in measured.items()})
        if self.patience is None:
            return False
        if not measured:
            raise needs_validation(self.data.name(self.position))
        if self.kept is None or measured["loss"] < self._loss or math.isnan(self._loss):
            self.kept, self._loss = (clone(weights), clone(optimizer), steps), measured["loss"]
            self._epochs_since = 0
        else:
            self._epochs_since += 1
        return self._epochs_since >= self.patience
