"""Where one client at a time is trained: a module and the tensors that a step reads and changes, which never move.

A step is plain autograd code on the module. It is run as it is written, or recorded once and replayed (`tape.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fedloom.errors import TrainingError
from fedloom.task import Task
from fedloom.training import generators, optimizers
from fedloom.training.masking import Masked
from fedloom.training.modules import set_value
from fedloom.training.schedule import Correct, Groups, Job, Step, Training, clip
from fedloom.training.tape import CannotRecord, Sealed, Tape, recorded
from fedloom.tree import Tree, clone, is_whole, row, size

Parts = Callable[[], Iterable[tuple[Tensor, Tensor, Tensor | None]]]  # examples, labels and dropout key of every pass
Layout = tuple[tuple[str, str, tuple[int, ...], torch.dtype, torch.device], ...]  # group, leaf, and what it is like
Built = TypeVar("Built")
SMALL_REST, SMALL_MODEL = 32, 4_000_000  # examples in the last batch of an epoch, and bytes of a model
PREPARED_BYTES = 1_000_000  # how much of an epoch is made ready at once: more would leave the cache


class Tensors(NamedTuple):
    """All that one client's step reads and changes beside the batch."""

    parameters: Tree  # all of the module's, frozen ones too
    buffers: Tree
    begin: Tree
    shared: Groups
    own: Groups
    optimizer: Tree
    loss: Tensor  # the sum of the examples' losses

    def changing(self) -> list[Tensor]:
        """Those that a step may change."""
        parameters = [leaf.detach() for leaf in self.parameters.values()]
        return [*parameters, *self.buffers.values(), *self.optimizer.values(), self.loss]


@torch.enable_grad()
def client_step(
    task: Task, training: Training, correct: Correct | None, at: Tensors, parts: Parts, count: int
) -> Tensor:
    """One step of local training on `count` examples, as a loop in plain torch would do it; returns the loss."""
    module, places = task.module, task.places
    leaves = {name: at.parameters[name] for name in task.trainable}
    buffers = clone(at.buffers) if correct else {}
    own = at.parameters is places.parameters
    with places.settled() if own else places.holding({**at.parameters, **at.buffers}):
        loss, found = gradient_of(module, task, parts, count, leaves)
    if correct is not None:

        def grad_at(weights: Tree) -> Tree:
            if has_hooks(places.parameters.values()):
                raise TrainingError("The model has hooks on its parameters, which are not known at other weights.")
            there = {name: weights[name].detach().requires_grad_() for name in task.trainable}
            # whatever this pass does to buffers is thrown away: only the real step counts
            with places.holding({**at.parameters, **there, **clone(buffers)}):
                return _all(gradient_of(module, task, parts, count, there)[1], there)

        params = {name: leaf.detach() for name, leaf in leaves.items()}
        found = dict(correct(Step(_all(found, leaves), params, at.begin, grad_at), at.shared, at.own))
    gradient = {name: found[name] for name in leaves if found[name] is not None}
    if training.clip is not None:
        gradient = clip(gradient, training.clip)
    with torch.no_grad():
        changed = [leaves[name] for name in gradient]
        optimizers.update(training, list(gradient), changed, list(gradient.values()), at.optimizer)
        at.loss.add_(loss.detach(), alpha=count)
    return loss.detach()


def gradient_of(
    model: Callable[[Tensor], Any], task: Task, parts: Parts, count: int, leaves: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """The loss over `count` examples and its gradient, which is None for what the batch did not use."""
    total: Tensor | None = None
    sums: dict[str, Any] = dict.fromkeys(leaves)
    for x, y, key in parts():
        with nullcontext() if key is None else Masked(key, with_gradient=True):
            loss = task.batch_loss(model(x), y)
            loss = loss if len(y) == count else loss * (len(y) / count)
        for leaf in (*leaves.values(), *task.places.parameters.values()):
            leaf.grad = None
        for name, new in zip(leaves, _backward(loss, list(leaves.values())), strict=True):
            sums[name] = new if sums[name] is None else sums[name] if new is None else sums[name] + new
        total = loss.detach() if total is None else total.to(torch.float64) + loss.detach()
    for leaf in (*leaves.values(), *task.places.parameters.values()):
        leaf.grad = None
    assert total is not None, "a step needs examples"
    return total, sums


def _backward(loss: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    if isinstance(loss, Sealed):  # leaves out copies that `backward` makes
        found: list[Tensor | None] = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    else:
        loss.backward()  # type: ignore[no-untyped-call]
        found = [leaf.grad for leaf in leaves]
    return [g if g is None or g.layout == torch.strided else g.to_dense() for g in found]


def _all(gradient: Mapping[str, Any], leaves: Mapping[str, Tensor]) -> Tree:
    """A gradient with zeros for what was not used."""
    return {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in gradient.items()}


def has_hooks(parameters: Iterable[Tensor]) -> bool:
    """Whether somebody registered functions that see or change gradients of parameters."""
    return any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in parameters)


class Desk:
    """One client's tensors, reused from client to client."""

    def __init__(self, task: Task, training: Training, correct: Correct | None, shared: Layout, own: Layout) -> None:
        self.task, self.training, self.correct = task, training, correct
        self.module = task.module
        parameters, buffers = task.places.parameters, task.places.buffers
        at = {name: parameters[name].detach() for name in task.trainable}
        self.bytes = size(at)
        self.at = Tensors(
            parameters,
            buffers,
            clone(at) if correct else {},
            empty(shared),
            empty(own),
            optimizers.initial_state(training, at, task.trainable),
            torch.zeros((), dtype=torch.float64, device=next(iter(at.values())).device),
        )
        self.tapes: dict[tuple[Any, ...], tuple[Tape | None, list[Tensor]]] = {}  # with their inputs, by shapes
        self.cannot_record = ""  # why there is no tape, where one was tried

    def seat(self, job: Job, position: int) -> None:
        """Lay out everything for one client."""
        self.module.train()
        load(self.module, {**self.task.transient, **row(job.start, position)})
        _copy(self.at.begin, {name: job.start[name][position] for name in self.at.begin})
        for group, tree in self.at.shared.items():
            _copy(tree, job.shared[group])
        for group, tree in self.at.own.items():
            _copy(tree, {name: leaf[position] for name, leaf in job.own[group].items()})
        for name, leaf in self.at.optimizer.items():
            leaf.copy_(job.kept[name][position]) if job.kept else leaf.zero_()
        self.at.loss.zero_()

    def step(self, parts: Parts, count: int) -> Tensor:
        """One step of local training on `count` examples, and its loss."""
        return client_step(self.task, self.training, self.correct, self.at, parts, count)

    def replay(self, tape: Tape, inputs: Sequence[Tensor], columns: Sequence[Sequence[Tensor]], watched: int) -> None:
        """Steps on several batches of one size, by a tape. One of them may be watched: it is also done as written."""
        for number, values in enumerate(zip(*columns, strict=True)):
            for target, value in zip(inputs, values):  # noqa: B905 (a loop that runs hundreds of times a second)
                target.copy_(value)
            if number == watched:
                self.compare(tape, inputs)
            else:
                tape.replay()

    def compare(self, tape: Tape, inputs: Sequence[Tensor]) -> None:
        """Replay a step, and do it as it is written as well: both must give the same."""
        changing = self.at.changing()
        before = {number: leaf.clone() for number, leaf in enumerate(changing)}
        with self.task.python_state.fresh():
            self._step_on(self.at, *(value.clone() for value in inputs))
        done = {number: leaf.clone() for number, leaf in enumerate(changing)}
        for number, leaf in enumerate(changing):
            leaf.copy_(before[number])
        tape.replay()
        for number, leaf in enumerate(changing):  # one by one: a long one must not hide what is wrong with another
            must_agree({0: before[number]}, {0: done[number]}, {0: leaf}, "the recorded step")

    def _step_on(self, at: Tensors, x: Tensor, y: Tensor, *key: Tensor) -> None:
        # a model may change what it is given, and a correction may ask it again
        parts = lambda: [(x.clone() if self.correct else x, y, key[0] if key else None)]  # noqa: E731
        client_step(self.task, self.training, self.correct, at, parts, len(y))

    def tape_for(self, given: Sequence[Tensor], others: Callable[[], Sequence[Tensor]]) -> tuple[Tape | None, Any]:
        """A step on batches like this one as a tape, if it can be recorded and that pays, and where its inputs are.

        The batch is examples, labels and, for models with dropout, a key; `others` is another one of the same shapes.
        """
        if not self.pays(len(given[0])):
            return None, []
        shapes = tuple(value.shape for value in given)
        if shapes not in self.tapes:
            inputs = [value.clone() for value in given]
            self.tapes[shapes] = self._record(inputs, others()), inputs
        return self.tapes[shapes]

    def _record(self, inputs: list[Tensor], others: Sequence[Tensor]) -> Tape | None:
        state = self.task.python_state
        try:
            if has_hooks(self.at.parameters.values()):
                raise CannotRecord("the model has hooks on its parameters")
            with state.fresh(), generators.lent():
                tape = recorded(self._step_on, (self.at, *inputs), inputs, self.at.changing, others)
                if state.changed():
                    raise CannotRecord("the model or the loss keeps something in Python from one call to the next")
            return tape
        except CannotRecord as reason:
            self.cannot_record = str(reason)
            return None

    def pays(self, count: int) -> bool:
        """Whether steps on so many examples are recorded: each size has a tape of its own, and each takes memory.

        Full batches are; what is left at the end of an epoch only if both it and the model are small.
        """
        return count == self.training.batch_size or (count <= SMALL_REST and self.bytes <= SMALL_MODEL)

    def take_loss(self) -> float:
        """The sum of the examples' losses since this was last asked."""
        total = float(self.at.loss.item())
        self.at.loss.zero_()
        return total


def must_agree(
    before: Mapping[Any, Tensor],
    plain: Mapping[Any, Tensor],
    found: Mapping[Any, Tensor],
    what: str,
    tolerance: float = 1e-3,
) -> None:
    """Stop where a faster way gave something else than the step as it is written, by more than rounding."""
    apart = moved = largest = 0.0
    for name, was in before.items():
        wanted, got = plain[name], found[name]
        if is_whole(wanted):
            apart += 0.0 if torch.equal(wanted, got) else torch.inf
            continue
        precision = torch.finfo(wanted.dtype).eps
        same = (got == wanted) | (got.isnan() & wanted.isnan())  # infinities, as masks have them
        off, step = (got - wanted).masked_fill(same, 0.0), (wanted - was).masked_fill(wanted == was, 0.0)
        apart += float(off.abs().double().square().sum())
        moved += float(step.abs().double().nan_to_num(0.0, 0.0).square().sum())
        size = wanted.abs().double().nan_to_num(0.0, 0.0).square().sum()
        largest += float(size) * (64 * precision) ** 2 + precision**2
    if not apart**0.5 <= tolerance * moved**0.5 + largest**0.5:
        raise TrainingError(
            f"{what} gave something else than the step as it is written: {apart**0.5:.3g} apart, where the step is "
            f"{moved**0.5:.3g} long. The results would be wrong, so the run stops: please report the model, and run it "
            "with [run] replay = false and group = 1."
        )


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


@torch.no_grad()
def load(module: nn.Module, weights: Tree) -> None:
    """Weights into a module, in place."""
    for name, leaf in (*module.named_parameters(), *module.named_buffers()):
        if name in weights:
            set_value(leaf, weights[name])


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
