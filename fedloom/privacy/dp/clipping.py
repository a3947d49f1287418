"""Bounds how far one client moves a sum: its whole change is scaled down to a norm of at most C.

The norm is that of all floating-point leaves of all groups together. C is a number, or follows the median of the
clients' norms (Andrew et al. 2021).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedloom.errors import InputError
from fedloom.tree import Groups, is_whole, scale

QUANTILE = 0.5  # γ: the share of clients whose change should be shorter than C
RATE = 0.2  # η of C's geometric steps
START = 0.1  # an adaptive C before the first round
COUNT = "within"  # the group of b_i − ½, where b_i says whether a change was short enough
SMALLEST = 1e-12  # avoids a division by zero


def joint_norm(changes: Groups) -> Tensor:
    """Return the norm of each client's whole change, over all groups; the changes are stacked."""
    leaves = [leaf for group in changes.values() for leaf in group.values() if not is_whole(leaf)]
    squares = [leaf.to(torch.float64).square().reshape(len(leaf), -1).sum(1) for leaf in leaves]
    return torch.stack(squares).sum(0).sqrt()


def clip_jointly(changes: Groups, most: float) -> tuple[Groups, Tensor]:
    """Return the stacked changes with norms of at most `most`, and which ones were short enough before.

    Each change is scaled by min(1, C / max(norm, 1e-12)). One that is not finite counts as too long and becomes zero:
    it must not decide what everybody sees.

    >>> clipped, within = clip_jointly({"model": {"w": torch.tensor([[3.0, 4.0], [0.0, 0.5]])}}, 1.0)
    >>> clipped["model"]["w"], within
    (tensor([[0.6000, 0.8000], [0.0000, 0.5000]]), tensor([False,  True]))
    """
    norms = joint_norm(changes)
    sound = norms.isfinite()
    # rounding to the leaves' precision could make a change longer than C by its last bit
    factor = (most * (1 - 1e-6) / norms.clamp(min=SMALLEST)).clamp(max=1.0)
    factor = torch.where(norms <= most, 1.0, factor)
    finite = {
        group: {name: torch.where(_rows(sound, leaf), _single(leaf), 0) for name, leaf in leaves.items()}
        for group, leaves in changes.items()
    }
    clipped = {group: scale(leaves, torch.where(sound, factor, 0.0)) for group, leaves in finite.items()}
    return clipped, sound & (norms <= most)


def _single(leaf: Tensor) -> Tensor:
    """Return a leaf in at least single precision: half precision would round a change to one that is longer."""
    return leaf.float() if leaf.dtype in (torch.float16, torch.bfloat16) else leaf


def _rows(values: Tensor, leaf: Tensor) -> Tensor:
    return values.reshape(-1, *(1 for _ in leaf.shape[1:]))


def indicator_deviation(expected_cohort: float) -> float:
    """Return σ_b, the standard deviation of the noise on the count of short changes: a twentieth of the cohort."""
    return expected_cohort / 20


def change_multiplier(z: float, expected_cohort: float) -> float:
    """Return the noise multiplier of the changes beside a noisy count of short ones: (z⁻² − (2 σ_b)⁻²)^(−½).

    Both releases together then cost what one release with noise multiplier z costs.
    """
    inverse = z**-2 - (2 * indicator_deviation(expected_cohort)) ** -2
    if inverse <= 0:
        raise InputError(
            f'[privacy] dp clip = "adaptive" needs more clients in a round than 10 × the noise multiplier {z:.3g}, and '
            f"{expected_cohort:g} are expected. Give clip a number, or draw more clients."
        )
    return float(inverse**-0.5)


def next_clip(clip: float, noisy_count: float, expected_cohort: float) -> float:
    """Return the next C: C · exp(−0.2 (b̃ − γ)).

    `noisy_count` is Σ(b_i − ½) with its noise, where b_i says whether a client's change was at most C long; b̃ is the
    share of such clients that follows from it.
    """
    share = noisy_count / expected_cohort + 0.5
    return clip * math.exp(-RATE * (share - QUANTILE))
