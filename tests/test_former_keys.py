"""Keys of earlier versions."""

from __future__ import annotations

import pytest

from fedloom.algorithms import FedAvg
from fedloom.errors import InputError


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"weights": "score"}, 'name = "evaluation_weighted" instead of weights = "score"'),
        ({"weights": "within_std"}, 'name = "selective" instead of weights = "within_std"'),
        ({"metric": "loss"}, "both have the keys metric and scores"),
        ({"scores": "pre"}, r"got scores = 'pre'"),
        ({"share": "deltas"}, "FedAvg has no 'share': clients send their weights"),
    ],
)
def test_keys_that_moved_to_other_algorithms_are_errors_that_name_them(given: dict[str, str], meant: str) -> None:
    with pytest.raises(InputError, match=meant):
        FedAvg(**given)


def test_keys_that_an_earlier_version_wrote_without_effect_are_left_out() -> None:
    assert FedAvg(metric="accuracy", scores="post", share="weights") == FedAvg()
