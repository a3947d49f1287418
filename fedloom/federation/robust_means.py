"""Means over clients in which a robust rule judges what each client changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.aggregation.positions import refuse_undeclared
from fedloom.aggregation.robust import finite, judge
from fedloom.errors import TrainingError
from fedloom.tree import Groups, change, select

if TYPE_CHECKING:
    from fedloom.federation.cohort import Answers, Cohort, Rule


def robust_means(
    cohort: Cohort, answers: Answers, shared: Groups, rule: Rule, judge_all: bool
) -> tuple[Groups, dict[str, Tensor]]:
    """Return what the rule makes of each group, and the sums of weights: see `Cohort.combine`."""
    if answers.positions is None:
        raise TrainingError(
            f"Round {cohort.round}: a robust rule needs to know which groups of an update are positions, and the "
            "backend could not find that out (its log says why)."
        )
    if cohort.round == 1:
        refuse_undeclared("A robust rule", answers.groups, answers.positions, shared)
    bases = {group: select(shared[base], answers[group]) for group, base in answers.positions.items()}
    changes = {g: change(stacked, bases[g]) if g in bases else stacked for g, stacked in answers.groups.items()}
    gone, sound = len(cohort.left_out), _keep_finite(cohort, changes, answers.weights)
    found = {
        group: judge(rule, stacked, answers.weights[group], sound, gone, bases.get(group), judge_all)
        for group, stacked in changes.items()
    }
    weights = {group: weight[sound].sum() for group, weight in answers.weights.items()}
    return found, weights


def _keep_finite(cohort: Cohort, groups: Groups, weights: dict[str, Tensor]) -> Tensor:
    """Continue the round without the clients whose answers are not finite; return which ones stay."""
    each = [finite(stacked) for stacked in groups.values() if stacked]
    sound = torch.stack([*each, *(weight.isfinite() for weight in weights.values())]).all(0)
    gone = [client for client, good in zip(cohort.ids, sound.tolist(), strict=True) if not good]
    if gone:
        cohort.left_out += gone
        cohort.note(not_finite=len(cohort.left_out))
        cohort.own.undo(gone)
        cohort.ids = tuple(client for client in cohort.ids if client not in gone)
    return sound
