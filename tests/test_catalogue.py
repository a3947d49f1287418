"""The catalogue of algorithms, on screen and in the documentation."""

from __future__ import annotations

import pytest

from fedloom import catalogue
from fedloom.algorithms import ALGORITHMS
from fedloom.errors import InputError


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_says_what_it_is_for_and_what_its_keys_are(name: str) -> None:
    entry = catalogue.entry(name)
    assert entry.summary.endswith(".")
    assert set(entry.fields) == set(ALGORITHMS[name].model_fields) - {"train"}
    assert all(kind and default for kind, default in entry.fields.values())
    assert "←" in entry.summary + entry.details, "there is no formula"
    assert entry.reference or name in ("pooled", "local"), "there is no paper"
    assert entry.secure.startswith(("yes:", "no:", "not federated"))
    assert entry.network.startswith(("yes", "no"))


def test_an_unknown_algorithm_is_an_error_with_a_hint() -> None:
    with pytest.raises(InputError, match="Did you mean 'fedprox'"):
        catalogue.entry("fedprx")
