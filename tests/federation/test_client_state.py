"""What clients keep between rounds."""

import torch

from fedloom.federation.client_state import ClientStates


def test_a_client_that_never_took_part_has_the_initial_state() -> None:
    own = ClientStates({"model": {"w": torch.zeros(2)}})
    own.put((4,), {"model": {"w": torch.ones(1, 2)}})
    assert own.gather((1, 4, 2))["model"]["w"].tolist() == [[0, 0], [1, 1], [0, 0]]


def test_changes_are_reported_once() -> None:
    own = ClientStates({"model": {"w": torch.zeros(1)}}, {7: {"model": {"w": torch.tensor([5.0])}}})
    assert own.take_changed() == {}
    own.put((3, 1), {"model": {"w": torch.tensor([[3.0], [1.0]])}})
    changed = own.take_changed()
    assert list(changed) == [1, 3]
    assert changed[3]["model"]["w"].item() == 3
    assert own.take_changed() == {}
    assert own.gather((7,))["model"]["w"].item() == 5


def test_a_kept_state_is_a_copy() -> None:
    own = ClientStates({"model": {"w": torch.zeros(2)}})
    answer = {"model": {"w": torch.ones(1, 2)}}
    own.put((0,), answer)
    answer["model"]["w"].zero_()
    own.gather((0,))["model"]["w"].zero_()
    assert own.gather((0,))["model"]["w"].tolist() == [[1, 1]]


def test_algorithms_that_keep_nothing_cost_nothing() -> None:
    own = ClientStates({})
    own.put((0, 1), {})
    assert own.states == {}
    assert own.gather((0, 1)) == {}
