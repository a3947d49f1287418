"""Errors in your own code become errors that name the round, the client, the file and the line."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedloom.errors import FedloomError, TrainingError
from fedloom.federation.hidden_state import keeps_nothing
from fedloom.federation.returned import check_answer, check_state
from fedloom.task import Task
from fedloom.training import generators
from fedloom.training.clients import Clients
from fedloom.tree import Groups, Tree
from fedloom.user_code import has_own_class, place_of, said

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm
    from fedloom.federation.cohort import Cohort
    from fedloom.federation.work import ClientWork, Outcome, Place


def server_half(algorithm: Algorithm, state: Groups, cohort: Cohort) -> Groups:
    """Run a round's server half. An error in your own code becomes one that names the round, the file and the line."""
    try:
        with keeps_nothing(algorithm, algorithm.round):
            found = algorithm.round(state, cohort)
        check_state(algorithm.round, found, state)
        return found
    except FedloomError:
        raise
    except Exception as error:
        if not place_of(error):  # a defect of fedloom, which its traceback explains best
            raise
        what = f"Round {cohort.round}, the server's half of {type(algorithm).__name__}"
        raise TrainingError(f"{what}: {said(error)}") from error


def initial_state(algorithm: Algorithm, task: Task, initial: Tree) -> Groups:
    """Return the server's state before the first round."""
    with keeps_nothing(algorithm, algorithm.init):
        state = algorithm.init(task, initial)
    check_state(algorithm.init, state, {})
    return state


def initial_own(algorithm: Algorithm, task: Task, initial: Tree) -> Groups:
    """Return what a client keeps before it first takes part."""
    with keeps_nothing(algorithm, algorithm.init_own):
        own = algorithm.init_own(task, initial)
    check_state(algorithm.init_own, own, {})
    return own


def client_half(work: ClientWork, task: Task, shared: Groups, own: Groups, data: Clients, *extra: Any) -> Any:
    """Have clients run the method of some work, and return their update and what they keep.

    Raise `DrawsTogether` if a method of yours draws for several clients at once.
    """
    method, own_class = getattr(work.algorithm, work.method), has_own_class(work.algorithm)
    with generators.yours(data.key(0, "draws")) if own_class else nullcontext(lambda: False) as drew:
        with keeps_nothing(work.algorithm, method):
            found = method(task, shared, own, data, *extra)
        if len(data) > 1 and drew():
            raise DrawsTogether
    check_answer(method, found, own, len(data))
    return found


class DrawsTogether(Exception):
    """A method drew from a global generator for several clients at once: each must draw by itself."""


def perform_named(work: ClientWork, place: Place) -> Outcome:
    """Perform all clients at once. If that fails, find the client that fails alone, and name it.

    If the method draws, perform one client after the other, so that nobody's draws depend on who computes beside it.
    """
    try:
        return work.perform_together(place)
    except DrawsTogether:
        return work.merge(perform_named(work.part(at, at + 1), place) for at in range(len(work.ids)))
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
