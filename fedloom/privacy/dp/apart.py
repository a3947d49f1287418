"""Refuses a model that mixes the examples of a batch, before it trains with differential privacy of examples.

Noise is made for the gradient of one example, whose length is limited. If that gradient depends on other examples, one
example changes the gradients of all, and ε would be wrong without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fedloom import keys
from fedloom.errors import InputError
from fedloom.task import Task
from fedloom.training import generators
from fedloom.training.modules import load
from fedloom.tree import Tree

MANY = 5  # examples in a trial
CLOSE = 1e-4  # of a gradient's length, which other examples do not change
CLOSE_IN_SIZE = 0.02  # the same where a batch has another size: numbers may be rounded otherwise, such as bfloat16
_APART: WeakSet[nn.Module] = WeakSet()  # modules that were tried


def check_apart(task: Task, module: Any, x: Tensor, y: Tensor) -> None:
    """Raise `InputError` if the gradient of an example depends on the others in its batch.

    `module` gives gradients of single examples, and is changed. `x` and `y` are some examples and their labels: the
    values of `x` are used only if the model takes no made-up ones.
    """
    if task.module in _APART:
        return
    for one, others, unlike in _batches(x):
        try:
            mixes = _mixes(task, module, one, others, unlike, y)
        except Exception:
            continue  # it does not take such numbers; what no example passes is refused by training itself
        if mixes:
            raise InputError(
                "[privacy] example_dp cannot train this model: in its forward, what an example gives depends on the "
                "other examples of its batch, such as by a mean, a softmax or a sort over dimension 0. One example "
                "would change the gradients of all, and ε would be wrong. Take such a step over the features of each "
                "example (dim=1 or -1)."
            )
        _APART.add(task.module)
        return


def _batches(x: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield an example, others, and quite different others: made up, and then real ones."""
    shape = (2 * MANY, *x.shape[1:])
    if x.is_floating_point():
        made = torch.from_numpy(keys.generator(keys.key(0, "apart")).normal(size=shape)).to(x)
    else:
        made = torch.zeros(shape, dtype=x.dtype, device=x.device)  # numbers of words or categories
        made[MANY:] = 1
    yield made[:1], made[1:MANY], 3 * made[MANY:-1] if x.is_floating_point() else made[MANY:-1]
    if len(x) > 1:
        yield x[:1], x[1:MANY], x[:1].expand(len(x[1:MANY]), *x.shape[1:])


def _mixes(task: Task, module: Any, one: Tensor, others: Tensor, unlike: Tensor, y: Tensor) -> bool:
    def first(more: Tensor, seed: int = 0) -> Tensor:
        return _gradient_of_first(task, module, torch.cat([one, more]), y[:1], seed)

    with generators.lent(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        usual = first(others)
        if not usual.isfinite().all() or not usual.any():
            raise ValueError("such a gradient shows nothing")
        if _differ(usual, first(unlike), CLOSE):
            return True
        if _differ(usual, first(others, seed=1), CLOSE):
            return False  # a batch of another size draws other numbers
        return any(_differ(usual, first(others[:size]), CLOSE_IN_SIZE) for size in (0, 1))


def _gradient_of_first(task: Task, module: Any, x: Tensor, label: Tensor, seed: int) -> Tensor:
    """Return the gradient of the first example of a batch, as one long vector."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    held = {path.removeprefix("_module."): leaf for path, leaf in held.items()}
    start: Tree = {**task.given, **task.initial()}
    load(held, start)
    leaves: list[Any] = [held[path] for path in task.trainable]
    for leaf in leaves:
        leaf.grad = leaf.grad_sample = None
    generators.seed(seed)
    module.train()
    with torch.enable_grad():
        loss = task.batch_loss(module(x.clone()), label.expand(len(x), *label.shape[1:])) * len(x)
        loss.backward()  # type: ignore[no-untyped-call]
    found = [leaf.grad_sample[0].flatten().double() for leaf in leaves if leaf.grad_sample is not None]
    for leaf in leaves:
        leaf.grad = leaf.grad_sample = None
    return torch.cat(found)


def _differ(one: Tensor, two: Tensor, close: float) -> bool:
    return len(one) != len(two) or bool((one - two).norm() > close * torch.maximum(one.norm(), two.norm()))
