"""The gradient of a client's mean loss over all its training examples, for algorithms that need it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.errors import InputError
from fedloom.task import Task
from fedloom.training import generators
from fedloom.training.clients import Clients
from fedloom.training.correction import with_zeros
from fedloom.training.finite_loss import check_finite
from fedloom.training.local import gradient_of, passes_over
from fedloom.training.modules import load
from fedloom.training.training_rows import training_rows
from fedloom.tree import Tree, row, stack


@dataclass(frozen=True)
class FullGradient:
    """Every client's gradient over all its examples, its loss, and its buffers afterwards, stacked."""

    gradient: Tree
    losses: Tensor
    buffers: Tree


def full_gradient(task: Task, data: Clients, weights: Tree) -> FullGradient:
    """Compute the gradient of every client's mean training loss at its row of `weights`."""
    if not data.setup.loss_is_mean:
        raise InputError(
            "A full gradient is a mean over examples, but this loss is not: its value for a batch is not the mean of "
            'its values for each example. Use a loss that is such a mean, or fedavg with batch_size = "full".'
        )
    gradients, losses, buffers = [], [], []
    tensors = task.tensors
    task.module.train()
    leaves = {name: tensors.parameters[name] for name in task.trainable}
    for position in range(len(data)):
        load(tensors.own, {**task.given, **row(weights, position)})
        rows = training_rows(data, position)
        passes = passes_over(task, data, position, rows, step=0)
        try:
            with generators.lent(), task.python_state.fresh(), tensors.replaced(tensors.own):
                loss, gradient = gradient_of(task, passes, len(rows), leaves)
            check_finite(loss.item(), task, data, position, weights)
        except Exception as error:
            raise data.blame(error, "its full gradient", position) from error
        gradients.append(with_zeros(gradient, leaves))
        losses.append(loss.item())
        buffers.append({name: tensors.own[name].clone() for name in weights if name not in task.trainable})
    return FullGradient(stack(gradients), torch.tensor(losses, dtype=task.torch_dtype), stack(buffers))
