"""Robust rules and attacks against those of byzfl, on the same vectors. Runs only where byzfl is installed.

byzfl's Krum and Multi-Krum add up n − f − 1 distances, and those of the paper n − f − 2: its f + 1 is our f. byzfl has
no Bulyan. Its geometric median starts elsewhere and stops after a number of steps, so both are run until they converge.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedloom.aggregation.robust import robust
from fedloom.audits import poisoning

pytestmark = [
    pytest.mark.crosscheck,
    pytest.mark.skipif(importlib.util.find_spec("byzfl") is None, reason="byzfl is not installed: make crosscheck"),
    pytest.mark.filterwarnings("ignore"),  # byzfl and what it loads warn about themselves
]

Vectors = NDArray[np.float64]
CLIENTS, WIDTH, WRONG = 15, 40, 3


def vectors(seed: int) -> Vectors:
    """Changes of clients, of which some are far off."""
    drawn = np.random.default_rng(seed).normal(size=(CLIENTS, WIDTH))
    drawn[:WRONG] = 3.0 * drawn[:WRONG] + 2.0
    return drawn


# our rule → byzfl's
RULES: dict[str, tuple[dict[str, Any], Callable[[Any], Callable[[Vectors], Vectors]]]] = {
    "median": ({}, lambda byzfl: byzfl.Median()),
    "trimmed_mean": ({"trim": WRONG}, lambda byzfl: byzfl.TrMean(WRONG)),
    "krum": ({"byzantine": WRONG}, lambda byzfl: byzfl.Krum(WRONG + 1)),
    "multi_krum": ({"byzantine": WRONG, "keep": CLIENTS - WRONG - 1}, lambda byzfl: byzfl.MultiKrum(WRONG + 1)),
    "geometric_median": ({"iterations": 5000, "tolerance": 1e-10}, lambda byzfl: byzfl.GeometricMedian(1e-10, 5000)),
    "centred_clipping": ({"radius": 2.0, "iterations": 4}, lambda byzfl: byzfl.CenteredClipping(None, 4, 2.0)),
    "norm_bounding": (
        {"bound": 3.0},
        lambda byzfl: lambda given: byzfl.Average()(np.array(byzfl.Clipping(3.0)(given))),
    ),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", RULES)
def test_a_rule_agrees(name: str, seed: int) -> None:
    import byzfl

    settings, theirs = RULES[name]
    rule = robust({"name": name, **settings})
    ours = rule({"w": torch.from_numpy(vectors(seed))}, torch.ones(CLIENTS, dtype=torch.float64))["w"]
    np.testing.assert_allclose(ours.numpy(), theirs(byzfl)(vectors(seed)), atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_attacks_agree(seed: int) -> None:
    import byzfl

    given = vectors(seed)
    others, own = torch.from_numpy(given[WRONG:]), torch.from_numpy(given[:WRONG])
    factor = 1.5 * len(others) / len(own)
    # byzfl's "a little is enough" moves the mean upwards, and the one of the paper downwards
    theirs = {
        poisoning.sign_flip: byzfl.SignFlipping(),
        poisoning.inner_product: byzfl.InnerProductManipulation(factor),
        poisoning.a_little_is_enough: byzfl.ALittleIsEnough(-1.5),
    }
    for ours, attack in theirs.items():
        for sent in ours(others, own).numpy():
            np.testing.assert_allclose(sent, attack(given[WRONG:]), atol=1e-6)
