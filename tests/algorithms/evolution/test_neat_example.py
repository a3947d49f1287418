"""The example that evolves topologies: genomes mean the same to it and to neat-python, and runs can be gone on with."""

import inspect
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import tree, user_code
from fedloom.data.federation import Federation
from fedloom.federation.engine import Evaluation, Snapshot, fit
from fedloom.task import Task

neat = pytest.importorskip("neat", reason="neat-python is not installed")
EXAMPLE = Path(__file__).parents[3] / "examples" / "neat"


@pytest.fixture(scope="module")
def topology() -> Any:
    return user_code.code("topology.py:Neat", EXAMPLE)


def part(topology: Any, name: str) -> Any:
    return vars(inspect.getmodule(topology.round) or sys.modules[topology.__module__])[name]


def task(topology: Any) -> Task:
    return Task(part(topology, "Graph"), args={"inputs": 13, "outputs": 3, "hidden": 12})


def test_a_genome_is_the_same_net_here_and_in_neat_python(topology: Any) -> None:
    config, what = part(topology, "_config")(), task(topology)
    before = random.getstate()
    try:
        random.seed(4)
        population = neat.Population(config)
        genomes = list(population.population.values())[:12]
        for genome in genomes:
            for _ in range(25):
                genome.mutate(config.genome_config)
    finally:
        random.setstate(before)
    x = torch.randn(5, 13, generator=torch.Generator().manual_seed(0))
    compared = 0
    for genome in genomes:
        weights = part(topology, "_weights")(genome, config.genome_config, what.initial())
        if weights is None:
            continue
        theirs = neat.nn.FeedForwardNetwork.create(genome, config)
        expected = torch.tensor([theirs.activate(row.tolist()) for row in x])
        torch.testing.assert_close(torch.func.functional_call(what.build(), weights, (x,)), expected)
        compared += 1
    assert compared > 3


def test_a_run_goes_on_with_the_same_bits(topology: Any) -> None:
    x, y = part(topology, "wine")()
    data = Federation.from_arrays(x, y, clients=4, split=(1.0, 0.0, 0.0))
    what, quiet = task(topology), Evaluation(splits=())
    whole = list(fit(data, what, topology(), 4, seed=2, evaluation=quiet))
    again = list(fit(data, what, topology(), 4, seed=2, evaluation=quiet, resume=Snapshot(2, whole[1].state)))
    assert [record.notes for record in again] == [record.notes for record in whole[2:]]
    assert tree.sha256(again[-1].state["model"]) == tree.sha256(whole[-1].state["model"])
    assert whole[-1].notes["fitness"] >= whole[0].notes["fitness"]
