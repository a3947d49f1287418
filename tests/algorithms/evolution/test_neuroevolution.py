"""The genetic algorithm against the published listing, written out again as a loop over lists."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom import keys, tree
from fedloom.algorithms import Neuroevolution, RandomSearch
from fedloom.algorithms.evolution.neuroevolution import (
    CROSSOVERS,
    choose_pairs,
    choose_parents,
    diversity,
    filterwise,
    halving,
    interleave,
    kernelwise,
    mean,
    mutate,
    next_generation,
)
from fedloom.data.federation import Federation
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.tree import Tree, flatten, row, unflatten
from tests.conftest import ALL_TRAIN, Dense, Normed, federation


def random(seed: int = 0) -> np.random.Generator:
    return keys.generator(keys.key(seed, "test"))


def parents(children: int = 1) -> tuple[Tree, Tree]:
    """The first parent is all ones, the second all twos: a convolution, a dense layer, a bias and a single number."""
    shapes = {"conv": (4, 3, 2, 5), "dense": (6, 7), "bias": (6,), "scale": ()}
    a, b = ({name: torch.full((children, *shape), value) for name, shape in shapes.items()} for value in (1.0, 2.0))
    return a, b


def test_flattening_is_undone() -> None:
    a, _ = parents(3)
    a = {name: leaf + torch.arange(leaf.numel()).reshape(leaf.shape) for name, leaf in a.items()}
    again = unflatten(flatten(a), {name: leaf[0] for name, leaf in a.items()})
    assert all(torch.equal(a[name], again[name]) for name in a)


# --- parents


def test_parents_are_the_fittest_but_one_and_a_random_other() -> None:
    fitness = torch.tensor([0.1, 0.7, 0.3, 0.9, 0.5, 0.2])
    others = set()
    for seed in range(60):
        *best, other = choose_parents(fitness, 4, random(seed)).tolist()
        assert best == [3, 1, 4]
        others.add(other)
    assert others == {0, 2, 5}


def test_equal_fitness_is_decided_by_the_order() -> None:
    assert choose_parents(torch.zeros(5), 3, random()).tolist()[:2] == [0, 1]


@given(st.integers(2, 9), st.integers(0, 1000))
def test_a_child_has_two_different_parents(count: int, seed: int) -> None:
    first, second = choose_pairs(count, 40, random(seed))
    assert bool((first != second).all())
    assert int(torch.cat([first, second]).min()) >= 0
    assert int(torch.cat([first, second]).max()) < count


def test_every_pair_of_parents_occurs() -> None:
    first, second = choose_pairs(3, 500, random())
    assert {*zip(first.tolist(), second.tolist(), strict=True)} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }


# --- crossover


def test_halving_takes_the_first_half_of_all_values_from_the_first_parent() -> None:
    child = halving(
        {"u": torch.ones(1, 2), "v": torch.ones(1, 3)}, {"u": torch.zeros(1, 2), "v": torch.zeros(1, 3)}, random()
    )
    assert (child["u"].tolist(), child["v"].tolist()) == ([[1, 1]], [[0, 0, 0]])
    a, b = parents()
    flat = flatten(halving(a, b, random()))[0]
    assert flat.tolist() == [1.0 if place <= len(flat) / 2 else 2.0 for place in range(1, len(flat) + 1)]


def test_interleave_takes_even_places_counted_from_one_from_the_first_parent() -> None:
    a, b = parents()
    flat = flatten(interleave(a, b, random()))[0]
    assert flat.tolist() == [1.0 if place % 2 == 0 else 2.0 for place in range(1, len(flat) + 1)]


def test_mean_is_the_mean() -> None:
    a, b = parents(2)
    assert flatten(mean(a, b, random())).unique().tolist() == [1.5]


def keras_kernelwise(a: np.ndarray, b: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """The published rule, on a layer whose last dimension is that of outputs."""
    return np.where(np.repeat(choice, a.shape[-1]).reshape(a.shape), a, b)


def as_keras(leaf: Tensor) -> np.ndarray:
    return np.moveaxis(leaf.numpy(), 0, -1)


def test_kernelwise_is_the_published_rule_in_torchs_layout() -> None:
    a, b = parents(20)
    child = kernelwise(a, b, random())
    for name in ("conv", "dense", "bias"):
        for number in range(20):
            one, other, found = as_keras(a[name][number]), as_keras(b[name][number]), as_keras(child[name][number])
            choice = found[..., 0] == 1.0
            np.testing.assert_array_equal(found, keras_kernelwise(one, other, choice))
    assert len(child["conv"][0, 0].unique()) == 2  # inputs and places of one output differ …
    assert all(len(bias.unique()) == 1 for bias in child["bias"])  # … and a bias is whole
    assert len(child["bias"].unique()) == 2


def test_filterwise_takes_whole_filters() -> None:
    a, b = parents(20)
    child = filterwise(a, b, random())
    for name, leaf in child.items():
        for filters in leaf.reshape(
            20, -1 if leaf.dim() == 1 else leaf.shape[1], max(leaf[0, 0].numel(), 1) if leaf.dim() > 1 else 1
        ):
            assert all(len(one.unique()) == 1 for one in filters), name
    assert all(len(leaf.unique()) == 2 for leaf in child.values())


@pytest.mark.parametrize("name", CROSSOVERS)
def test_crossover_changes_no_parent_and_depends_on_its_key_alone(name: str) -> None:
    a, b = parents(3)
    one, other = CROSSOVERS[name](a, b, random(1)), CROSSOVERS[name](a, b, random(1))
    assert all(torch.equal(one[leaf], other[leaf]) for leaf in a)
    assert {leaf: value.shape for leaf, value in one.items()} == {leaf: value.shape for leaf, value in a.items()}
    assert all(bool((a[leaf] == 1).all()) and bool((b[leaf] == 2).all()) for leaf in a)


# --- mutation


@given(st.floats(0, 1), st.sampled_from(["multiplication", "uniform_multiplication", "offset"]), st.integers(0, 99))
def test_exactly_the_stated_share_of_each_layer_changes(chance: float, kind: Any, seed: int) -> None:
    before, _ = parents(4)
    after = mutate(before, random(seed), kind, chance, rate=3.0)
    for name, leaf in before.items():
        changed = (after[name] != leaf).reshape(4, -1).sum(1)
        assert changed.tolist() == [int(leaf[0].numel() * chance)] * 4, name


def test_a_chance_above_one_changes_everything() -> None:
    before, _ = parents()
    assert all(bool((leaf != 1).all()) for leaf in mutate(before, random(), chance=2.2).values())


def test_multiplication_has_one_factor_for_each_layer_and_child() -> None:
    before = {"w": torch.arange(1.0, 2001.0).repeat(3, 1), "v": torch.ones(3, 500)}
    after = mutate(before, random(), "multiplication", chance=0.1, rate=3.0)
    factors = []
    for name, leaf in before.items():
        for child in range(3):
            changed = after[name][child] != leaf[child]
            ratio = after[name][child][changed] / leaf[child][changed]
            torch.testing.assert_close(ratio, ratio[:1].expand(len(ratio)), rtol=1e-5, atol=0)
            factors.append(float(ratio[0]))
    assert len(set(factors)) == 6


def test_multiplication_is_normal_with_a_hundredth_of_the_rate() -> None:
    factors = mutate({"w": torch.ones(4000, 1).double()}, random(), "multiplication", 1.0, rate=3.0)["w"] - 1
    assert abs(float(factors.mean())) < 0.002
    assert float(factors.std()) == pytest.approx(0.03, rel=0.05)
    assert float(factors.abs().max()) > 0.06  # a uniform draw of this rate stays within 0.03


@pytest.mark.parametrize(("kind", "width"), [("uniform_multiplication", 0.03), ("offset", 3.0)])
def test_uniform_draws_fill_their_range(kind: Any, width: float) -> None:
    changes = mutate({"w": torch.ones(4000, 1).double()}, random(), kind, 1.0, rate=3.0)["w"] - 1
    assert float(changes.min()) == pytest.approx(-width, rel=0.02)
    assert float(changes.max()) == pytest.approx(width, rel=0.02)
    assert abs(float(changes.mean())) < 0.05 * width


def test_multiplication_leaves_zeros_and_signs_alone_but_an_offset_does_not() -> None:
    before = {"w": torch.zeros(2, 50)}
    assert torch.equal(mutate(before, random(), "multiplication", 1.0)["w"], before["w"])
    assert bool((mutate(before, random(), "offset", 1.0)["w"] != 0).all())


def test_each_value_may_have_a_draw_of_its_own() -> None:
    after = mutate({"w": torch.ones(1, 1000)}, random(), "offset", 0.5, 3.0, each="value")["w"]
    assert len(after.unique()) > 490


@pytest.mark.parametrize(("size", "share"), [(10, 3), (25, 2), (25, 3)])
def test_all_places_and_pairs_of_places_are_equally_likely(size: int, share: int) -> None:
    changed = (mutate({"w": torch.ones(40_000, size)}, random(), "offset", share / size)["w"] != 1).double()
    torch.testing.assert_close(changed.mean(0), torch.full((size,), share / size).double(), atol=0.01, rtol=0)
    together = (changed.t() @ changed / len(changed))[~torch.eye(size, dtype=torch.bool)]
    expected = share * (share - 1) / (size * (size - 1))
    torch.testing.assert_close(together, torch.full_like(together, expected), atol=0.008, rtol=0)


# --- a generation


def test_the_next_generation_is_the_parents_unchanged_and_their_mutated_children() -> None:
    population = {"w": torch.arange(1.0, 8.0).reshape(7, 1).repeat(1, 4)}
    fitness = torch.tensor([5.0, 1.0, 9.0, 2.0, 3.0, 4.0, 0.0])
    found = next_generation(
        population,
        fitness,
        3,
        random(),
        mean,
        lambda children, _: {name: leaf + 100 for name, leaf in children.items()},
    )["w"]
    assert found[:2, 0].tolist() == [3.0, 1.0]  # the individuals with fitness 9 and 5
    other = float(found[2, 0])
    assert other in {2.0, 4.0, 5.0, 6.0, 7.0}
    allowed = {100 + (a + b) / 2 for a in (3.0, 1.0, other) for b in (3.0, 1.0, other) if a != b}
    assert len(found) == 7
    assert set(found[3:, 0].tolist()) <= allowed


def test_diversity_is_the_relative_distance_from_the_mean() -> None:
    assert float(diversity({"w": torch.tensor([[3.0, 0.0], [0.0, 4.0]])})) == pytest.approx((6.25 / 12.5) ** 0.5)
    assert float(diversity({"w": torch.zeros(3, 2)})) == 0.0


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
