"""Choose the clock of a run, and the cohort that goes with it: rounds that wait, or arrivals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fedloom.clock.async_clock import AsyncClock
from fedloom.clock.async_cohort import AsyncCohort
from fedloom.clock.clock import Clock
from fedloom.clock.fleet import Fleet
from fedloom.clock.in_flight import InFlight
from fedloom.clock.system import System
from fedloom.clock.timed_cohort import TimedCohort
from fedloom.compression.table import CompressTable
from fedloom.data.federation import Federation
from fedloom.errors import InputError
from fedloom.federation.cohort import Cohort
from fedloom.federation.sampling import Sampling
from fedloom.privacy.table import PrivacyTable
from fedloom.tree import Tree

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm
    from fedloom.backends.protocol import Backend

NEEDS_CLOCK = (
    '[cohort] mode = "async" needs a clock, which says who answers first: add [system], or use `fedloom serve`, where '
    "clients take the time they take."
)


def start(
    fleet: Fleet | None,
    federation: Federation,
    algorithm: Algorithm,
    sampling: Sampling,
    seed: int,
    backend: Backend,
    remembered: Tree | None = None,
) -> Clock | InFlight | None:
    """Return the clock of a cell, if there is a fleet, or else who is in flight, if asynchronous clients are elsewhere.

    The pooled baseline has no clients, so it has no clock.
    """
    clock: Clock | InFlight | None = None
    if algorithm.pooled:
        return None
    if sampling.mode == "async":
        check_async(algorithm)
        clock = AsyncClock(fleet, federation, algorithm, sampling, seed) if fleet else backend.in_flight(seed)
        if clock is None:
            raise InputError(NEEDS_CLOCK)
    elif fleet is not None:
        clock = Clock(fleet, federation, algorithm, sampling, seed)
    if clock is not None and remembered is not None:
        clock.restore(remembered)
    return clock


def cohort_kind(clock: Clock | InFlight | None) -> Callable[..., Cohort]:
    """Return what makes the cohorts of a run with this clock."""
    if clock is None:
        return Cohort
    if isinstance(clock, InFlight):
        return partial(AsyncCohort, clock=clock)
    return partial(TimedCohort, clock=clock)


def check_privacy(system: System | None, sampling: Sampling, privacy: PrivacyTable, compress: CompressTable) -> None:
    """Raise if virtual time would break what [privacy] promises about sums. What clients do by themselves always holds.

    In each round, a client must answer or not whatever the others do: then it changes a sum by its own answer at most.
    """
    if not privacy.on:
        return
    if sampling.mode == "async":
        raise InputError(
            '[cohort] mode = "async" sums the answers of clients that started at different times, and [privacy] '
            'protects sums over clients that start together. Use mode = "sync". What clients do by themselves goes '
            'with both: example_dp, and dp with noise = "local".'
        )
    if system is None:
        return
    if privacy.dp is not None and system.availability != "always":
        raise InputError(
            '[privacy] dp needs [system] availability = "always": one slow client moves the end of a round, and with '
            "it who is available in the next, which no ε covers."
        )
    if privacy.dp is not None and compress.up is not None:
        raise InputError(
            "[privacy] dp goes with [system] only without [compress] up: the size of one client's answer would decide "
            "how long all others take, and so who is late, which no ε covers."
        )


def check_async(algorithm: Algorithm) -> None:
    """Raise if an algorithm's formulas do not hold for answers that started from earlier versions of the state."""
    name = type(algorithm).__name__
    if not algorithm.takes_stale and not algorithm.pooled:
        raise InputError(
            f'[cohort] mode = "async" is not for {name}: its formulas need answers that all start from the same model. '
            "Use it in rounds, or fedavg, fedprox, fedadam, scaffold or fedasync."
        )
    if getattr(algorithm, "rule", None) is not None:
        raise InputError(
            f'[cohort] mode = "async" takes means, and the rule of {name} compares changes from one model. '
            "Leave out the rule."
        )
