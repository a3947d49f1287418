"""Where one client at a time is trained: a module and the tensors that a step reads and changes, which never move.

A step is plain autograd code on the module. It is run as it is written, or recorded once and replayed (`tape.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom import optimizers
from fedloom.course import Correct, Groups, Job, Step, Training, clip
from fedloom.masking import Masked
from fedloom.tape import Tape, recorded
from fedloom.task import Task
from fedloom.tree import Tree, clone, row, size

Parts = Callable[[], Iterable[tuple[Tensor, Tensor, Tensor | None]]]  # examples, labels and dropout key of every pass
Layout = tuple[tuple[str, str, tuple[int, ...], torch.dtype, torch.device], ...]  # group, leaf, and what it is like
Built = TypeVar("Built")
SMALL_REST, SMALL_MODEL = 32, 4_000_000  # examples in the last batch of an epoch, and bytes of a model
PREPARED_BYTES = 1_000_000  # how much of an epoch is made ready at once: more would leave the cache


class Desk:
    """One client's tensors, reused from client to client."""

    def __init__(self, task: Task, training: Training, correct: Correct | None, shared: Layout, own: Layout) -> None:
        self.task, self.training, self.correct = task, training, correct
        self.module = task.module
        named = dict(self.module.named_parameters())
        self.parameters: Tree = {name: named[name] for name in task.trainable}
        at = {name: leaf.detach() for name, leaf in self.parameters.items()}
        self.bytes = size(at)
        self.begin = clone(at) if correct else {}
        self.shared, self.own = empty(shared), empty(own)
        self.state = optimizers.initial_state(training, at, task.trainable)
        self.loss = torch.zeros((), dtype=torch.float64, device=next(iter(at.values())).device)
        self.tapes: dict[tuple[Any, ...], tuple[Tape | None, list[Tensor]]] = {}  # with their inputs, by shapes

    def seat(self, job: Job, position: int) -> None:
        """Lay out everything for one client."""
        self.module.train()
        load(self.module, {**self.task.transient, **row(job.start, position)})
        _copy(self.begin, {name: job.start[name][position] for name in self.begin})
        for group, tree in self.shared.items():
            _copy(tree, job.shared[group])
        for group, tree in self.own.items():
            _copy(tree, {name: leaf[position] for name, leaf in job.own[group].items()})
        for name, leaf in self.state.items():
            leaf.copy_(job.kept[name][position]) if job.kept else leaf.zero_()
        self.loss.zero_()

    @torch.enable_grad()
    def step(self, parts: Parts, count: int) -> Tensor:
        """One step of local training on `count` examples, and its loss."""
        task, training, module = self.task, self.training, self.module
        buffers = clone(dict(module.named_buffers())) if self.correct else {}
        loss, gradient = gradient_of(module, task, parts, count, self.parameters)
        if self.correct is not None:

            def grad_at(weights: Tree) -> Tree:
                at = {name: weights[name].detach().requires_grad_() for name in task.trainable}
                used = clone(buffers)  # whatever this pass does to them is thrown away: only the real step counts
                model = partial(functional_call, module, {**at, **used})
                return gradient_of(lambda x: model((x,)), task, parts, count, at)[1]

            params = {name: leaf.detach() for name, leaf in self.parameters.items()}
            gradient = self.correct(Step(gradient, params, self.begin, grad_at), self.shared, self.own)
        if training.clip is not None:
            gradient = clip(gradient, training.clip)
        with torch.no_grad():
            gradients = [gradient[name] for name in self.parameters]
            optimizers.update(training, task.trainable, list(self.parameters.values()), gradients, self.state)
            self.loss.add_(loss, alpha=count)
        return loss

    def replay(self, *columns: Sequence[Tensor]) -> None:
        """The same for several batches of one size, by replaying a recorded step where this step can be recorded.

        The columns are the batches' examples, their labels and, for models with dropout, their keys.
        """
        tape, inputs = self.tape_for(*(column[0] for column in columns))
        for values in zip(*columns, strict=True):
            if tape is None:
                x, y, *key = values
                self.step(partial(iter, [(x, y, key[0] if key else None)]), len(x))
                continue
            for target, value in zip(inputs, values):  # noqa: B905 (a loop that runs hundreds of times a second)
                target.copy_(value)
            tape.replay()

    def tape_for(self, x: Tensor, y: Tensor, *key: Tensor) -> tuple[Tape | None, list[Tensor]]:
        """A step on batches like this one as a tape, if it can be recorded and that pays, and where its inputs are."""
        if not self.pays(len(x)):
            return None, []
        shapes = (x.shape, y.shape)
        if shapes not in self.tapes:
            inputs = [value.clone() for value in (x, y, *key)]
            part = (inputs[0], inputs[1], inputs[2] if key else None)
            self.tapes[shapes] = recorded(lambda: self.step(lambda: [part], len(x)), inputs, self.changes), inputs
        return self.tapes[shapes]

    def pays(self, count: int) -> bool:
        """Whether steps on so many examples are recorded: each size has a tape of its own, and each takes memory.

        Full batches are; what is left at the end of an epoch only if both it and the model are small.
        """
        return count == self.training.batch_size or (count <= SMALL_REST and self.bytes <= SMALL_MODEL)

    def take_loss(self) -> float:
        """The sum of the examples' losses since this was last asked."""
        total = float(self.loss.item())
        self.loss.zero_()
        return total

    def changes(self) -> list[Tensor]:
        """All tensors that a step may change."""
        inside = [leaf.detach() for leaf in (*self.module.parameters(), *self.module.buffers())]
        return [*inside, *self.state.values(), self.loss]


def desk_for(job: Job) -> Desk:
    """The desk for a job: the one of an earlier job of the same kind, because recording takes a few steps' time."""
    own = {group: {name: leaf[0] for name, leaf in tree.items()} for group, tree in job.own.items()}
    layouts = (layout(job.shared), layout(own)) if job.correct else ((), ())
    return rebuilt(_cached_desk, _desk, job.task, job.training, *parts_of(job.correct), *layouts)


def parts_of(method: Any) -> tuple[Any, Any]:
    """A bound method's object and function: methods of equal algorithms are not equal, but these are."""
    return getattr(method, "__self__", None), getattr(method, "__func__", method)


def rebuilt(cached: Callable[..., Built], build: Callable[..., Built], *parts: Any) -> Built:
    """What was built from the same parts before, if they can be looked up."""
    try:
        return cached(*parts)
    except TypeError:  # an algorithm with a list or dict among its fields cannot
        return build(*parts)


def _desk(task: Task, training: Training, owner: Any, function: Any, shared: Layout, own: Layout) -> Desk:
    return Desk(task, training, function if owner is None else partial(function, owner), shared, own)


_cached_desk = lru_cache(maxsize=16)(_desk)


def forget_desks() -> None:
    """Give back the memory of all desks: each holds a model."""
    _cached_desk.cache_clear()


def ready_together(job: Job, size: int) -> int:
    """How many batches are made ready at a time."""
    example = max(job.data.federation.x[0].numel() * job.task.torch_dtype.itemsize, 1)
    return max(PREPARED_BYTES // example // size, 1)


def gradient_of(
    model: Callable[[Tensor], Any], task: Task, parts: Parts, count: int, at: Mapping[str, Tensor]
) -> tuple[Tensor, Tree]:
    """Mean loss over `count` examples and its gradient."""
    leaves = list(at.values())
    total: Tensor | None = None
    sums: list[Tensor] = []
    for x, y, key in parts():
        with nullcontext() if key is None else Masked(key):
            loss = task.losses(model(x), y).sum() / count
        found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        total = loss.detach() if total is None else total.to(torch.float64) + loss.detach()
        sums = [before + new for before, new in zip(sums, found, strict=True)] if sums else list(found)
    assert total is not None, "a step needs examples"
    return total, dict(zip(at, sums, strict=True))


@torch.no_grad()
def load(module: nn.Module, weights: Tree) -> None:
    """Weights into a module, in place."""
    for name, leaf in (*module.named_parameters(), *module.named_buffers()):
        if name in weights:
            leaf.copy_(weights[name])


def unload(module: nn.Module) -> Tree:
    """The module's own weights: not a copy."""
    persistent = module.state_dict().keys()
    buffers = {name: leaf for name, leaf in module.named_buffers() if name in persistent}
    return {name: leaf.detach() for name, leaf in (*module.named_parameters(), *buffers.items())}


def layout(groups: Groups) -> Layout:
    """What groups are like, without what they hold."""
    return tuple(
        (group, name, tuple(leaf.shape), leaf.dtype, leaf.device)
        for group, tree in groups.items()
        for name, leaf in tree.items()
    )


def empty(layout: Layout) -> Groups:
    """Groups of zeros of that kind."""
    groups: Groups = {}
    for group, name, shape, dtype, device in layout:
        groups.setdefault(group, {})[name] = torch.zeros(shape, dtype=dtype, device=device)
    return groups


@torch.no_grad()
def _copy(target: Tree, source: Tree) -> None:
    for name, leaf in target.items():
        leaf.copy_(source[name])
