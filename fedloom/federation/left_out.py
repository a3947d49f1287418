"""Leaves out of a round the clients whose changes are far longer than the others'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedloom.aggregation.outliers import outliers
from fedloom.aggregation.positions import refuse_undeclared
from fedloom.errors import RoundAbandoned
from fedloom.federation.work import ClientWork, Outcome, means_of
from fedloom.tree import expand

if TYPE_CHECKING:
    from fedloom.federation.cohort import Cohort


def without_outliers(cohort: Cohort, works: Sequence[ClientWork], outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes without clients whose changes are far longer than the others'.

    A sum cannot be taken apart, so the others compute again. A network's backend keeps all answers and judges them
    itself: it says in `outliers` which clients it left out, and its reports have no lengths.
    """
    outcomes = list(outcomes)
    for outcome in outcomes:
        if outcome.left_out:
            cohort.left_out += outcome.left_out
            cohort.note(not_finite=len(cohort.left_out))
    found = [client for outcome in outcomes for client in outcome.outliers]
    judged = [one for outcome in outcomes for one in outcome.reports if one.finite and one.lengths]
    if cohort.outlier_factor is not None and cohort.round == 1 and not cohort.backend.remote:
        _check_positions(works, outcomes)
    if cohort.outlier_factor is not None:
        examples = [report.examples for report in judged]
        far = outliers([report.lengths for report in judged], examples, cohort.outlier_factor)
        found += [judged[position].client for position in far]
        for number, work in enumerate(works if far else ()):
            left = [n for n, client in enumerate(work.ids) if client not in found]
            if len(left) < len(work.ids):
                outcomes[number] = cohort.backend.run(work.only(left)) if left else Outcome()
    if found:
        cohort.outliers += found
        cohort.note(outliers=len(cohort.outliers))
        answered = sum(len(outcome.reports) for outcome in outcomes)
        if answered < max(cohort.needed, 1):
            raise RoundAbandoned(f"Round {cohort.round} has {answered} clients of {cohort.needed}.")
    return outcomes


def _check_positions(works: Sequence[ClientWork], outcomes: Sequence[Outcome]) -> None:
    """Raise if clients send weights as if they were changes: no change is far longer than another then."""
    for work, outcome in zip(works, outcomes, strict=True):
        if outcome.sums and outcome.positions is not None:
            means = {group: expand(mean, 1) for group, mean in means_of(outcome)[0].items()}
            refuse_undeclared("cohort.outlier_factor", means, outcome.positions, work.shared)
