from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from sklearn.model_selection import train_test_split

from fedloom.data.federation import Federation
from fedloom.data.split import SPLITS, Split
from fedloom.errors import InputError


def one(split: Split, examples: int) -> list[int]:
    return [int(part[0]) for part in split.sizes(np.array([examples]))]


@pytest.mark.parametrize("examples", [5, 11, 15, 100, 303, 2897])
def test_sizes_are_those_of_test_first_then_validation(examples: int) -> None:
    rest, test = train_test_split(range(examples), test_size=0.2)
    train, validation = train_test_split(rest, test_size=0.25)
    assert one(Split(), examples) == [len(train), len(validation), len(test)]


def test_small_clients_keep_an_example_to_train_on() -> None:
    assert [one(Split(), examples) for examples in (1, 2, 3)] == [[1, 0, 0], [1, 0, 1], [1, 1, 1]]


@settings(deadline=None)
@given(
    sizes=some.lists(some.integers(1, 300), min_size=1, max_size=5),
    shares=some.tuples(some.integers(1, 10), some.integers(0, 10), some.integers(0, 10)),
    seed=some.integers(0, 1000),
)
def test_splits_are_disjoint_and_complete(sizes: list[int], shares: tuple[int, int, int], seed: int) -> None:
    train, validation, test = (share / sum(shares) for share in shares)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    split = Split(train=train, validation=validation, test=test)
    federation = Federation(torch.zeros(sum(sizes), 1), torch.zeros(sum(sizes)), offsets, split=split, seed=seed)
    for client, size in enumerate(sizes):
        parts = [federation.indices(client, name).tolist() for name in SPLITS]
        assert sorted(chain(*parts)) == list(range(offsets[client], offsets[client] + size))
        assert [len(part) for part in parts] == [federation.sizes(name)[client] for name in SPLITS]
        assert parts[0]


def test_splits_depend_on_the_seed_and_the_client_only() -> None:
    def rows(seed: int, client: int) -> list[int]:
        federation = Federation(torch.zeros(80, 1), torch.zeros(80), np.array([0, 40, 80]), seed=seed)
        return [row - 40 * client for row in federation.indices(client, "train").tolist()]

    assert rows(1, 0) == rows(1, 0)
    assert rows(1, 0) != rows(2, 0)
    assert rows(1, 0) != rows(1, 1)


def test_without_other_splits_the_order_is_kept() -> None:
    split = Split(train=1.0, validation=0.0, test=0.0)
    federation = Federation(torch.zeros(6, 1), torch.zeros(6), np.array([0, 6]), split=split)
    assert federation.indices(0, "train").tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "shares", [(0.5, 0.2, 0.2), (0.0, 0.5, 0.5), (1.2, -0.2, 0.0), (float("nan"), 0.5, 0.5), (0.6, 0.2, float("inf"))]
)
def test_shares_must_add_up_and_leave_training(shares: tuple[float, float, float]) -> None:
    with pytest.raises(
        InputError, match=r"three shares \(train, validation, test\) that add up to 1, with some training"
    ):
        Split(train=shares[0], validation=shares[1], test=shares[2])


def test_the_order_can_be_kept_with_the_test_last() -> None:
    split = Split(train=0.5, validation=0.25, test=0.25, shuffle=False)
    federation = Federation(torch.zeros(12, 1), torch.zeros(12), np.array([0, 8, 12]), split=split, seed=3)
    parts = [[federation.indices(client, name).tolist() for name in SPLITS] for client in (0, 1)]
    assert parts == [[[0, 1, 2, 3], [4, 5], [6, 7]], [[8, 9], [10], [11]]]
    assert [federation.sizes(name).tolist() for name in SPLITS] == [[4, 2], [2, 1], [2, 1]]


def test_a_split_that_shuffles_looks_as_it_always_did() -> None:
    # fingerprints of data, and with them runs that are to go on, depend on it
    assert repr(Split()) == "Split(train=0.6, validation=0.2, test=0.2)"
    assert repr(Split(shuffle=False)) == "Split(train=0.6, validation=0.2, test=0.2, shuffle=False)"
