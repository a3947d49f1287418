"""Top-k sends exactly the largest numbers, whatever they are, and refuses places that cannot be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.compression.method import Damaged
from fedloom.compression.methods.topk import SAMPLE, TopK, gaps, largest, places
from fedloom.errors import ParameterError


def by_sorting(values: np.ndarray, count: int) -> list[int]:
    order = sorted(range(len(values)), key=lambda place: (-abs(values[place]), place))
    return sorted(order[:count])


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=60), st.data())
def test_the_largest_are_those_of_a_sort(values: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    numbers = np.array(values, dtype=np.float32)
    assert largest(numbers, count).tolist() == by_sorting(numbers, count)


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "periodic", "spikes"])
def test_a_threshold_from_a_sample_gives_the_same(kind: str) -> None:
    """Above 131,072 numbers, a sample gives the threshold, also where it is a bad sample."""
    draws, length = np.random.default_rng(3), 3 * SAMPLE + 17
    numbers = draws.normal(size=length).astype(np.float32)
    if kind == "ties":
        numbers = np.round(numbers)
    elif kind == "zeros":
        numbers[:] = 0
    elif kind == "periodic":
        numbers[::3] = 0  # the sample sees only zeros
    elif kind == "spikes":
        numbers[::3] *= 1000  # the sample sees only large ones
    count = length // 100
    found = largest(numbers, count)
    order = np.lexsort((np.arange(length), -np.abs(numbers)))[:count]
    assert found.tolist() == np.sort(order).tolist()


@given(st.sets(st.integers(0, 5000), min_size=1), st.sampled_from([np.uint8, np.int16]))
def test_places_survive_the_journey(chosen: set[int], kind: type) -> None:
    expected = np.array(sorted(chosen))
    assert places(gaps(expected, np.dtype(kind)), len(expected), 5001).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "stream",
    [
        np.array([0, 0], np.uint8),  # too few places
        np.array([0, 0, 0, 0], np.uint8),  # too many
        np.array([0, 0, 9], np.uint8),  # beyond the end
        np.array([0, 0, -3], np.int16),  # backwards
        np.full(10_000, 255, np.uint8),  # endless
    ],
)
def test_places_that_cannot_be_are_refused(stream: np.ndarray) -> None:
    with pytest.raises(Damaged):
        places(stream, 3, 10)


@pytest.mark.parametrize("keep", [0.5, 0.01, 0.001])
def test_numbers_arrive_at_their_places(keep: float) -> None:
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    method = TopK(keep=keep)
    parts = method.encode(values, 0)
    found = method.decode(parts, len(values), torch.float32, 0)
    chosen = by_sorting(values.numpy(), round(keep * 4000))
    assert found.nonzero().flatten().tolist() == chosen
    assert torch.equal(found[chosen], values[chosen])


@pytest.mark.parametrize("keep", [0.0, 1.5, -0.1, float("nan")])
def test_a_share_must_be_one(keep: float) -> None:
    with pytest.raises(ParameterError, match=r"The 'keep' parameter of TopK must be"):
        TopK(keep=keep)
