"""OpenAI-ES and SNES against their papers' formulas, against torch's Adam and, where it is installed, EvoTorch."""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom import keys, tree
from fedloom.algorithms import SNES, OpenAIES
from fedloom.algorithms.evolution.perturbations import (
    around,
    centred_ranks,
    directions,
    natural_utilities,
    weighted_sum,
)
from fedloom.backends.vector import Vector
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.tree import flatten
from tests.algorithms.evolution.test_neuroevolution import fitness_by_hand
from tests.conftest import ALL_TRAIN, Dense, federation

QUIET = Evaluation(splits=())
DATA = federation((9, 20, 4), split=ALL_TRAIN)
TASK = Task(Dense, dtype="float64")


def flat(one: tree.Tree) -> Tensor:
    return flatten({name: leaf.unsqueeze(0) for name, leaf in one.items()})[0]


def records(algorithm: Any, rounds: int = 3, **more: Any) -> list[RoundRecord]:
    return list(fit(DATA, TASK, algorithm, rounds, seed=5, evaluation=QUIET, **more))


def by_hand(population: tree.Tree) -> Tensor:
    """Fitness with a plain loop."""
    float32 = {name: leaf.float() for name, leaf in population.items()}
    return torch.tensor(fitness_by_hand(Task(Dense), float32, DATA, (0, 1, 2)), dtype=torch.float64)


# --- directions and ranks


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


def test_natural_utilities_are_those_of_the_paper() -> None:
    found = natural_utilities(torch.tensor([0.1, 0.4, 0.3, 0.2]))  # λ = 4, ranks 4, 1, 2, 3
    raw = [max(0.0, math.log(3) - math.log(rank)) for rank in (4, 1, 2, 3)]
    assert found.tolist() == pytest.approx([value / sum(raw) - 0.25 for value in raw])


# --- OpenAI-ES


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


def test_who_misses_a_round_cannot_go_on_without_the_model() -> None:
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
    with pytest.raises(InputError, match=r"population' of snes must be at least 2"):
        SNES(population=1)


# --- SNES


def snes_by_hand(population: int, sigma: float, rounds: int) -> list[tuple[Tensor, Tensor]]:
    """Schaul et al. 2011, Algorithm 2, one weight vector at a time."""
    mean = flat(TASK.initial())
    width = torch.full_like(mean, sigma)
    rate = (3 + math.log(len(mean))) / (5 * math.sqrt(len(mean)))
    found = []
    for round in range(1, rounds + 1):
        steps = directions(keys.key(5, "directions", round) >> 1, population, len(mean), torch.float64)
        zeros = tree.map_leaves(torch.zeros_like, TASK.initial())
        fitness = by_hand(around(zeros, torch.tensor(1.0), mean + width * steps))
        best_first = torch.argsort(fitness, descending=True)
        raw = [max(0.0, math.log(population / 2 + 1) - math.log(rank)) for rank in range(1, population + 1)]
        mean_step, width_step = torch.zeros_like(mean), torch.zeros_like(mean)
        for rank, number in enumerate(best_first.tolist()):
            utility = raw[rank] / sum(raw) - 1 / population
            mean_step += utility * steps[number]
            width_step += utility * (steps[number] ** 2 - 1)
        mean, width = mean + width * mean_step, width * torch.exp(rate / 2 * width_step)
        found.append((mean, width))
    return found


def test_snes_is_the_papers_algorithm() -> None:
    for record, (mean, width) in zip(
        records(SNES(population=6, sigma=0.2, fitness="mse")), snes_by_hand(6, 0.2, 3), strict=True
    ):
        torch.testing.assert_close(flat(record.state["model"]), mean)
        torch.testing.assert_close(flat(record.state["widths"]), width)


@pytest.mark.skipif(importlib.util.find_spec("evotorch") is None, reason="EvoTorch is not installed")
def test_snes_agrees_with_evotorch() -> None:
    from evotorch.distributions import ExpSeparableGaussian

    record = records(SNES(population=10, sigma=0.2, fitness="mse"), rounds=1)[0]
    mean = flat(TASK.initial())
    steps = directions(keys.key(5, "directions", 1) >> 1, 10, len(mean), torch.float64)
    samples = mean + 0.2 * steps
    fitness = by_hand(around(tree.map_leaves(torch.zeros_like, TASK.initial()), torch.tensor(1.0), samples))
    theirs = ExpSeparableGaussian({"mu": mean, "sigma": torch.full_like(mean, 0.2)})
    gradients = theirs.compute_gradients(samples, fitness, objective_sense="max", ranking_method="nes")
    rate = 0.2 * (3 + math.log(len(mean))) / math.sqrt(len(mean))
    theirs = theirs.update_parameters(gradients, learning_rates={"mu": 1.0, "sigma": rate})
    torch.testing.assert_close(flat(record.state["model"]), theirs.mu)
    torch.testing.assert_close(flat(record.state["widths"]), theirs.sigma)


@pytest.mark.parametrize(
    "algorithm", [OpenAIES(population=40, sigma=0.1, server_lr=0.1), SNES(population=40, sigma=0.2)]
)
def test_a_strategy_learns(algorithm: Any) -> None:
    data = federation((30, 60, 40), split=ALL_TRAIN)
    found = [r.notes["mean_fitness"] for r in fit(data, Task(Dense), algorithm, 25, evaluation=QUIET)]
    assert found[-1] > found[0] + 0.2
