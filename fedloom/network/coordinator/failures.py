"""What clients could not do, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedloom.errors import TrainingError
from fedloom.network.protocol.messages import Failure


def reasons_of(failures: Mapping[int, Failure], name: Callable[[int], str]) -> str:
    """Say how many clients failed or refused, which was the first, and why; errors come before refusals."""
    if not failures:
        return ""
    first = min(failures, key=lambda client: (failures[client].kind, client))
    failed = sum(failure.kind == "error" for failure in failures.values())
    counts = f"Clients that failed: {failed}, refused or rejected: {len(failures) - failed}"
    return f"{counts}. The first is '{name(first)}': {failures[first].message}"


def nobody_could_work(round: int, reasons: str) -> TrainingError:
    """Return the error that ends a run in which every client failed."""
    what = f"Round {round}: no client could do its work"
    return TrainingError(f"{what}. Correct the cause, and serve the same file to continue. {reasons}")
