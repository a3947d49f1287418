"""Finds weights that clients send without saying where they started, so that they would be judged as changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedloom.errors import TrainingError
from fedloom.tree import Groups, Tree, is_whole

NEAR = 0.5  # of the length of what was shared: a change that is as close to it is a position


def undeclared(groups: Groups, positions: Mapping[str, str], shared: Groups) -> dict[str, str]:
    """Return groups that are no positions, but lie near a group that was shared: group → the shared group.

    `groups` are stacked over clients. A client may be anywhere, so their mean is compared. Once a group
    is declared, what it started from is known to be the weights, and only those are compared: SCAFFOLD's changes of
    control variates may lie near the control variates themselves.

    >>> w = torch.tensor([1.0, 2.0])
    >>> undeclared({"model": {"w": w[None] + 0.1}, "drift": {"w": w[None] * 0.1}}, {}, {"model": {"w": w}})
    {'model': 'model'}
    """
    found = {}
    weights = {base: shared[base] for base in positions.values()} or shared
    for group in (group for group in groups if group not in positions):
        mean = {name: leaf.mean(0) for name, leaf in groups[group].items() if not is_whole(leaf)}
        base = next((base for base, leaves in weights.items() if _is_near(mean, leaves)), None)
        if base is not None:
            found[group] = base
    return found


def refuse_undeclared(what: str, groups: Groups, positions: Mapping[str, str], shared: Groups) -> None:
    """Raise if something that judges changes gets weights instead."""
    for group, base in undeclared(groups, positions, shared).items():
        raise TrainingError(f"{what} needs changes. {declare(group, base)}")


def declare(group: str, base: str) -> str:
    """Say how to declare a position."""
    return (
        f"Clients send '{group}', which lies near what was shared as '{base}', so it seems to be weights and no change "
        f'of them: give positions={{"{group}": "{base}"}} to its Update.'
    )


def _is_near(mean: Tree, base: Tree) -> bool:
    if not mean or any(name not in base or base[name].shape != leaf.shape for name, leaf in mean.items()):
        return False
    lengths = (torch.stack([base[n].norm().double(), (leaf - base[n]).norm().double()]) for n, leaf in mean.items())
    length, apart = torch.stack(list(lengths)).norm(dim=0).tolist()
    return bool(apart < NEAR * length)
