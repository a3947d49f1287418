"""The genetic algorithm against the published listing, written out again as a loop over lists."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fedloom import keys, tree
from fedloom.algorithms import Neuroevolution, RandomSearch
from fedloom.algorithms.evolution.operators import CROSSOVERS, mutate, next_generation
from fedloom.data.federation import Federation
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.tree import Tree, row
from tests.conftest import ALL_TRAIN, Dense, Normed, federation

QUIET = Evaluation(splits=())


def held(validation: int = 12, sizes: tuple[int, ...] = (9, 20, 4)) -> Federation:
    """Clients, and a server with a validation set of its own."""
    data = federation((*sizes, validation), split=ALL_TRAIN)
    kept = sum(sizes)
    server = {"validation": (data.x[kept:], data.y[kept:])}
    return replace(data, x=data.x[:kept], y=data.y[:kept], offsets=data.offsets[:-1], server=server)


def generations(algorithm: Any, rounds: int, data: Federation | None = None, **more: Any) -> list[RoundRecord]:
    task = more.pop("task", Task(Dense))
    return list(fit(held() if data is None else data, task, algorithm, rounds, seed=3, evaluation=QUIET, **more))


def fitness_by_hand(task: Task, population: Tree, data: Federation, cohort: tuple[int, ...]) -> list[float]:
    """One individual, one client at a time: the example-weighted mean of negative mean squared errors."""
    found = []
    for number in range(len(next(iter(population.values())))):
        module = task.build().eval()
        module.load_state_dict({**module.state_dict(), **row(population, number)})
        scores, sizes = [], []
        for client in cohort:
            rows = data.indices(client, "train")
            error = module(data.x[rows]).detach().numpy() - np.eye(3)[data.y[rows].numpy()]
            scores.append(-float((error**2).mean()))
            sizes.append(len(rows))
        found.append(float(np.average(scores, weights=sizes)))
    return found


@pytest.mark.parametrize("settings", [{}, {"crossover": "mean", "mutation": "offset", "stuck_check_length": 2}])
def test_a_run_is_the_published_loop(settings: dict[str, Any]) -> None:
    algorithm = Neuroevolution(population=7, parents=3, mutation_chance=0.3, stuck_evasion_rate=2.0, **settings)
    data, task = held(), Task(Dense)
    sampling = Sampling(count=2, redraw_every=3)
    records = generations(algorithm, 12, data, task=task, sampling=sampling)
    population = algorithm.init(task, task.initial())["population"]
    accuracies: list[float] = []
    multiplier = 1.0
    x, y = data.server["validation"]
    for generation, record in enumerate(records):
        cohort = sampling.draw(3, generation + 1, 3)
        fitness = fitness_by_hand(task, population, data, cohort)
        best = int(np.argmax(fitness))
        assert record.notes["fitness"] == pytest.approx(max(fitness), rel=1e-5)
        assert tree.sha256(tree.select(record.state["model"], population)) == tree.sha256(row(population, best))
        module = task.build().eval()
        module.load_state_dict({**module.state_dict(), **row(population, best)})
        accuracies.append(float((module(x).argmax(1) == y).float().mean()))
        assert record.notes["validation"] == pytest.approx(accuracies[-1])
        used = min(multiplier, algorithm.stuck_multiplier_max)
        assert record.notes["multiplier"] == pytest.approx(used)
        population = next_generation(
            population,
            torch.tensor(fitness),
            3,
            keys.generator(keys.key(3, "breeding", generation + 1)),
            CROSSOVERS[algorithm.crossover],
            partial(mutate, kind=algorithm.mutation, chance=0.3 * np.sqrt(used), rate=3.0 * used),
        )
        assert tree.sha256(record.state["population"]) == tree.sha256(population)
        window = accuracies[max(generation - algorithm.stuck_check_length, 0) : generation]
        multiplier = multiplier * 2.0 if accuracies[-1] in window else 1.0
    assert max(record.notes["multiplier"] for record in records) > 1  # else this would show little


def test_mutation_grows_while_it_is_stuck_up_to_its_cap() -> None:
    algorithm = Neuroevolution(population=4, parents=2, mutation_rate=0.0)  # nothing ever changes but the mixing
    data = held()
    constant = replace(data, server={"validation": (data.x[:1], data.y[:1])})  # right or wrong: often the same again
    found = [record.notes["multiplier"] for record in generations(algorithm, 14, constant)]
    assert max(found) == 5.0
    assert found[0] == 1.0
    for before, after in pairwise(found):
        assert after in (pytest.approx(min(before * 1.25, 5.0)), 1.0)


def test_without_a_validation_set_equal_fitness_means_stuck() -> None:
    algorithm = Neuroevolution(population=4, parents=2, mutation_rate=0.0)
    records = generations(algorithm, 12, replace(held(), server={}))
    assert "validation" not in records[0].notes
    best = [record.notes["fitness"] for record in records]
    assert best == sorted(best)  # the same clients every time, and the fittest is kept unmutated
    assert records[-1].notes["multiplier"] > 1


def test_only_trainable_weights_evolve() -> None:
    records = generations(Neuroevolution(population=4, parents=2, mutation_chance=1.0), 3, task=Task(Normed))
    task = Task(Normed)
    assert set(records[-1].state["population"]) == set(task.trainable)
    for name, leaf in task.initial().items():
        if name not in task.trainable:
            assert torch.equal(records[-1].state["model"][name], leaf), name


def test_the_first_individual_is_the_task_s_own_model_and_the_others_differ() -> None:
    task = Task(Dense, init="glorot")
    state = Neuroevolution(population=5, parents=2).init(task, task.initial())
    assert torch.equal(state["population"]["hidden.weight"][0], task.initial()["hidden.weight"])
    assert len({tree.sha256(row(state["population"], number)) for number in range(5)}) == 5
    assert bool((state["population"]["hidden.bias"] == 0).all())  # each is initialised as the task says


def test_a_generation_tells_what_the_clients_send_and_receive() -> None:
    record = generations(Neuroevolution(population=6, parents=2), 1)[0]
    weights = 4 * sum(leaf.numel() for leaf in Task(Dense).initial().values())
    assert {(report.bytes_down, report.bytes_up) for report in record.reports} == {(6 * weights, 6 * 8 + 8)}


def test_random_search_keeps_its_best() -> None:
    data = held()
    records = generations(RandomSearch(population=6), 6, data)
    best = [record.notes["fitness"] for record in records]
    assert best == sorted(best)
    assert best[-1] > best[0]


def test_everybody_takes_part_every_so_many_generations() -> None:
    sampling = Sampling(count=1, everyone_every=3, redraw_every=2)
    assert [len(sampling.draw(5, round, 0)) for round in range(1, 8)] == [1, 1, 5, 1, 1, 5, 1]


@pytest.mark.parametrize(("parents", "population"), [(1, 5), (5, 5), (6, 5)])
def test_there_must_be_pairs_and_children(parents: int, population: int) -> None:
    with pytest.raises(InputError, match=f"Got parents = {parents} with population = {population}"):
        Neuroevolution(parents=parents, population=population)
    with pytest.raises(InputError, match="at least 2"):
        RandomSearch(population=1)
