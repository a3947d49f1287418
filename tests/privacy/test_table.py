"""The table [privacy] of an experiment file."""

from __future__ import annotations

from typing import Any

import pytest

from fedloom.errors import InputError
from fedloom.experiment.description import identity
from fedloom.experiment.experiment_file import parse


def test_a_file_without_the_table_keeps_its_identity() -> None:
    assert "privacy" not in parse({}).description()


@pytest.mark.parametrize(
    "table", [{"secure_aggregation": {}}, {"dp": {"epsilon": 2.0, "clip": 1.0}}, {"example_dp": {"epsilon": 2.0}}]
)
def test_a_protection_is_part_of_the_identity(table: dict[str, Any]) -> None:
    assert identity(parse({"privacy": table}).description()) != identity(parse({}).description())


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"secure": {}}, r"\[privacy\] has no key 'secure'"),
        ({"secure_aggregation": {"threshold": 1.5}}, "threshold"),
        ({"secure_aggregation": {"min_clients": 1}}, "min_clients"),
        ({"dp": {"epsilon": 0}}, "epsilon"),
        ({"dp": {"clip": 1.0}}, "needs an epsilon"),
        ({"dp": {"epsilon": 1.0, "delta": 1.0}}, "delta"),
        ({"example_dp": {"delta": 1.0}}, "delta"),
        ({"dp": {"epsilon": 1.0, "noise": "distributed"}}, "needs secure_aggregation"),
        (
            {"secure_aggregation": {}, "dp": {"epsilon": 1.0, "clip": 1.0, "noise": "distributed", "correlated": True}},
            'correlated = true needs noise = "server"',
        ),
        ({"dp": {"epsilon": 1.0, "colluders": 0.2}}, 'colluders is about noise = "distributed"'),
        ({"secure_aggregation": {}, "dp": {"epsilon": 1.0, "noise": "distributed", "colluders": 1.0}}, "colluders"),
        ({"dp": {"clip": "some"}}, "clip"),
        (
            {"dp": {"correlated": True, "clip": 1.0, "epsilon": 1.0, "noise_multiplier": 1.0}},
            "takes an epsilon or a noise_multiplier, not both",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named(table: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse({"privacy": table})


def test_a_protection_that_is_switched_on_with_true_is_answered_with_its_table() -> None:
    with pytest.raises(InputError, match=r"must be a table\. Got True instead\. Write secure_aggregation = \{\}\."):
        parse({"privacy": {"secure_aggregation": True}})
