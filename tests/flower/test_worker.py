"""The worker beside a SuperNode."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from fedloom.flower.messages import Payload
from tests.flower.conftest import Grids


def test_nonsense_does_not_end_a_worker(fake_grid: Grids) -> None:
    made, _ = fake_grid()
    for header, words in (
        ({"plan": {}}, "the coordinator's plan is malformed"),
        ({"nonsense": 1}, "KeyError"),
        ({"run": "unknown", "ask": {}}, "work of an unknown run"),
    ):
        assert words in made.nodes[7](Payload(header)).header["failure"]
