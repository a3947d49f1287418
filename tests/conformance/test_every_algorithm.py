"""Every algorithm that fedloom knows keeps what algorithms promise. There is no list to forget: the registry is one."""

from typing import Any

import pytest

from fedloom.algorithms import ALGORITHMS
from fedloom.testing import check_algorithm

# settings that make an algorithm take another way than its defaults do
OTHER_WAYS: list[tuple[str, dict[str, Any]]] = [
    ("evaluation_weighted", {"metric": "loss"}),
    ("selective", {"metric": "loss", "scores": "pre"}),
    ("selective", {"metric": "loss", "rule": "median"}),
    ("fedavg", {"optimizer": "adam", "lr": 0.01, "optimizer_state": "keep"}),
    ("fedavg", {"patience": 1, "epochs": 3.0, "clip": 0.5}),
    ("fedavg", {"rule": "median"}),
    ("fedprox", {"rule": {"name": "trimmed_mean", "trim": 0}}),
    ("fedbn", {"rule": "geometric_median"}),
    ("scaffold", {"rule": "norm_bounding"}),
    ("fednova", {"rule": "centred_clipping"}),
    ("ifca", {"rule": "median"}),
    ("fedadam", {"bias_correction": True, "rule": "centred_clipping"}),
    ("fednova", {"momentum": 0.9}),
    ("peer", {"weights": "score", "metric": "loss", "topology": "ring"}),
    ("peer", {"weights": "within_std", "metric": "loss", "scores": "pre"}),
    ("peer", {"weights": "metropolis", "topology": "erdos_renyi", "redraw": True}),
    ("ifca", {"clusters": 3}),
    ("neuroevolution", {"crossover": "filterwise", "mutation": "offset", "examples": "one", "fitness": "loss"}),
]


# one for each kind: sums, steps of the server, states that clients keep, models of their own, peers, no gradients
FIRST = ("fedavg", "fedadam", "scaffold", "ditto", "peer", "snes")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.slow]) for name in ALGORITHMS]
)
def test_it_keeps_its_promises(name: str) -> None:
    check_algorithm(ALGORITHMS[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [pytest.param(*way, id=f"{way[0]}-{way[1]}") for way in OTHER_WAYS])
def test_it_keeps_its_promises_with_other_settings(name: str, settings: dict[str, Any]) -> None:
    if name not in ALGORITHMS:
        pytest.skip(f"fedloom has no algorithm '{name}' yet")
    check_algorithm(ALGORITHMS[name], settings=settings)


@pytest.mark.slow
def test_it_keeps_its_promises_on_two_processes() -> None:
    check_algorithm(ALGORITHMS["scaffold" if "scaffold" in ALGORITHMS else "fedavg"], workers=2)
