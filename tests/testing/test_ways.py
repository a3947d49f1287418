"""The ways to spread clients promise each other's bits, and distances between results are relative."""

import math

import pytest
import torch

from fedloom.algorithms import FedAvg, Scaffold
from fedloom.backends.serial import Serial
from fedloom.federation.engine import RoundRecord, fit
from fedloom.federation.work import Place
from fedloom.task import Task
from fedloom.testing.ways import ONE, PAIRS, InAgents, InProcess, difference, leaf_distance, spread, values_distance
from fedloom.training.probe import probe
from tests.conftest import Cumulative, Dense, facts, federation

DATA = federation((9, 14))


def rounds(lr: float) -> list[RoundRecord]:
    return list(fit(DATA, Task(Dense), FedAvg(lr=lr), 2))


def test_every_way_is_compared_with_one_before_it() -> None:
    known = {ONE}
    for way in spread(probe(DATA, Task(Dense))):
        assert way.like in {"", *known}
        known.add(way.name)
    assert {"all clients together", "the cohort cut after client 1", PAIRS} < known


def test_clients_that_cannot_be_side_by_side_are_only_cut() -> None:
    assert [way.name for way in spread(probe(DATA, Task(Cumulative)))] == [
        "all clients together",
        "the cohort cut after client 1",
    ]


def test_equal_runs_have_no_difference_and_others_are_told_with_the_round() -> None:
    assert difference(rounds(0.5), rounds(0.5)) == ""
    assert difference(rounds(0.5), rounds(0.25)).startswith("round 1 differs in the server's state")


def test_the_distance_of_leaves_is_a_share_of_the_largest_value() -> None:
    one = torch.tensor([1.0, -4.0])
    assert leaf_distance(one, torch.tensor([1.0, -3.0])) == 0.25
    assert leaf_distance(one / 100, torch.tensor([0.01, 0.06])) == pytest.approx(0.1)  # small values count as they are
    assert leaf_distance(torch.zeros(0), torch.zeros(0)) == 0.0


def test_equal_infinities_agree_and_everything_that_cannot_be_compared_is_infinitely_far() -> None:
    infinite = torch.tensor([math.inf, 1.0])
    assert leaf_distance(infinite, infinite.clone()) == 0.0
    assert leaf_distance(torch.ones(2), torch.tensor([1.0, math.nan])) == math.inf
    assert leaf_distance(torch.ones(2), torch.ones(3)) == math.inf


def test_the_distance_of_named_numbers_needs_the_same_names() -> None:
    assert values_distance({"loss": 10.0, "accuracy": 0.5}, {"loss": 9.0, "accuracy": 0.5}) == pytest.approx(0.1)
    assert values_distance({"loss": 1.0}, {"loss": math.nan}) == math.inf
    assert values_distance({"loss": 1.0}, {}) == math.inf
    assert values_distance({}, {}) == 0.0


THREE, TASK = federation((9, 14, 6)), Task(Dense)


@pytest.mark.parametrize("algorithm", [FedAvg(lr=0.5), Scaffold(lr=0.5)], ids=["fedavg", "scaffold"])
@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2), (1, 7)])
def test_ranges_of_clients_give_the_serial_bits_wherever_they_are_cut(algorithm: FedAvg, cuts: tuple[int, ...]) -> None:
    serial = Serial(THREE, TASK)
    expected = [facts(record) for record in fit(THREE, TASK, algorithm, 2, backend=serial)]
    backend = InProcess(Place(THREE, TASK, serial.setup), cuts)
    assert [facts(record) for record in fit(THREE, TASK, algorithm, 2, backend=backend)] == expected


@pytest.mark.parametrize("algorithm", [FedAvg(lr=0.5), Scaffold(lr=0.5)], ids=["fedavg", "scaffold"])
def test_agents_that_answer_for_one_client_each_give_the_serial_bits(algorithm: FedAvg) -> None:
    serial = Serial(THREE, TASK)
    expected = [facts(record) for record in fit(THREE, TASK, algorithm, 2, backend=serial)]
    backend = InAgents(Place(THREE, TASK, serial.setup))
    assert [facts(record) for record in fit(THREE, TASK, algorithm, 2, backend=backend)] == expected
