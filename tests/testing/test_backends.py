"""The stand-ins for processes and agents give the bits of the serial backend."""

import pytest

from fedloom.algorithms import FedAvg, Scaffold
from fedloom.backends.serial import Serial
from fedloom.federation.engine import fit
from fedloom.federation.work import Place
from fedloom.task import Task
from fedloom.testing.backends import InAgents, InProcess
from tests.conftest import Dense, facts, federation

DATA, TASK = federation((9, 14, 6)), Task(Dense)


@pytest.mark.parametrize("algorithm", [FedAvg(lr=0.5), Scaffold(lr=0.5)], ids=["fedavg", "scaffold"])
@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2), (1, 7)])
def test_ranges_of_clients_give_the_serial_bits_wherever_they_are_cut(algorithm: FedAvg, cuts: tuple[int, ...]) -> None:
    serial = Serial(DATA, TASK)
    expected = [facts(record) for record in fit(DATA, TASK, algorithm, 2, backend=serial)]
    backend = InProcess(Place(DATA, TASK, serial.setup), cuts)
    assert [facts(record) for record in fit(DATA, TASK, algorithm, 2, backend=backend)] == expected


@pytest.mark.parametrize("algorithm", [FedAvg(lr=0.5), Scaffold(lr=0.5)], ids=["fedavg", "scaffold"])
def test_agents_that_answer_for_one_client_each_give_the_serial_bits(algorithm: FedAvg) -> None:
    serial = Serial(DATA, TASK)
    expected = [facts(record) for record in fit(DATA, TASK, algorithm, 2, backend=serial)]
    backend = InAgents(Place(DATA, TASK, serial.setup))
    assert [facts(record) for record in fit(DATA, TASK, algorithm, 2, backend=backend)] == expected
