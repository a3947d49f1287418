"""Local optimisers on stacked parameters: the formulas of torch.optim, with step counts for every lane.

torch.optim cannot count steps per lane, and lanes start and finish at different times. It also cannot work on buffers
that clients use one after another. Every update here is in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.tree import Tree, per_client

if TYPE_CHECKING:
    from fedloom.training.settings import Training

# the running averages that each optimiser keeps per parameter, in addition to the step count
SLOTS: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "nesterov": ("velocity",),
    "adam": ("first", "second"),
    "adamw": ("first", "second"),
    "rmsprop": ("square",),
    "adagrad": ("total",),
    "adadelta": ("square", "delta"),
}
Tensors = list[Tensor]
EPSILON = {"adam": 1e-8, "adamw": 1e-8, "rmsprop": 1e-8, "adagrad": 1e-10, "adadelta": 1e-6}


def slots(training: Training) -> tuple[str, ...]:
    """Return the names of the running averages that an optimiser keeps."""
    momentum = ("velocity",) if training.momentum and training.optimizer in ("sgd", "rmsprop") else ()
    return (*SLOTS[training.optimizer], *momentum, *(("mean",) if training.centered else ()))


def initial_state(training: Training, weights: Tree, trainable: Sequence[str], lanes: int | None = None) -> Tree:
    """Return the state of an optimiser before its first step: zeros, named `slot:parameter`.

    With `lanes`, the weights are stacked and each lane counts its own steps.
    """
    state = {f"{slot}:{name}": torch.zeros_like(weights[name]) for slot in slots(training) for name in trainable}
    if not state:
        return {}
    device, shape = weights[trainable[0]].device, () if lanes is None else (lanes,)
    return {**state, **{f"steps:{name}": torch.zeros(shape, dtype=torch.float32, device=device) for name in trainable}}


def update(
    training: Training,
    names: Sequence[str],
    parameters: Tensors,
    gradients: Tensors,
    state: Tree,
    rate: Tensor | None = None,
) -> None:
    """Take one step, in place, with the parameters that have a gradient (`names`, in their order).

    `state` has a step count per parameter (in lanes, also per lane): parameters that a batch does not use take no step.
    `rate` is the learning rate divided by `training.lr`, one number or one for each lane; None if it never changes.
    """
    before = [] if rate is None else [parameter.clone() for parameter in parameters]
    _step(training, names, parameters, gradients, state)
    # a change of every optimiser is proportional to the learning rate, so a step can be scaled afterwards. A recorded
    # step has the learning rate as a constant
    for parameter, was in zip(parameters, before):  # noqa: B905 (without a rate, nothing is scaled)
        assert rate is not None
        parameter.copy_(was + (parameter - was) * per_client(rate, was))


def _step(training: Training, names: Sequence[str], parameters: Tensors, gradients: Tensors, state: Tree) -> None:
    if training.weight_decay and training.optimizer == "adamw":
        torch._foreach_mul_(parameters, 1 - training.lr * training.weight_decay)
    elif training.weight_decay:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=training.weight_decay))
    if not state:
        torch._foreach_add_(parameters, gradients, alpha=-training.lr)
        return
    lists = [[state[f"{slot}:{name}"] for name in names] for slot in slots(training)]
    steps = [state[f"steps:{name}"] for name in names]
    torch._foreach_add_(steps, 1)
    # a complex number is optimised as two real ones
    real = [_real(tensors) for tensors in (parameters, gradients, *lists)]
    _RULES[training.optimizer](training, real[0], real[1], steps, *real[2:])


def _real(tensors: Tensors) -> Tensors:
    return [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in tensors]


def _momentum(training: Training, parameters: Tensors, gradients: Tensors, steps: Tensors, velocity: Tensors) -> None:
    torch._foreach_mul_(velocity, training.momentum)
    torch._foreach_add_(velocity, gradients)
    torch._foreach_add_(parameters, velocity, alpha=-training.lr)


def _nesterov(training: Training, parameters: Tensors, gradients: Tensors, steps: Tensors, velocity: Tensors) -> None:
    torch._foreach_mul_(velocity, training.momentum)
    torch._foreach_add_(velocity, gradients)
    ahead = torch._foreach_add(gradients, velocity, alpha=training.momentum)
    torch._foreach_add_(parameters, list(ahead), alpha=-training.lr)


def _rmsprop(
    training: Training, parameters: Tensors, gradients: Tensors, steps: Tensors, square: Tensors, *others: Tensors
) -> None:
    torch._foreach_mul_(square, training.rho)
    torch._foreach_addcmul_(square, gradients, gradients, 1 - training.rho)
    denominator = [leaf.clone() for leaf in square]
    if training.centered:
        mean = others[-1]
        torch._foreach_lerp_(mean, gradients, 1 - training.rho)
        torch._foreach_addcmul_(denominator, mean, mean, -1.0)
    torch._foreach_sqrt_(denominator)
    torch._foreach_add_(denominator, training.epsilon or EPSILON["rmsprop"])
    if training.momentum:
        torch._foreach_mul_(others[0], training.momentum)
        torch._foreach_addcdiv_(others[0], gradients, denominator)
        torch._foreach_add_(parameters, others[0], alpha=-training.lr)
    else:
        torch._foreach_addcdiv_(parameters, gradients, denominator, -training.lr)


def _adam(
    training: Training, parameters: Tensors, gradients: Tensors, steps: Tensors, first: Tensors, second: Tensors
) -> None:
    beta1, beta2 = training.beta1, training.beta2
    epsilon = training.epsilon or EPSILON["adam"]
    if steps[0].dim() == 0 and all(parameter.is_contiguous() for parameter in parameters):
        # one pass over the memory instead of a dozen; torch's kernel assumes that gradients are contiguous
        given = [gradient.contiguous() for gradient in gradients]
        for kind in {parameter.dtype for parameter in parameters}:  # it takes one dtype at a time
            chosen = [number for number, parameter in enumerate(parameters) if parameter.dtype == kind]
            lists = [[all_of[n] for n in chosen] for all_of in (parameters, given, first, second, steps)]
            torch._fused_adam_(
                *lists[:4],  # type: ignore[call-overload]
                [],
                lists[4],
                lr=training.lr,
                beta1=beta1,
                beta2=beta2,
                eps=epsilon,
                weight_decay=0.0,  # already in the gradients
                amsgrad=False,
                maximize=False,
            )
        return
    torch._foreach_lerp_(first, gradients, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
    for parameter, mean, square, step in zip(parameters, first, second, steps, strict=True):
        count = step.to(torch.float64)
        step_size, correction = training.lr / (1 - beta1**count), (1 - beta2**count).sqrt()
        denominator = square.sqrt().div_(per_client(correction, square)).add_(epsilon)
        parameter.sub_(mean / denominator * per_client(step_size, mean))


def _adagrad(training: Training, parameters: Tensors, gradients: Tensors, steps: Tensors, total: Tensors) -> None:
    epsilon = training.epsilon or EPSILON["adagrad"]
    torch._foreach_addcmul_(total, gradients, gradients, 1.0)
    denominator = torch._foreach_sqrt(total)
    torch._foreach_add_(denominator, epsilon)
    torch._foreach_addcdiv_(parameters, gradients, denominator, -training.lr)


def _adadelta(
    training: Training, parameters: Tensors, gradients: Tensors, steps: Tensors, square: Tensors, delta: Tensors
) -> None:
    epsilon = training.epsilon or EPSILON["adadelta"]
    torch._foreach_mul_(square, training.rho)
    torch._foreach_addcmul_(square, gradients, gradients, 1 - training.rho)
    ratio = torch._foreach_add(delta, epsilon)
    torch._foreach_sqrt_(ratio)
    denominator = torch._foreach_add(square, epsilon)
    torch._foreach_sqrt_(denominator)
    torch._foreach_div_(ratio, denominator)
    torch._foreach_mul_(ratio, gradients)
    torch._foreach_mul_(delta, training.rho)
    torch._foreach_addcmul_(delta, ratio, ratio, 1 - training.rho)
    torch._foreach_add_(parameters, ratio, alpha=-training.lr)


_RULES: dict[str, Callable[..., None]] = {
    "sgd": _momentum,
    "nesterov": _nesterov,
    "adam": _adam,
    "adamw": _adam,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
}
