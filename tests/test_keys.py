"""Counter-based randomness."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom import keys

any_key = st.integers(0, 2**64 - 1)


def hash_by_hand(value: int) -> int:
    for _ in range(3):
        value = ((value >> 16) ^ value) * 0x45D9F3B % 2**32
    return (value >> 16) ^ value


def hashes_by_hand(key: int, count: int) -> list[int]:
    low, high = key % 2**32, key // 2**32
    return [hash_by_hand(hash_by_hand((number + low) % 2**32) ^ high) for number in range(count)]


@given(any_key, st.integers(0, 500))
def test_a_permutation_has_every_number_once(key: int, count: int) -> None:
    assert sorted(keys.permutation(key, count).tolist()) == list(range(count))


@given(any_key, st.integers(1, 50))
def test_the_draws_are_the_hash_of_key_and_counter_and_nothing_else(key: int, count: int) -> None:
    by_hand = hashes_by_hand(key, count)
    assert keys.hashes(key, count).tolist() == by_hand
    assert keys.permutation(key, count).tolist() == sorted(range(count), key=lambda number: by_hand[number])


@given(any_key, st.integers(1, 100), st.integers(1, 100))
def test_the_first_draws_do_not_depend_on_how_many_follow(key: int, few: int, more: int) -> None:
    assert keys.hashes(key, few + more)[:few].tolist() == keys.hashes(key, few).tolist()


def test_a_key_is_the_same_on_every_machine() -> None:
    digest = hashlib.blake2b(b"(7, 'batches', 3, 12)", digest_size=8).digest()
    assert keys.key(7, "batches", 3, 12) == int.from_bytes(digest, "little")


@pytest.mark.parametrize(
    "other",
    [(2, "batches", 3, 7), (1, "dropout", 3, 7), (1, "batches", 4, 7), (1, "batches", 3, 8), (1, "batches", 3)],
)
def test_every_part_of_a_key_counts(other: tuple[int, ...]) -> None:
    assert keys.key(*other) != keys.key(1, "batches", 3, 7)


def test_a_key_does_not_depend_on_who_counted_the_client() -> None:
    assert keys.key(1, "batches", np.int64(3)) == keys.key(np.int64(1), "batches", 3)


def test_hashes_fill_their_range_evenly() -> None:
    counts = np.bincount(keys.hashes(keys.key(3, "even"), 64_000) >> 26, minlength=64)
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert 28 < chi_squared < 120  # 63 degrees of freedom: outside once in a hundred thousand


def test_uniform_numbers_are_below_one_and_have_the_mean_of_a_half() -> None:
    drawn = keys.uniform(torch.tensor(keys.words(keys.key(1, "uniform"))), 40_000, call=0)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.01)
    assert drawn.var().item() == pytest.approx(1 / 12, abs=0.002)


def test_calls_of_one_key_draw_different_numbers() -> None:
    key = torch.tensor(keys.words(keys.key(1, "uniform")))
    first, second = keys.uniform(key, 1000, call=0), keys.uniform(key, 1000, call=1)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


@pytest.mark.parametrize("key", [0, 2**32 - 3, 2**64 - 1])
def test_a_lane_draws_what_it_would_draw_alone(key: int) -> None:
    lanes = torch.tensor([keys.words(5), keys.words(key)])
    side_by_side = torch.func.vmap(lambda one: keys.uniform(one, 20, 2))(lanes)
    assert torch.equal(side_by_side[1], keys.uniform(lanes[1], 20, 2))


def test_generators_of_one_key_draw_the_same_and_of_two_keys_do_not() -> None:
    first, again, other = (keys.generator(key).normal(size=5) for key in (8, 8, 9))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()
