"""Rounds in which not everybody answers: who is left, what it changes, and when a round does not count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom import tree
from fedloom.algorithms import ALGORITHMS
from fedloom.backends.serial import Serial
from fedloom.errors import RoundAbandoned
from fedloom.federation.client_state import ClientStates
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import ClientWork, Outcome, Work
from fedloom.task import Task
from tests.conftest import Dense
from tests.conftest import federation as some_clients

QUIET = Evaluation(splits=())


class Losing(Serial):
    """A backend that loses some clients on the way, as a network does."""

    def __init__(self, *given: Any, lost: dict[tuple[int, int], set[int]], needed: int = 1) -> None:
        super().__init__(*given)
        self.lost, self.needed = lost, needed

    def run(self, work: Work) -> Any:
        if not isinstance(work, ClientWork):
            return super().run(work)
        gone = self.lost.get((work.round, work.call), set())
        left = [position for position, client in enumerate(work.ids) if client not in gone]
        if len(left) < self.needed:
            raise RoundAbandoned("too few")
        parts: list[Outcome] = []
        for rank, position in enumerate(left):
            parts.append(replace(work.part(position, position + 1), first=rank).perform(self.place))
        return work.merge(parts)


class Attendance(Sampling):
    """Exactly these clients."""

    who: tuple[int, ...] = ()

    def draw(self, population: int, round: int, seed: int) -> tuple[int, ...]:
        return self.who


def last(records: Any) -> RoundRecord:
    *_, record = records
    return record


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fednova", "qfedavg", "ifca", "fsvrg", "fedavgm"])
def test_a_client_that_is_lost_on_the_way_leaves_what_a_round_without_it_gives(name: str) -> None:
    data, task = some_clients((12, 9, 14, 10)), Task(Dense)
    algorithm = ALGORITHMS[name](lr=0.05, batch_size=1 if name == "fsvrg" else 4)
    losing = Losing(data, task, lost={(1, call): {1} for call in range(4)})
    with_loss = last(fit(data, task, algorithm, 1, evaluation=QUIET, backend=losing))
    without = last(fit(data, task, algorithm, 1, evaluation=QUIET, sampling=Attendance(who=(0, 2, 3))))
    assert with_loss.cohort == (0, 2, 3)
    for group in without.state:
        assert tree.sha256(with_loss.state[group]) == tree.sha256(without.state[group])
    assert with_loss.own.keys() == without.own.keys()


def test_the_peers_that_answered_go_on() -> None:
    data, task = some_clients((12, 9, 14)), Task(Dense)
    peer = fl.Peer(lr=0.05, weights="score")
    losing = Losing(data, task, lost={(1, 0): {1}, (1, 1): {1}})
    record = last(fit(data, task, peer, 1, evaluation=QUIET, backend=losing))
    without = last(fit(data, task, peer, 1, evaluation=QUIET, sampling=Attendance(who=(0, 2))))
    assert {client: tree.sha256(own["model"]) for client, own in record.own.items()} == {
        client: tree.sha256(own["model"]) for client, own in without.own.items()
    }
    assert [row[:3] for row in record.public] == [row[:3] for row in without.public]


def test_below_the_quorum_nothing_changes_and_the_record_says_so() -> None:
    data, task = some_clients((12, 9, 14)), Task(Dense)
    scaffold = fl.Scaffold(lr=0.05)
    losing = Losing(data, task, lost={(2, 0): {0, 1}}, needed=2)
    first, second, third = fit(data, task, scaffold, 3, evaluation=QUIET, backend=losing)
    assert [record.complete for record in (first, second, third)] == [True, False, True]
    assert {group: tree.sha256(t) for group, t in second.state.items()} == {
        group: tree.sha256(t) for group, t in first.state.items()
    }
    assert second.own == {}
    assert third.own.keys() == {0, 1, 2}


def test_a_round_abandoned_in_its_second_call_gives_back_what_clients_kept_after_the_first() -> None:
    data, task = some_clients((12, 9)), Task(Dense)
    losing = Losing(data, task, lost={(1, 1): {0, 1}})
    records = list(fit(data, task, fl.Peer(lr=0.05), 1, evaluation=QUIET, backend=losing))
    assert not records[0].complete
    assert records[0].own == {}


def test_own_states_can_be_given_back() -> None:
    own = ClientStates({"a": {"w": torch.zeros(())}})
    own.put((0,), {"a": {"w": torch.ones(1)}})
    own.take_changed()
    own.put((0, 1), {"a": {"w": torch.tensor([2.0, 2.0])}})
    own.undo()
    assert own.states.keys() == {0}
    assert float(own.states[0]["a"]["w"]) == 1.0
    assert own.take_changed() == {}


def test_deadlines_and_starting_conditions_are_no_part_of_an_experiments_identity() -> None:
    plain = Sampling(count=3).identity()
    assert Sampling(count=3, deadline="5s", start_when=7).identity() == plain
    assert Sampling(count=3, norm_bound=1.0).identity() != plain
    assert Sampling(count=3, over_select=0.5).identity() != plain
    assert "deadline" not in plain
