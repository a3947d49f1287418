"""With a protection, the server sees means and nothing else."""

from __future__ import annotations

import pytest
import torch

from fedloom.algorithm import Clients, Cohort, Groups, Task, Update
from fedloom.algorithms import FedAvg
from fedloom.backends.serial import Serial
from fedloom.errors import InputError
from fedloom.federation.client_state import ClientStates
from fedloom.federation.sampling import Sampling
from fedloom.privacy.protection import Protection
from fedloom.privacy.table import PrivacyTable, SecureTable
from tests.conftest import Dense, federation


class Telling(FedAvg):
    """Clients make a number public."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, own = super().client(task, shared, own, data)
        return Update(update.groups, update.weight, {"examples": data.examples}, positions=update.positions), own


def cohort(algorithm: FedAvg) -> Cohort:
    data, task = federation((12, 9, 7, 11)), Task(Dense)
    table = PrivacyTable(secure_aggregation=SecureTable())
    protection = Protection(table, Sampling(), 4, 1)
    states = ClientStates(algorithm.init_own(task, task.initial()))
    return Cohort(Serial(data, task), algorithm, task, (0, 1, 2, 3), 4, 1, 0, states, protection=protection)


def test_the_mean_is_that_of_a_plain_round_up_to_rounding() -> None:
    algorithm = FedAvg(lr=0.1, weights="uniform")
    asked = cohort(algorithm)
    shared = {"model": asked.task.initial()}
    found = asked.reduce(algorithm.client, shared)
    asked = cohort(algorithm)
    asked.protection = None
    plain = asked.reduce(algorithm.client, shared)
    for name, leaf in plain["model"].items():
        assert (found["model"][name] - leaf).abs().max() < 1e-6
    assert float(found.weights["model"]) == 4


def test_verbs_that_show_each_answer_are_refused() -> None:
    algorithm = FedAvg(lr=0.1, weights="uniform")
    asked = cohort(algorithm)
    shared = {"model": asked.task.initial()}
    with pytest.raises(InputError, match="only sums, and 'map' shows it each"):
        asked.map(algorithm.client, shared)
    with pytest.raises(InputError, match="only sums, and 'exchange' shows it each"):
        asked.exchange(algorithm.client, shared, torch.ones(4, 4))
    with pytest.raises(InputError, match="only sums, and 'a robust rule' shows it each"):
        asked.reduce(algorithm.client, shared, rule=lambda changes, *_: changes)


def test_a_number_of_a_single_client_is_refused() -> None:
    asked = cohort(Telling(lr=0.1, weights="uniform"))
    with pytest.raises(InputError, match="lets no number of a single client leave, and client makes some public"):
        asked.reduce(asked.algorithm.client, {"model": asked.task.initial()})  # type: ignore[attr-defined]
