"""What clients could not do, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedloom.errors import TrainingError
from fedloom.network.protocol.messages import SPENT, Failure

ONLY_THE_SITE = "Where a site's privacy budget is spent, serving again does not help unless the site raises it."


def reasons_of(failures: Mapping[int, Failure], name: Callable[[int], str]) -> str:
    """Say how many clients failed or refused, which was the first, and why; errors come before refusals."""
    if not failures:
        return ""
    first = min(failures, key=lambda client: (failures[client].kind, client))
    failed = sum(failure.kind == "error" for failure in failures.values())
    counts = f"Clients that failed: {failed}, refused or rejected: {len(failures) - failed}"
    advice = f" {ONLY_THE_SITE}" if SPENT in (failure.message for failure in failures.values()) else ""
    return f"{counts}.{advice} The first is '{name(first)}': {failures[first].message}"


def nobody_could_work(round: int, failures: Mapping[int, Failure], name: Callable[[int], str]) -> TrainingError:
    """Return the error that ends a run in which every client failed."""
    all_spent = all(failure.message == SPENT for failure in failures.values())
    advice = "" if all_spent else " Correct the cause, and serve the same file to continue."
    return TrainingError(f"Round {round}: no client could do its work.{advice} {reasons_of(failures, name)}")
