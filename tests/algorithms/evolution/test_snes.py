"""SNES against its paper's formulas and, if it is installed, EvoTorch."""

import importlib.util
import math

import pytest
import torch
from torch import Tensor

from fedloom import keys, tree
from fedloom.algorithms import SNES
from fedloom.algorithms.evolution.openai_es import (
    around,
    directions,
)
from fedloom.algorithms.evolution.snes import natural_utilities
from fedloom.errors import InputError
from fedloom.federation.engine import fit
from fedloom.task import Task
from tests.algorithms.evolution.strategies import QUIET, TASK, by_hand, flat, records
from tests.conftest import ALL_TRAIN, Dense, federation


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


def test_one_candidate_is_too_few() -> None:
    with pytest.raises(InputError, match=r"The 'population' parameter of SNES must be at least 2\. Got 1 instead"):
        SNES(population=1)


def test_it_learns() -> None:
    data = federation((30, 60, 40), split=ALL_TRAIN)
    found = [
        r.notes["mean_fitness"] for r in fit(data, Task(Dense), SNES(population=40, sigma=0.2), 25, evaluation=QUIET)
    ]
    assert found[-1] > found[0] + 0.2


def test_natural_utilities_are_those_of_the_paper() -> None:
    found = natural_utilities(torch.tensor([0.1, 0.4, 0.3, 0.2]))  # λ = 4, ranks 4, 1, 2, 3
    raw = [max(0.0, math.log(3) - math.log(rank)) for rank in (4, 1, 2, 3)]
    assert found.tolist() == pytest.approx([value / sum(raw) - 0.25 for value in raw])
