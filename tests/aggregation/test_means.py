"""Pure aggregation."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom import tree
from fedloom.aggregation import means, weights
from fedloom.aggregation.means import PairwiseSum
from fedloom.tree import Tree, sha256

POSITIONS = 40


def value(position: int) -> Tree:
    """Numbers of very different sizes, so that every other order of additions gives other bits."""
    draws = np.random.default_rng(position)
    numbers = draws.normal(size=3) * 10.0 ** draws.integers(-6, 7, size=3)
    return {"w": torch.from_numpy(numbers).float(), "b": torch.tensor(float(draws.normal()), dtype=torch.float64)}


def fingerprint(total: PairwiseSum) -> str:
    return sha256(total.total())


def in_order(positions: list[int]) -> PairwiseSum:
    total = PairwiseSum()
    for position in sorted(positions):
        total.add(value(position), position)
    return total


positions = st.lists(st.integers(0, POSITIONS - 1), min_size=1, unique=True)


@given(positions, st.randoms(use_true_random=False))
def test_the_bits_of_a_sum_do_not_depend_on_the_order_of_arrival(chosen: list[int], chance: object) -> None:
    shuffled = list(chosen)
    chance.shuffle(shuffled)
    total = PairwiseSum()
    for position in shuffled:
        total.add(value(position), position)
    assert fingerprint(total) == fingerprint(in_order(chosen))


@given(positions, st.lists(st.integers(1, POSITIONS - 1), unique=True), st.randoms(use_true_random=False))
def test_the_bits_of_a_sum_do_not_depend_on_how_its_range_is_cut(
    chosen: list[int], cuts: list[int], chance: object
) -> None:
    borders = [0, *sorted(cuts), POSITIONS]
    parts = []
    for begin, end in pairwise(borders):
        part = PairwiseSum()
        for position in chosen:
            if begin <= position < end:
                part.add(value(position), position)
        parts.append(part.nodes)
    chance.shuffle(parts)
    total = PairwiseSum()
    for nodes in parts:
        total.extend(nodes)
    assert fingerprint(total) == fingerprint(in_order(chosen))


def test_the_values_are_such_that_the_order_matters() -> None:
    running = value(0)["w"]
    for position in range(1, POSITIONS):
        running = running + value(position)["w"]
    assert not torch.equal(running, in_order(list(range(POSITIONS))).total()["w"])


@given(st.dictionaries(st.integers(0, 1000), st.floats(-1e9, 1e9, allow_subnormal=False), min_size=1, max_size=50))
def test_a_sum_is_right_also_with_missing_positions(given_numbers: dict[int, float]) -> None:
    total = PairwiseSum()
    for position, number in given_numbers.items():
        total.add({"w": torch.tensor(number, dtype=torch.float64)}, position)
    exact = math.fsum(given_numbers.values())
    scale = max(abs(number) for number in given_numbers.values())
    assert total.total()["w"].item() == pytest.approx(exact, rel=1e-12, abs=1e-12 * scale)


def test_a_process_with_a_range_of_clients_sends_few_partial_sums() -> None:
    assert len(in_order(list(range(32))).nodes) == 1
    assert len(in_order(list(range(5, 37))).nodes) <= 10


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 7))
def test_the_sums_of_a_stack_have_the_bits_of_adding_its_rows_one_by_one(first: int, count: int, block: int) -> None:
    stacked = tree.stack([value(position) for position in range(count)])
    weigh = torch.arange(1, count + 1, dtype=torch.float64) / 3
    expected = PairwiseSum()
    for row in range(count):
        leaves = {name: leaf[row] * weigh[row].to(leaf.dtype) for name, leaf in stacked.items()}
        expected.add(leaves, first + row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(means, "BLOCK", block)  # so that there are several blocks
        found = means.partial_sums(stacked, weigh, first)
    assert found.keys() == expected.nodes.keys()
    assert all(sha256(found[node]) == sha256(expected.nodes[node]) for node in found)


def test_adding_changes_nothing_that_was_given() -> None:
    given_tree = {"w": torch.ones(2)}
    total = PairwiseSum()
    for position in range(4):
        total.add(given_tree, position)
    total.total()
    assert given_tree["w"].tolist() == [1, 1]
    assert total.total()["w"].tolist() == [4, 4]


def test_a_mean_weighs_each_client_by_its_number() -> None:
    stacked = {"w": torch.tensor([[1.0, 0.0], [4.0, 3.0], [9.0, 6.0]], dtype=torch.float64)}
    assert means.mean(stacked, torch.tensor([3.0, 2.0, 1.0]))["w"].tolist() == [20 / 6, 12 / 6]


def test_a_counter_is_averaged_to_the_nearest_whole_number() -> None:
    stacked = {"batches": torch.tensor([3, 10, 2**60]), "w": torch.zeros(3)}
    mean = means.mean(stacked, torch.tensor([1.0, 2.0, 0.0]))
    assert mean["batches"].item() == 8  # 23 / 3
    assert mean["batches"].dtype == torch.int64
    assert mean["w"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
def test_a_mean_keeps_the_type_of_every_leaf(dtype: torch.dtype) -> None:
    stacked = {"mask": torch.tensor([[1, 0], [1, 0]]).to(dtype)}
    mean = means.mean(stacked, torch.tensor([1.0, 3.0]))
    assert mean["mask"].dtype == dtype
    assert mean["mask"].tolist() == stacked["mask"][0].tolist()


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(-1000, 1000)), min_size=1, max_size=20))
def test_a_mean_is_the_exact_fraction_to_the_last_digits(clients: list[tuple[int, int]]) -> None:
    counts, numbers = zip(*clients, strict=True)
    exact = sum(Fraction(n * v) for n, v in clients) / sum(counts)
    found = means.mean({"w": torch.tensor(numbers, dtype=torch.float64)}, torch.tensor(counts))["w"].item()
    assert found == pytest.approx(float(exact), rel=1e-14, abs=1e-14)


def examples() -> Tensor:
    return torch.tensor([5, 0, 600])


def test_clients_count_by_their_examples_or_all_the_same() -> None:
    assert weights.by_examples(examples()).tolist() == [5, 0, 600]
    assert weights.uniform(examples()).tolist() == [1, 1, 1]
    assert weights.by_examples(examples()).dtype == weights.uniform(examples()).dtype == torch.float64


def test_half_precision_is_averaged_in_single_precision() -> None:
    stacked = {"w": torch.full((300, 1), 1.0, dtype=torch.bfloat16)}
    found = means.mean(stacked, torch.ones(300))["w"]
    assert found.dtype == torch.bfloat16
    assert found.item() == 1.0
    uneven = {"w": torch.tensor([[1.0], [1.0078125], [1.0]], dtype=torch.bfloat16)}
    wanted = (torch.tensor([1000.0, 1.0, 1.0]) * uneven["w"].float().flatten()).sum() / 1002
    assert means.mean(uneven, torch.tensor([1000.0, 1.0, 1.0]))["w"].item() == wanted.to(torch.bfloat16).item()
