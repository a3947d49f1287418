"""Which clock a run has, and which algorithms can be asynchronous."""

from typing import Any

import pytest

from fedloom.algorithms import ALGORITHMS, FedAvg, Pooled
from fedloom.backends.protocol import Backend
from fedloom.clock.async_clock import AsyncClock
from fedloom.clock.async_cohort import AsyncCohort
from fedloom.clock.choice import check_async, check_privacy, cohort_kind, start
from fedloom.clock.clock import Clock
from fedloom.clock.fleet import Fleet
from fedloom.clock.system import System
from fedloom.clock.timed_cohort import TimedCohort
from fedloom.compression.table import CompressTable
from fedloom.errors import InputError
from fedloom.federation.cohort import Cohort
from fedloom.federation.sampling import Sampling
from fedloom.privacy.table import PrivacyTable
from tests.conftest import federation

DATA = federation((5, 5, 5))
FLEET = Fleet.of(System(step=1.0), DATA)
ASYNC = Sampling(mode="async", buffer=1)


def test_a_clock_goes_with_its_cohort() -> None:
    assert start(None, DATA, FedAvg(), Sampling(), 0, Backend()) is None
    assert start(FLEET, DATA, Pooled(), Sampling(), 0, Backend()) is None
    assert start(FLEET, DATA, Pooled(), ASYNC, 0, Backend()) is None
    waiting, flowing = (start(FLEET, DATA, FedAvg(), sampling, 0, Backend()) for sampling in (Sampling(), ASYNC))
    assert type(waiting) is Clock
    assert type(flowing) is AsyncClock
    kinds = [cohort_kind(clock) for clock in (None, waiting, flowing)]
    assert [getattr(kind, "func", kind) for kind in kinds] == [Cohort, TimedCohort, AsyncCohort]


def test_asynchronous_rounds_need_a_fleet() -> None:
    with pytest.raises(InputError, match=r"needs a clock.* add \[system\]"):
        start(None, DATA, FedAvg(), ASYNC, 0, Backend())


def test_which_algorithms_can_be_asynchronous() -> None:
    can = set()
    for name, kind in ALGORITHMS.items():
        try:
            check_async(kind())
            can.add(name)
        except InputError as error:
            assert kind.__name__ in str(error)  # noqa: PT017
    pooled = {"pooled", "svrg"}  # baselines without clients beside them
    averages = {"fedavg", "fedprox", "fedbn", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedasync"}
    personal = {"ditto", "fedrep", "perfedavg", "moon", "local"}
    assert can == pooled | averages | personal | {"scaffold", "evaluation_weighted"}


def test_a_robust_rule_cannot_be_asynchronous() -> None:
    with pytest.raises(InputError, match="the rule of FedAvg compares changes from one model"):
        check_async(FedAvg(rule="median"))


DP = {"epsilon": 8.0, "clip": 1.0}
CYCLE = System(step=1.0, availability={"name": "cycle", "share": 0.5})


@pytest.mark.parametrize(
    ("system", "sampling", "privacy", "compress", "words"),
    [
        (System(), ASYNC, {"secure_aggregation": {}}, {}, r"clients that start together\. Use mode = \"sync\""),
        (System(), ASYNC, {"dp": DP}, {}, r"clients that start together"),
        (CYCLE, Sampling(), {"dp": DP}, {}, r"availability = \"always\": one slow client moves the end of a round"),
        (System(), Sampling(), {"dp": DP}, {"up": "lossless"}, r"only without \[compress\] up: the size of one"),
    ],
)
def test_virtual_time_that_would_break_a_protection_is_refused(
    system: System, sampling: Sampling, privacy: dict[str, Any], compress: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        check_privacy(system, sampling, PrivacyTable(**privacy), CompressTable(**compress))


@pytest.mark.parametrize(
    ("system", "sampling", "privacy", "compress"),
    [
        (System(), Sampling(), {"dp": DP}, {}),
        (CYCLE, Sampling(), {"secure_aggregation": {}}, {"up": {"name": "randomk", "mask": "round"}}),
        (CYCLE, ASYNC, {"dp": {**DP, "noise": "local"}}, {"up": "lossless"}),
        (CYCLE, ASYNC, {"example_dp": {}}, {"up": "lossless"}),
    ],
)
def test_virtual_time_that_a_protection_survives_is_allowed(
    system: System, sampling: Sampling, privacy: dict[str, Any], compress: dict[str, Any]
) -> None:
    check_privacy(system, sampling, PrivacyTable(**privacy), CompressTable(**compress))
