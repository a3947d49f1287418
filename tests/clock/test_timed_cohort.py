"""A cohort in virtual time asks the clock before it asks clients."""

from typing import Any

import pytest

from fedloom.algorithms import FedAvg
from fedloom.backends.serial import Serial
from fedloom.clock.clock import Clock
from fedloom.clock.fleet import Fleet
from fedloom.clock.system import System
from fedloom.clock.timed_cohort import TimedCohort
from fedloom.errors import RoundAbandoned
from fedloom.federation.client_state import ClientStates
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from tests.conftest import ALL_TRAIN, Dense, federation


def cohort(needed: int = 0, **sampling: Any) -> TimedCohort:
    data, task, algorithm = federation((10, 30), split=ALL_TRAIN, names=None), Task(Dense), FedAvg(batch_size=10)
    clock = Clock(Fleet.of(System(step=1.0), data), data, algorithm, Sampling(**sampling), seed=0)
    ids = clock.begin(1)
    return TimedCohort(Serial(data, task), algorithm, task, ids, 2, 1, 0, ClientStates({}), needed=needed, clock=clock)


def test_only_clients_in_time_are_asked() -> None:
    found = cohort(deadline="2s")
    mean = found.reduce(found.algorithm.client, {"model": found.task.initial()})  # type: ignore[attr-defined]
    assert found.ids == (0,)
    assert mean.weights["model"] == 10
    assert found.clock.now == 2.0


def test_too_few_in_time_abandon_the_round() -> None:
    found = cohort(needed=2, deadline="2s")
    with pytest.raises(RoundAbandoned, match="Round 1 had 1 answers in time of 2 needed"):
        found.reduce(found.algorithm.client, {"model": found.task.initial()})  # type: ignore[attr-defined]
