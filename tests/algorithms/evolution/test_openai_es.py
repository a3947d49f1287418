"""OpenAI-ES against its paper's formula and torch's Adam."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom import keys, tree
from fedloom.algorithms import OpenAIES
from fedloom.algorithms.evolution.openai_es import (
    around,
    centred_ranks,
    directions,
    weighted_sum,
)
from fedloom.algorithms.evolution.snes import natural_utilities
from fedloom.backends.vector import Vector
from fedloom.errors import InputError
from fedloom.federation.engine import fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.tree import flatten
from tests.algorithms.evolution.strategies import DATA, QUIET, TASK, by_hand, flat, records
from tests.conftest import ALL_TRAIN, Dense, federation


def test_a_direction_depends_on_the_seed_and_its_number_alone() -> None:
    few, many = directions(7, 2, 10, torch.float32).clone(), directions(7, 5, 10, torch.float32)
    assert torch.equal(few, many[:2])
    assert len({tuple(row) for row in many.tolist()}) == 5
    assert not torch.equal(many, directions(8, 5, 10, torch.float32))


def test_directions_are_standard_normal() -> None:
    drawn = directions(1, 50, 2000, torch.float64)
    assert abs(float(drawn.mean())) < 0.01
    assert float(drawn.var()) == pytest.approx(1, rel=0.02)


def test_a_population_is_around_its_centre() -> None:
    centre = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])}
    found = around(centre, torch.tensor([1.0, 10.0, 100.0]), torch.tensor([[1.0, 1.0, 1.0], [0.0, -1.0, 0.5]]))
    assert found["w"].tolist() == [[[2.0, 12.0]], [[1.0, -8.0]]]
    assert found["b"].tolist() == [[103.0], [53.0]]


def test_weighted_sums_are_sums() -> None:
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).double()
    weights = torch.arange(5.0).double()
    torch.testing.assert_close(weighted_sum(weights, rows), weights @ rows)


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=12))
def test_ranks_add_up_to_nothing_and_equals_are_equal(values: list[int]) -> None:
    fitness = torch.tensor(values, dtype=torch.float64)
    for utilities in (centred_ranks(fitness), natural_utilities(fitness)):
        assert abs(float(utilities.sum())) < 1e-9
        for a in range(len(values)):
            for b in range(len(values)):
                if values[a] == values[b]:
                    assert float(utilities[a]) == pytest.approx(float(utilities[b]))
                if values[a] > values[b]:
                    assert float(utilities[a]) >= float(utilities[b]) - 1e-12


def test_openai_es_is_adam_on_the_papers_gradient() -> None:
    algorithm = OpenAIES(population=8, sigma=0.1, server_lr=0.05, decay=0.01, fitness="mse")
    weights = torch.nn.Parameter(flat(TASK.initial()))
    optimizer = torch.optim.Adam([weights], lr=0.05)
    for record in records(algorithm):
        steps = directions(keys.key(5, "directions", record.round) >> 1, 4, len(weights), torch.float64)
        population = around(TASK.initial(), torch.tensor(0.1), torch.cat([steps, -steps]))
        moved = flatten(population) - flat(TASK.initial()) + weights.detach()
        stacked = around(tree.map_leaves(torch.zeros_like, TASK.initial()), torch.tensor(1.0), moved)
        ranks = np.argsort(np.argsort(by_hand(stacked).numpy())) / 7 - 0.5
        gradient = (torch.from_numpy(ranks) @ torch.cat([steps, -steps])) / (8 * 0.1) - 0.01 * weights.detach()
        weights.grad = -gradient
        optimizer.step()
        torch.testing.assert_close(flat(record.state["model"]), weights.detach(), rtol=1e-6, atol=1e-8)


def test_only_seeds_and_fitness_need_to_travel() -> None:
    settings = {"population": 6, "sigma": 0.1, "decay": 0.001}
    sent, kept = records(OpenAIES(**settings)), records(OpenAIES(**settings, travels="fitness"))
    assert [tree.sha256(r.state["model"]) for r in sent] == [tree.sha256(r.state["model"]) for r in kept]
    before = TASK.initial()
    for record in kept:  # a client holds, bit for bit, what the server had when it asked
        assert {tree.sha256(own["model"]) for own in record.own.values()} == {tree.sha256(before)}
        before = record.state["model"]
    weights = 8 * len(flat(TASK.initial()))
    seed, steps, fitness = 8, 8, 8
    assert {report.bytes_down for report in sent[0].reports} == {weights + seed}
    assert {report.bytes_down for report in kept[0].reports} == {2 * seed + steps + 3 * fitness}
    assert {report.bytes_up for r in (sent, kept) for report in r[0].reports} == {6 * fitness + 8}


def test_a_client_that_misses_a_round_loses_the_model() -> None:
    with pytest.raises(InputError, match=r"needs every client in every round.*Round 1 has 2 of 3"):
        records(OpenAIES(population=6, travels="fitness"), sampling=Sampling(count=2))


def test_keeping_the_model_gives_the_same_bits_on_processes(vector: Callable[..., Vector]) -> None:
    algorithm = OpenAIES(population=6, travels="fitness")
    alone, spread = (records(algorithm, backend=backend)[-1] for backend in (None, vector(DATA, TASK, workers=2)))
    assert tree.sha256(alone.state["model"]) == tree.sha256(spread.state["model"])
    assert {c: tree.sha256(own["model"]) for c, own in alone.own.items()} == {
        c: tree.sha256(own["model"]) for c, own in spread.own.items()
    }


def test_pairs_need_an_even_population() -> None:
    with pytest.raises(InputError, match=r"population' of openai_es must be even.*Got 7"):
        OpenAIES(population=7)


def test_it_learns() -> None:
    data = federation((30, 60, 40), split=ALL_TRAIN)
    found = [
        r.notes["mean_fitness"]
        for r in fit(data, Task(Dense), OpenAIES(population=40, sigma=0.1, server_lr=0.1), 25, evaluation=QUIET)
    ]
    assert found[-1] > found[0] + 0.2
