"""Errors in your own code become errors that name the round, the client, the file and the line."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fedloom.errors import FedloomError, TrainingError
from fedloom.tree import Groups
from fedloom.user_code import place_of, said

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm
    from fedloom.federation.cohort import Cohort
    from fedloom.federation.work import ClientWork, Outcome, Place


def server_half(algorithm: Algorithm, state: Groups, cohort: Cohort) -> Groups:
    """Run a round's server half. An error in your own code becomes one that names the round, the file and the line."""
    try:
        return algorithm.round(state, cohort)
    except FedloomError:
        raise
    except Exception as error:
        if not place_of(error):  # a defect of fedloom, which its traceback explains best
            raise
        what = f"Round {cohort.round}, the server's half of {type(algorithm).__name__}"
        raise TrainingError(f"{what}: {said(error)}") from error


def perform_named(work: ClientWork, place: Place) -> Outcome:
    """Perform all clients at once. If that fails, find the client that fails alone, and name it."""
    try:
        return work.perform_together(place)
    except FedloomError:
        raise
    except Exception as error:
        count = len(work.ids)
        alone = replace(place, setup=replace(place.setup, group=1))
        for unit in range(count if count > 1 else 0):
            perform_named(work.part(unit, unit + 1), alone)
        together = f" and {count - 1} others together" if count > 1 else ""
        phase = f"{type(work.algorithm).__name__}.{work.method}{together}"
        raise work.clients(place).blame(error, phase, 0) from error
