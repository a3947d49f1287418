"""At which clients algorithms can be compared, where a metric is undefined at some."""

from __future__ import annotations

import numpy as np

from fedloom.results.common_clients import Measured, at_end, lacking, only, shared
from fedloom.results.run_values import ClientValues


def values(*places: tuple[int, int]) -> ClientValues:
    """Values of these pairs of round and client."""
    table = np.array([(round, client, 0.5) for round, client in places], dtype=np.float64).reshape(-1, 3)
    return ClientValues.of(table)


def measured(clients: list[int], without: list[int], round: int = 1) -> Measured:
    """What one algorithm measured in a round: every client has a loss, and some lack the metric."""
    losses = [(round, client) for client in clients]
    return values(*(place for place in losses if place[1] not in without)), values(*losses)


def test_algorithms_that_lack_a_value_at_the_same_clients_need_no_choice() -> None:
    assert shared([measured([0, 1, 2], []), measured([0, 1, 2], [])]) is None
    assert shared([measured([0, 1, 2], [1]), measured([0, 1, 2], [1])]) is None
    assert shared([]) is None


def test_clients_that_one_algorithm_lacks_are_left_out_for_all() -> None:
    assert shared([measured([0, 1, 2, 3], [1]), measured([0, 1, 2, 3], [1, 3])]) == {0, 2}
    assert shared([measured([0, 1], [0]), measured([0, 1], [1])]) == set()


def test_clients_that_only_one_algorithm_drew_lack_nothing() -> None:
    assert shared([measured([0, 1], []), measured([0, 1, 2], [2])]) is None
    assert shared([measured([0, 1, 3], [1]), measured([0, 1, 2], [2])]) == {0}


def test_a_value_must_be_there_in_every_round_in_which_a_client_was_measured() -> None:
    losses = values((1, 0), (1, 1), (2, 0), (2, 1))
    assert lacking(values((1, 0), (1, 1), (2, 0)), losses) == {1}
    assert lacking(losses, losses) == set()


def test_the_end_is_the_last_round_in_which_anything_was_measured() -> None:
    found, losses = at_end((values((1, 0), (1, 1)), values((1, 0), (1, 1), (2, 0), (2, 1))))
    assert (len(found), losses.rounds.tolist()) == (0, [2, 2])


def test_only_some_clients_are_kept() -> None:
    assert only(values((1, 0), (1, 1), (2, 0)), {0}).rounds.tolist() == [1, 2]
