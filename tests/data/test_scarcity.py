"""Clients that have too little of something."""

from __future__ import annotations

import numpy as np

from fedloom.data.federation import Federation
from fedloom.data.scarcity import NO_TEST, ONE_EXAMPLE, ONE_LABEL, SMALL_TESTS, in_numbers, scarce, sentences


def three() -> Federation:
    """One label at a, a single example at b, and enough of everything at c."""
    labels = [0] * 30 + [1] + [0, 1] * 50
    return Federation.from_arrays(np.zeros((131, 1)), labels, client=["a"] * 30 + ["b"] + ["c"] * 100)


def test_clients_are_found_by_what_they_lack() -> None:
    found = {what: clients.tolist() for what, clients in scarce(three()).items()}
    assert found[ONE_LABEL] == [0, 1]
    assert found[ONE_EXAMPLE] == [1]
    assert found[NO_TEST] == [1]
    assert found[SMALL_TESTS] == [0]  # six of thirty; none at b, which is said otherwise


def test_sentences_name_clients_and_the_seed_they_are_of() -> None:
    said = [*sentences(three(), " in seed 1")]
    assert "2 of 3 clients have only one label in seed 1: a, b." in said
    assert "1 of 3 clients has no test examples in seed 1: b." in said
    assert not any("fewer than" in text for text in said)  # said beside results
    assert [*sentences(three(), only=(NO_TEST,))] == ["1 of 3 clients has no test examples: b."]


def test_a_run_keeps_numbers_and_not_names() -> None:
    found = in_numbers(three())
    assert (found["clients"], found["train"][0]) == (3, 1)
    assert found["scarce"][ONE_LABEL] == 2
