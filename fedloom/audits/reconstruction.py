"""What a single update gives away: the label of its example, and the example itself.

The victim is a client with one example that takes one step from the initial weights, so its update is a gradient. That
is the worst case. The attacker sees the update itself, or the mean over a cohort (secure aggregation), or the update
with noise (differential privacy, if the attacker knows everything but the victim's update).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedloom import keys
from fedloom.audits.membership import Share
from fedloom.data.federation import Federation
from fedloom.errors import InputError
from fedloom.machine import computing
from fedloom.task import Task
from fedloom.training.evaluation import prepare
from fedloom.training.modules import ModuleTensors, load

STEPS, STEP_SIZE = 200, 0.1
VICTIMS, PICTURED = 100, 3  # whose labels and whose examples are recovered
SMALLEST_SIDE = 4  # of a picture: four or nine numbers without names are no picture


@dataclass(frozen=True)
class Reconstruction:
    """What an attacker got from each view of an update: pictures, or the values of columns that have names."""

    pictures: dict[str, list[list[list[float]]]]  # "original" and each view → a picture per victim, between 0 and 1
    values: dict[str, list[list[float]]]  # the same for examples that are no pictures: numbers as the model gets them
    columns: list[str]  # the names of the values
    similarity: dict[str, float]  # the mean correlation with the original; "chance": that of all other examples
    labels: dict[str, Share]  # how often the label was recovered
    guessing: float  # the share of the most frequent class: how often that guess is right
    cohort: int
    noise_multiplier: float


def reconstruct(
    task: Task,
    federation: Federation,
    cohort: int,
    noise_multiplier: float,
    tell: Callable[[int, int], object] = lambda done, pictures: None,
) -> Reconstruction:
    """Attack the updates of some clients; `tell` is called with the pictures that are done, and how many there are."""
    x, y = prepare(federation.x, federation.y, federation.scale, task)
    side, classes, columns = math.isqrt(x[0].numel()), len(federation.classes), _columns(x, federation.features)
    if task.loss != "cross_entropy":  # labels are read from the gradient of its last layer
        raise InputError(f"Only updates of the loss cross_entropy can be attacked here. Got {task.loss!r}.")
    if (side**2 != x[0].numel() and not columns) or not x.is_floating_point() or not classes:
        raise InputError(
            "Only square pictures with one colour and rows of numbers can be reconstructed here, if they have a label. "
            f"An example has the shape {' × '.join(map(str, x.shape[1:])) or '1'}, and there are {classes} classes."
        )
    if federation.preprocessing.untouched:  # the number of a category has no gradient
        raise InputError("Examples with embedded columns cannot be reconstructed here. Leave out 'embed' for it.")
    module, draw = task.build().eval(), torch.Generator().manual_seed(keys.key(federation.seed, "reconstruct") >> 1)
    load(ModuleTensors(module).own, task.whole(task.initial()))
    learnt = [leaf for leaf in module.parameters() if leaf.requires_grad]
    last = max((place for place, leaf in enumerate(learnt) if leaf.shape[:1] == (classes,)), default=None)
    if last is None:
        raise InputError(f"No parameter has a row for each of the {classes} classes, as the last layer should.")
    low, high = float(x.min()), float(x.max())

    def gradients(examples: Tensor, labels: Tensor) -> list[Tensor]:
        loss = task.batch_loss(module(examples), labels)
        return list(torch.autograd.grad(loss, learnt, create_graph=examples.requires_grad))

    def noisy(update: list[Tensor]) -> list[Tensor]:
        clip = torch.cat([leaf.flatten() for leaf in update]).norm()  # the largest clip that shortens nothing
        return [leaf + noise_multiplier * clip * torch.randn(leaf.shape, generator=draw) for leaf in update]

    def invert(seen: list[Tensor]) -> Tensor:
        """Search for the example whose gradient points where the update does (Geiping et al. 2020)."""
        label, target = torch.tensor([label_of(seen[last])]), torch.cat([leaf.flatten() for leaf in seen])
        guess = low + (high - low) * torch.rand(x[:1].shape, generator=draw, dtype=x.dtype)
        optimizer = torch.optim.Adam([guess.requires_grad_()], lr=STEP_SIZE * (high - low))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for _ in range(STEPS):
            found = torch.cat([leaf.flatten() for leaf in gradients(guess, label)])
            (guess.grad,) = torch.autograd.grad(-cosine_similarity(found, target, dim=0), [guess])
            optimizer.step()
            schedule.step()
            guess.data.clamp_(low, high)
        return guess.detach()

    views: dict[str, Callable[[Tensor], list[Tensor]]] = {
        "update": lambda rows: gradients(x[rows[:1]], y[rows[:1]]),
        "secure aggregation": lambda rows: gradients(x[rows], y[rows]),
        "differential privacy": lambda rows: noisy(gradients(x[rows[:1]], y[rows[:1]])),
    }
    cohorts = [torch.randperm(len(y), generator=draw)[:cohort] for _ in range(VICTIMS)]  # the first one is the victim
    victims = torch.stack([rows[0] for rows in cohorts[:PICTURED]])
    pictures, labels = {"original": x[victims]}, {}
    tell(0, len(views) * PICTURED)
    with computing():
        for view, see in views.items():
            right = sum(label_of(see(rows)[last]) == int(y[rows[0]]) for rows in cohorts)
            labels[view] = Share.of(right, VICTIMS)
            found = []
            for rows in cohorts[:PICTURED]:
                found.append(invert(see(rows)))
                tell((len(pictures) - 1) * PICTURED + len(found), len(views) * PICTURED)
            pictures[view] = torch.cat(found)
    similarity = {view: _similarity(each, x[victims]) for view, each in pictures.items()}
    similarity["chance"] = float(np.mean([_similarity(x[victims[:1]], other[None]) for other in x[:VICTIMS]]))
    guessing = float(torch.bincount(y).max()) / len(y)
    values, shown = {}, {}
    for view, each in pictures.items():
        if columns:
            values[view] = each.flatten(1).tolist()
        else:
            shown[view] = ((each - low) / (high - low)).reshape(-1, side, side).tolist()
    return Reconstruction(shown, values, columns, similarity, labels, guessing, cohort, noise_multiplier)


def _columns(x: Tensor, names: Sequence[str]) -> list[str]:
    """Return the names of the numbers of an example; none if it is a picture, perhaps one whose pixels are in a row."""
    side = math.isqrt(x[0].numel())
    if x.dim() != 2 or (not names and side >= SMALLEST_SIDE and side**2 == x.shape[1]):
        return []
    return [*names] or [f"feature {number}" for number in range(1, x.shape[1] + 1)]


def label_of(gradient: Tensor) -> int:
    """Return the label of an example by the gradient of the last layer's bias or weights (Zhao et al. 2020).

    The gradient of cross-entropy by a logit is negative for the label alone.
    """
    return int(gradient.flatten(1).sum(1).argmin() if gradient.dim() > 1 else gradient.argmin())


def _similarity(found: Tensor, originals: Tensor) -> float:
    """Return the mean correlation of examples with their originals."""
    centred = [each.flatten(1) - each.flatten(1).mean(1, keepdim=True) for each in (found, originals)]
    return float(cosine_similarity(centred[0], centred[1], dim=1).mean())
