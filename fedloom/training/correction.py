"""An algorithm's correction of the gradient: what its `correct` hook sees of one local step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedloom.errors import InputError, TrainingError
from fedloom.task import Task
from fedloom.training.batch_view import Batch, Passes
from fedloom.tree import Groups, Tree, clone
from fedloom.user_code import kind_of, named, wrong_return

if TYPE_CHECKING:
    from fedloom.training.local import StepTensors


@dataclass(frozen=True)
class Step:
    """What an algorithm's `correct` hook sees of one local step. All tensors belong to one client."""

    grad: Tree
    params: Tree
    start: Tree  # the weights that this client began the round with
    grad_at: Callable[[Tree], Tree]  # returns the gradient of the same batch at other weights
    seen: Batch | None = None

    @property
    def batch(self) -> Batch:
        """The batch, and what the model makes of it at any weights; for algorithms that declare `reads_batch`."""
        if self.seen is None:
            raise InputError(
                "`step.batch` is only for algorithms with `reads_batch = True`, whose clients are trained one by one. "
                "With differential privacy of examples, there is no such look at a batch."
            )
        return self.seen


Correct = Callable[[Step, Groups, Groups], Tree]


def reads_batch(correct: Correct | None) -> bool:
    """Whether the algorithm of a `correct` hook declares that the hook looks at the batch itself."""
    return bool(getattr(getattr(correct, "__self__", None), "reads_batch", False))


def corrected(
    correct: Correct,
    task: Task,
    tensors: StepTensors,
    buffers: Tree,
    passes: Passes,
    gradient_at: Callable[[Mapping[str, Tensor]], tuple[Tensor, dict[str, Any]]],
    found: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what a `correct` hook makes of a step's gradient.

    `found` is the gradient, `buffers` are copies from before the step, and `gradient_at` returns the loss of the same
    batch and its gradient with respect to some leaves, which must be in the module.
    """
    leaves = {name: tensors.parameters[name] for name in task.trainable}

    def grad_at(weights: Tree) -> Tree:
        if has_hooks(task.tensors.parameters.values()):
            raise TrainingError("The model has hooks on its parameters, which are not known at other weights.")
        there = {name: weights[name].detach().requires_grad_() for name in task.trainable}
        # only the real step may change buffers: this pass gets copies, which are thrown away
        with task.tensors.replaced({**tensors.parameters, **there, **clone(buffers)}):
            return with_zeros(gradient_at(there)[1], there)

    params = {name: leaf.detach() for name, leaf in leaves.items()}
    seen = Batch(task, tensors.parameters, buffers, passes) if reads_batch(correct) else None
    step = Step(with_zeros(found, leaves), params, tensors.start, grad_at, seen)
    return called(correct, step, tensors.shared, tensors.own)


def called(correct: Correct, step: Step, shared: Groups, own: Groups) -> Tree:
    """Return the gradient that a `correct` hook gives. Raise if it does not fit, or if the hook changed its inputs."""
    given = [step.grad, step.params, step.start, *shared.values(), *own.values()]
    before = [leaf._version for tree in given for leaf in tree.values()]
    found = correct(step, shared, own)
    if not isinstance(found, Mapping):
        needed = "the gradient to use: a dict with a tensor for each leaf of step.grad"
        raise wrong_return(correct, kind_of(found), needed)
    if found.keys() != step.grad.keys():
        extra, missing = sorted(found.keys() - step.grad.keys()), sorted(step.grad.keys() - found.keys())
        what = f"a gradient for '{extra[0]}'" if extra else f"no gradient for '{missing[0]}'"
        raise wrong_return(correct, what, f"one for each of {', '.join(step.grad)}, and for nothing else")
    for name, leaf in step.params.items():
        new = found[name]
        if not isinstance(new, Tensor) or new.shape != leaf.shape or new.dtype != leaf.dtype:
            needed = f"{kind_of(leaf)}, as '{name}' itself"
            raise wrong_return(correct, f"{kind_of(new)} as the gradient of '{name}'", needed)
    after = [leaf._version for tree in given for leaf in tree.values()]
    if after != before:
        sent, kept = ([f"{what}['{group}']" for group in groups] for what, groups in (("shared", shared), ("own", own)))
        groups = ["step.grad", "step.params", "step.start", *sent, *kept]
        names = [f"{group}['{name}']" for group, tree in zip(groups, given, strict=True) for name in tree]
        what = next(name for name, old, new in zip(names, before, after, strict=True) if old != new)
        raise InputError(f"{named(correct)} changes {what} in place. Return a new tree instead.")
    return {name: found[name] for name in step.grad}


def with_zeros(gradient: Mapping[str, Any], leaves: Mapping[str, Tensor]) -> Tree:
    """Return a gradient with zeros for leaves that the batch did not use."""
    return {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in gradient.items()}


def has_hooks(parameters: Iterable[Tensor]) -> bool:
    """Whether functions are registered that see or change gradients of parameters."""
    return any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in parameters)
