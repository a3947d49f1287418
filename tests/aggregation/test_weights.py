"""Rows of weights, and graphs of who hears whom."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.aggregation import weights
from fedloom.errors import InputError

TOPOLOGIES = ("full", "ring", "torus", "star", "erdos_renyi")


def test_scores_weigh_in_proportion_and_losses_by_their_inverse() -> None:
    assert weights.by_score(torch.tensor([0.2, 0.6])).tolist() == pytest.approx([0.2, 0.6])
    assert weights.by_score(torch.tensor([0.5, 0.0]), higher_is_better=False).tolist() == pytest.approx([2.0, 1e6])


def test_scores_that_are_all_zero_weigh_the_same() -> None:
    row = weights.by_score(torch.zeros(3))
    assert row[0] > 0
    assert row.tolist() == [row[0].item()] * 3


def test_selective_inclusion_leaves_out_clients_more_than_one_population_deviation_worse() -> None:
    scores = torch.tensor([0.9, 0.8, 0.7, 0.2])  # mean 0.65, population deviation 0.269…
    assert weights.within_one_std(scores).tolist() == [1, 1, 1, 0]
    assert weights.within_one_std(scores, higher_is_better=False).tolist() == [1, 1, 1, 1]
    assert weights.within_one_std(torch.tensor([0.1, 0.1, 0.1, 2.0]), higher_is_better=False).tolist() == [1, 1, 1, 0]


@given(st.floats(0.01, 1), st.integers(1, 50))
def test_equal_scores_include_everybody(score: float, clients: int) -> None:
    assert weights.within_one_std(torch.full((clients,), score)).sum() == clients


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("clients", [1, 2, 3, 6, 10, 16])
def test_a_topology_is_symmetric_and_everybody_hears_itself(name: str, clients: int) -> None:
    graph = weights.topology(name, clients, key=3)
    assert torch.equal(graph, graph.t())
    assert graph.diagonal().all()


@pytest.mark.parametrize(
    ("name", "clients", "neighbours"), [("full", 6, 5), ("ring", 6, 2), ("torus", 16, 4), ("torus", 9, 4)]
)
def test_regular_topologies_have_as_many_neighbours_as_they_should(name: str, clients: int, neighbours: int) -> None:
    assert (weights.topology(name, clients, key=0).sum(1) - 1).tolist() == [neighbours] * clients


@given(st.integers(3, 20), st.integers(1, 6), st.integers(0, 1000))
def test_random_regular_graphs_are_regular(clients: int, degree: int, key: int) -> None:
    if degree >= clients or clients * degree % 2:
        with pytest.raises(InputError, match="no graph in which"):
            weights.topology("k_regular", clients, key, degree=degree)
        return
    graph = weights.topology("k_regular", clients, key, degree=degree)
    assert (graph.sum(1) - 1).tolist() == [degree] * clients
    assert torch.equal(graph, graph.t())


def test_erdos_renyi_draws_edges_with_their_probability() -> None:
    graph = weights.topology("erdos_renyi", 200, key=5, probability=0.3)
    share = (graph.sum() - 200) / (200 * 199)
    assert share.item() == pytest.approx(0.3, abs=0.02)
    assert not torch.equal(graph, weights.topology("erdos_renyi", 200, key=6, probability=0.3))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_metropolis_weights_are_doubly_stochastic_and_stay_on_the_graph(name: str) -> None:
    graph = weights.topology(name, 9, key=1)
    matrix = weights.metropolis(graph)
    assert torch.allclose(matrix.sum(0), torch.ones(9, dtype=torch.float64))
    assert torch.allclose(matrix.sum(1), torch.ones(9, dtype=torch.float64))
    assert (matrix >= -1e-15).all()
    assert (matrix[~graph] == 0).all()
