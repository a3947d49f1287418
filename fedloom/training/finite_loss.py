"""Ends training whose loss is not finite, and says whether a step or the initial model is the cause."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedloom.errors import Diverged, TrainingError
from fedloom.task import Task
from fedloom.training import generators
from fedloom.training.clients import Clients
from fedloom.training.evaluation import NO_KEY, batch, passes
from fedloom.training.masking import Masked
from fedloom.tree import Tree, clone, row
from fedloom.user_code import defined_at, named


def check_finite(loss: float, task: Task, data: Clients, position: int, start: Tree, correct: object = None) -> None:
    """Raise if the loss of a client that started from its row of `start` is NaN or infinite.

    A `correct` of your own is named, because its gradients made the steps before.
    """
    if loss - loss == 0:
        return
    begins = data.round <= 1 and data.call == 0
    if begins and (fault := _fault_at(task, data, position, row(start, position))):
        raise TrainingError(f"the loss of the initial model, before any step, is not finite: {fault}")
    advice = f"Does {named(correct)} return NaN or infinity? Else, a smaller" if defined_at(correct) else "A smaller"
    advice += f" lr or a clip may help.{data.federation.advice_if_diverged}"
    raise Diverged(f"the loss is {loss}{defined_at(task.loss)}. {advice}")


@torch.no_grad()
def _fault_at(task: Task, data: Clients, position: int, weights: Tree) -> str:
    """Say why the loss on a client's training examples is not finite at some weights; empty if it is finite."""
    task.module.train()
    for rows in passes(data.rows(position, "train"), data.setup.evaluation_batch):
        x, y = batch(data, rows, task)
        for what, given in (("features", x), ("labels", y)):
            if not _finite(given):
                return f"the client's {what} have NaN or infinity in them. Correct the data."
        held = clone({**task.given, **weights})
        with generators.lent(), task.python_state.fresh(), task.tensors.replaced(held), Masked(NO_KEY):
            output = task.module(x)
            loss = task.batch_loss(output, y)
        if not _finite(output):
            return f"the model{defined_at(task.module)} gives NaN or infinity for finite features."
        if not _finite(loss):
            return f"the loss{defined_at(task.loss)} is {loss.item()} for finite outputs of the model."
    return ""


def _finite(values: Any) -> bool:
    return all(bool(torch.isfinite(leaf).all()) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
