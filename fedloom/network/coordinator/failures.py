"""What clients could not do, in words."""

from __future__ import annotations

from collections.abc import Mapping

from fedloom.errors import TrainingError
from fedloom.network.protocol.messages import Failure


def reasons_of(failed_clients: Mapping[int, Failure]) -> str:
    """Say how many clients failed or refused, and why the first one did; errors come before refusals."""
    failures = sorted(failed_clients.values(), key=lambda failure: failure.kind)
    if not failures:
        return ""
    failed = sum(failure.kind == "error" for failure in failures)
    refused = len(failures) - failed
    return f"Clients that failed: {failed}, refused or rejected: {refused}. The first reason: {failures[0].message}"


def nobody_could_work(round: int, reasons: str) -> TrainingError:
    """Return the error that ends a run in which every client failed."""
    what = f"Round {round}: no client could do its work"
    return TrainingError(f"{what}. Correct the cause, and serve the same file to continue. {reasons}")
