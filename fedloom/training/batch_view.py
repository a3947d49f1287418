"""The batch of a local step as an algorithm may see it: examples, outputs, and features inside the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.errors import InputError, nearest
from fedloom.task import Task
from fedloom.training.masking import Masked
from fedloom.tree import Tree, clone

Passes = Callable[[], Iterable[tuple[Tensor, Tensor, Tensor | None]]]  # examples, labels and dropout key of each pass


@dataclass(frozen=True)
class View:
    """What a model makes of a batch: its output, and what its layers are given."""

    output: Any
    inputs: Mapping[str, Any]  # layer → its input
    last: str  # the last layer with trainable parameters

    def features(self, layer: str = "") -> Tensor:
        """Return the input of a layer, a row for each example. Without a name, it is the model's last layer."""
        found = self.inputs.get(layer or self.last)
        if not isinstance(found, Tensor):
            known = [name for name, given in self.inputs.items() if name and isinstance(given, Tensor)]
            raise InputError(
                f"The model has no layer '{layer or self.last}' that is given a tensor. "
                f"Known: {', '.join(known) or 'none'}.{nearest(layer or self.last, known)}"
            )
        return found.flatten(1) if found.dim() > 2 else found


class Batch:
    """The batch of a step. Every look at it uses copies, the same dropout, and leaves the model as it is."""

    def __init__(self, task: Task, tensors: Mapping[str, Tensor], buffers: Tree, passes: Passes) -> None:
        self._task, self._tensors, self._buffers, self._passes = task, tensors, buffers, passes
        self.x, self.y, self._key = self._read()

    def _read(self) -> tuple[Tensor, Tensor, Tensor | None]:
        (whole,) = self._passes()
        return whole

    def at(self, weights: Tree) -> View:
        """Return what the model makes of the batch with other weights, in evaluation mode and without gradients."""
        return look(self._task, {**self._tensors, **self._buffers, **weights}, self._read()[0])

    def grad_of(self, loss: Callable[[View], Tensor]) -> Tree:
        """Return the gradient of a loss of the view, with respect to the step's trainable weights."""
        trainable = {name: self._tensors[name].detach().requires_grad_() for name in self._task.trainable}
        with torch.enable_grad():
            found = loss(self._forward(trainable))
        if not found.requires_grad:  # it does not depend on the weights, as where there is no layer before the last
            return {name: torch.zeros_like(leaf) for name, leaf in trainable.items()}
        leaves = list(trainable.values())
        gradients = torch.autograd.grad(found, leaves, allow_unused=True, materialize_grads=True)
        return dict(zip(trainable, gradients, strict=True))

    def _forward(self, weights: Tree) -> View:
        x, _, key = self._read()
        # only the step itself may change buffers: this pass gets copies, which are thrown away
        held = {**self._tensors, **clone(self._buffers), **weights}
        with nullcontext() if key is None else Masked(key, with_gradient=True):
            return _viewed(self._task, held, x)


def look(task: Task, weights: Tree, x: Tensor) -> View:
    """Return what a model makes of some examples, in evaluation mode and without gradients.

    Examples with decimals are taken in the precision of the task.
    """
    x = x.to(task.torch_dtype) if x.is_floating_point() else x
    module = task.module.eval()
    try:
        with torch.no_grad():
            return _viewed(task, clone({**task.given, **weights}), x)
    finally:
        module.train()


def _viewed(task: Task, tensors: Mapping[str, Tensor], x: Tensor) -> View:
    with task.tensors.replaced(tensors), _noting_inputs(task) as inputs:
        output = task.module(x)
    return View(output, inputs, task.trainable[-1].rpartition(".")[0])


@contextmanager
def _noting_inputs(task: Task) -> Iterator[dict[str, Any]]:
    """Note what every layer is given while the model computes."""
    inputs: dict[str, Any] = {}

    def note(name: str, _: Any, given: tuple[Any, ...]) -> None:
        inputs[name] = given[0] if given else None

    hooks = [part.register_forward_pre_hook(partial(note, name)) for name, part in task.module.named_modules()]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
