"""What recorded steps and lanes have in common: trainers that are reused, and the check against the plain step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedloom.errors import TrainingError
from fedloom.training.clients import Clients
from fedloom.training.schedule import TrainingJob
from fedloom.tree import Groups, is_whole

MOST_TRAINERS = 16  # that are kept; each holds a model, or several
WATCHED = 512  # one of this many trainings of a client has a step that is also computed the plain way

Built = TypeVar("Built")
_trainers: OrderedDict[Any, Any] = OrderedDict()  # the one used last is last


def reused(kind: Callable[..., Built], job: TrainingJob, build: Callable[[], Built], *facts: Any) -> Built:
    """Return the trainer that an earlier job of the same kind built, or build one: recording takes time."""
    # methods of equal algorithms are not equal, but their objects and code are; a worker process gets the function of a
    # class of your own file again in every round
    function = getattr(job.correct, "__func__", None)
    correct = getattr(job.correct, "__self__", None), getattr(function, "__code__", function or job.correct)
    groups = (_layout(job.shared), _layout(job.own, stacked=True)) if job.correct else ()
    weights = _layout({"model": job.start}, stacked=True)
    key = (kind, job.task, job.training, *correct, weights, groups, *facts)
    try:
        found: Built | None = _trainers.pop(key, None)
    except TypeError:  # an algorithm with a list or dict among its fields cannot be looked up
        return build()
    found = build() if found is None else found
    _trainers[key] = found
    if len(_trainers) > MOST_TRAINERS:
        _trainers.popitem(last=False)
    return found


def forget_trainers() -> None:
    """Free the memory of all trainers."""
    _trainers.clear()


def _layout(groups: Groups, stacked: bool = False) -> tuple[Any, ...]:
    """Return names, shapes and kinds of all leaves; of one client's if they are stacked."""
    return tuple(
        (group, name, tuple(leaf.shape[stacked:]), leaf.dtype, leaf.device)
        for group, tree in groups.items()
        for name, leaf in tree.items()
    )


@torch.no_grad()
def load_shared(target: Groups, job: TrainingJob) -> None:
    """Copy what the server sent into tensors that are reused."""
    for group, tree in target.items():
        for name, leaf in tree.items():
            leaf.copy_(job.shared[group][name])


def watched_step(data: Clients, position: int, steps: int) -> int:
    """Return the step of this training that is also computed the plain way. For most trainings it is −1: none."""
    drawn = data.key(position, "watch")
    return (drawn >> 16) % steps if drawn % WATCHED == 0 else -1


def must_agree(
    before: Mapping[Any, Tensor],
    plain: Mapping[Any, Tensor],
    found: Mapping[Any, Tensor],
    what: str,
    tolerance: float = 1e-3,
) -> None:
    """Raise if a faster way gives something else than the plain step, by more than rounding."""
    apart = moved = largest = 0.0
    for name, was in before.items():
        wanted, got = plain[name], found[name]
        if is_whole(wanted):
            apart += 0.0 if torch.equal(wanted, got) else torch.inf
            continue
        precision = torch.finfo(wanted.dtype).eps
        same = (got == wanted) | (got.isnan() & wanted.isnan())  # infinities, which masks have
        off, step = (got - wanted).masked_fill(same, 0.0), (wanted - was).masked_fill(wanted == was, 0.0)
        apart += float(off.abs().double().square().sum())
        moved += float(step.abs().double().nan_to_num(0.0, 0.0).square().sum())
        size = wanted.abs().double().nan_to_num(0.0, 0.0).square().sum()
        largest += float(size) * (64 * precision) ** 2 + precision**2
    if not apart**0.5 <= tolerance * moved**0.5 + largest**0.5:
        raise TrainingError(
            f"{what} gave something else than the plain step: they are {apart**0.5:.3g} apart, and the step is "
            f"{moved**0.5:.3g} long. The results would be wrong, so the run stops. Please report the model, and run it "
            "with [run] replay = false and group = 1."
        )
