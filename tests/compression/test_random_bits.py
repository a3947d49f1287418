"""Random words depend on their key alone, and never on the version of a library."""

from __future__ import annotations

from fedloom.compression.random_bits import signs, words

WORDS = [248948064, 2776181770, 2339726612, 3325454010, 4130611357]


def test_words_are_these_words() -> None:
    """Philox4x64-10 is defined by its paper: another machine must draw the same places."""
    assert words(12345, 5).tolist() == WORDS
    assert words(12345, 3).tolist() == WORDS[:3]
    assert words(12346, 5).tolist() != WORDS
    assert words(1, 0).tolist() == []


def test_signs_are_even() -> None:
    found = signs(7, 100_000)
    assert set(found.tolist()) == {-1.0, 1.0}
    assert abs(found.mean()) < 0.015
