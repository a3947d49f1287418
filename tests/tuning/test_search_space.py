"""The settings that a sweep tries."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.errors import InputError
from fedloom.tuning.search_space import Range, name, parse_over, settings


@pytest.mark.parametrize(
    "text", ["train.lr", "=1", "train.lr=", "train.lr=1,1", "train.lr=2:1", "train.lr=0:1:log", "a=[1", "a=1:2:3"]
)
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--over"):
        parse_over([text])


def test_values_are_toml_or_words() -> None:
    found = parse_over(["a=1,2.5,true", "b=sgd,adam", 'c={ name = "iid" },{ name = "shards" }', "d=[1,2],[3]"])
    assert found["a"] == [1, 2.5, True]
    assert found["b"] == ["sgd", "adam"]
    assert found["c"] == [{"name": "iid"}, {"name": "shards"}]
    assert found["d"] == [[1, 2], [3]]
    with pytest.raises(InputError, match="--random"):
        settings({"a": Range(0, 1, False)})


@given(st.integers(1, 20), st.integers(0, 100))
def test_random_search_draws_different_settings_within_the_ranges(count: int, seed: int) -> None:
    choices: Any = {"a": Range(0.001, 1.0, True), "b": [1, 2, 3], "c": Range(1, 4, False)}
    found = settings(choices, count, seed)
    assert found == settings(choices, count, seed)
    assert len({name(one) for one in found}) == len(found) == count
    assert all(0.001 <= one["a"] <= 1 and one["b"] in (1, 2, 3) and one["c"] in (1, 2, 3, 4) for one in found)


def test_random_search_ends_when_there_is_nothing_new() -> None:
    assert len(settings({"a": [1, 2]}, 50)) == 2
