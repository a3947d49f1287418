"""Leaves out of a round the clients whose changes are far longer than the others'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.aggregation.outliers import outliers
from fedloom.errors import RoundAbandoned
from fedloom.federation.work import ClientWork, Outcome

if TYPE_CHECKING:
    from fedloom.federation.cohort import Cohort


def without_outliers(cohort: Cohort, work: ClientWork, outcome: Outcome) -> Outcome:
    """Return the outcome without clients whose changes are far longer than the others'.

    A sum cannot be taken apart, so the others compute again. A network's backend keeps all answers and judges them
    itself: it says in `outliers` which clients it left out, and its reports have no lengths.
    """
    if outcome.left_out:
        cohort.left_out += outcome.left_out
        cohort.note(not_finite=len(cohort.left_out))
    found = list(outcome.outliers)
    judged = [report for report in outcome.reports if report.finite and report.lengths]
    if cohort.outlier_factor is not None:
        examples = [report.examples for report in judged]
        far = outliers([report.lengths for report in judged], examples, cohort.outlier_factor)
        found += [judged[position].client for position in far]
        if far:
            left = [n for n, client in enumerate(work.ids) if client not in found]
            outcome = cohort.backend.run(work.only(left)) if left else Outcome()
    if found:
        cohort.outliers += found
        cohort.note(outliers=len(cohort.outliers))
        if len(outcome.reports) < max(cohort.needed, 1):
            raise RoundAbandoned(f"Round {cohort.round} has {len(outcome.reports)} clients of {cohort.needed}.")
    return outcome
