"""OpenAI-ES against its paper's formula and torch's Adam."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedloom import keys, tree
from fedloom.algorithms import OpenAIES
from fedloom.algorithms.evolution.perturbations import (
    around,
    directions,
)
from fedloom.backends.vector import Vector
from fedloom.errors import InputError
from fedloom.federation.engine import fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.tree import flatten
from tests.algorithms.evolution.strategies import DATA, QUIET, TASK, by_hand, flat, records
from tests.conftest import ALL_TRAIN, Dense, federation


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
