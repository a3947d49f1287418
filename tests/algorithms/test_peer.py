"""Peer-to-peer averaging, computed by hand."""

import numpy as np
import torch

from fedloom.algorithms import Peer
from tests.algorithms.linear import (
    LR,
    RANGES,
    START,
    after,
    descend,
    vector,
)


def test_each_client_keeps_the_mean_of_its_neighbours() -> None:
    record = after(Peer(lr=LR, batch_size="full"), 1)
    expected = (descend(START, RANGES[0]) + descend(START, RANGES[1])) / 2
    for client in range(2):
        np.testing.assert_allclose(vector(record.own[client]["model"]), expected, rtol=1e-13)
    assert record.state == {}


def test_a_topology_is_redrawn_only_if_you_ask_for_it() -> None:
    same, new = (Peer(topology="erdos_renyi", redraw=redraw) for redraw in (False, True))
    assert torch.equal(same.graph(12, seed=1, round=1), same.graph(12, seed=1, round=2))
    assert not torch.equal(new.graph(12, seed=1, round=1), new.graph(12, seed=1, round=2))
