"""Robust rules against brute force."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.aggregation import robust
from fedloom.algorithms import FedAvg
from fedloom.errors import InputError
from tests.aggregation.rules_by_hand import (
    CENTRED,
    EVERY_RULE,
    WIDTH,
    apply,
    bulyan,
    bulyan_of,
    centred_clipping,
    chosen_by_bulyan,
    coarse,
    drawn,
    drawn_weights,
    krum,
    median,
    multi_krum,
    norm_bounding,
    rule,
    seeds,
    sum_of_distances,
    trimmed_mean,
    weighted_distance_optimum,
)


@given(seeds, st.integers(1, 9))
def test_median(seed: int, clients: int) -> None:
    for x in (drawn(seed, clients), coarse(seed, clients)):
        np.testing.assert_allclose(apply("median", x, drawn_weights(seed, clients)), median(x), rtol=1e-12, atol=1e-14)


@given(seeds, st.integers(1, 9), st.integers(0, 4))
def test_trimmed_mean(seed: int, clients: int, trim: int) -> None:
    x = drawn(seed, clients)
    if 2 * trim >= clients:
        with pytest.raises(InputError):
            apply("trimmed_mean", x, trim=trim)
        return
    for x in (drawn(seed, clients), coarse(seed, clients)):
        found = apply("trimmed_mean", x, drawn_weights(seed, clients), trim=trim)
        np.testing.assert_allclose(found, trimmed_mean(x, trim), rtol=1e-12, atol=1e-14)


@given(seeds, st.integers(1, 3), st.integers(0, 4))
def test_krum(seed: int, byzantine: int, more: int) -> None:
    x = drawn(seed, 2 * byzantine + 3 + more)
    found = apply("krum", x, drawn_weights(seed, len(x)), byzantine=byzantine)
    np.testing.assert_array_equal(found, krum(x, byzantine))


@given(seeds, st.integers(1, 3), st.integers(0, 4), st.integers(1, 5) | st.none())
def test_multi_krum(seed: int, byzantine: int, more: int, keep: int | None) -> None:
    x = drawn(seed, 2 * byzantine + 3 + more)
    found = apply(
        "multi_krum", x, drawn_weights(seed, len(x)), byzantine=byzantine, **({} if keep is None else {"keep": keep})
    )
    np.testing.assert_allclose(found, multi_krum(x, byzantine, keep), rtol=1e-12, atol=1e-14)


def test_multi_krum_that_keeps_one_is_krum() -> None:
    x = drawn(1, 8)
    np.testing.assert_allclose(apply("multi_krum", x, byzantine=2, keep=1), apply("krum", x, byzantine=2), rtol=1e-15)


@given(seeds, st.integers(1, 2), st.integers(0, 4))
def test_bulyan(seed: int, byzantine: int, more: int) -> None:
    x = drawn(seed, 4 * byzantine + 3 + more)
    found = apply("bulyan", x, drawn_weights(seed, len(x)), byzantine=byzantine)
    np.testing.assert_allclose(found, bulyan(x, byzantine), rtol=1e-12, atol=1e-14)


@given(seeds, st.integers(1, 8))
@settings(max_examples=40)
def test_geometric_median(seed: int, clients: int) -> None:
    x = drawn(seed, clients)
    for weights in (np.ones(clients), drawn_weights(seed, clients)):
        found = apply("geometric_median", x, weights, iterations=2000, tolerance=1e-12)
        reached = sum_of_distances(x, weights, found)
        assert reached <= weighted_distance_optimum(x, weights) * (1 + 1e-4) + 1e-5


def test_the_geometric_median_of_a_line_and_of_a_majority() -> None:
    line = np.zeros((3, WIDTH))
    line[:, 0] = [0.0, 1.0, 10.0]
    np.testing.assert_allclose(apply("geometric_median", line), line[1], atol=1e-2)
    majority = np.ones((5, WIDTH))
    majority[3:] = drawn(2, 2, 100.0)
    np.testing.assert_allclose(apply("geometric_median", majority), np.ones(WIDTH), atol=1e-3)


@given(seeds, st.integers(1, 8), st.sampled_from([0.1, 1.0, 10.0]), st.integers(1, 4))
def test_centred_clipping(seed: int, clients: int, radius: float, iterations: int) -> None:
    x = drawn(seed, clients)
    found = apply("centred_clipping", x, radius=radius, iterations=iterations)
    np.testing.assert_allclose(found, centred_clipping(x, radius, iterations), rtol=1e-9, atol=1e-12)


def test_centred_clipping_counts_clients_not_the_examples_they_claim_to_have() -> None:
    x, weights = drawn(0, 6), drawn_weights(0, 6)
    found = apply("centred_clipping", x, weights, radius=1.0, iterations=3)
    np.testing.assert_allclose(found, centred_clipping(x, 1.0, 3), rtol=1e-9, atol=1e-12)


@given(seeds, st.integers(1, 8), st.sampled_from([0.1, 1.0, 10.0]))
def test_norm_bounding(seed: int, clients: int, bound: float) -> None:
    x, weights = drawn(seed, clients), drawn_weights(seed, clients)
    found = apply("norm_bounding", x, weights, bound=bound)
    np.testing.assert_allclose(found, norm_bounding(x, weights, bound), rtol=1e-9, atol=1e-12)


# --- what they refuse


@pytest.mark.parametrize(
    ("name", "clients", "parameters"),
    [
        ("krum", 4, {"byzantine": 1}),
        ("krum", 6, {"byzantine": 2}),
        ("multi_krum", 4, {"byzantine": 1}),
        ("multi_krum", 5, {"byzantine": 1, "keep": 6}),
        ("bulyan", 6, {"byzantine": 1}),
        ("bulyan", 10, {"byzantine": 2}),
        ("trimmed_mean", 4, {"trim": 2}),
        ("trimmed_mean", 3, {"trim": 2}),
    ],
)
def test_too_few_clients_are_refused(name: str, clients: int, parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError) as said:
        apply(name, drawn(0, clients), **parameters)
    assert str(clients) in str(said.value), f"the message does not say how many clients there are: {said.value}"


@pytest.mark.parametrize(
    ("name", "clients", "parameters"),
    [("krum", 5, {"byzantine": 1}), ("bulyan", 7, {"byzantine": 1}), ("trimmed_mean", 3, {"trim": 1})],
)
def test_just_enough_clients_are_taken(name: str, clients: int, parameters: dict[str, Any]) -> None:
    assert np.isfinite(apply(name, drawn(0, clients), **parameters)).all()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("trimmed_mean", {"trim": -1}),
        ("krum", {"byzantine": -1}),
        ("multi_krum", {"byzantine": -1}),
        ("multi_krum", {"byzantine": 1, "keep": 0}),
        ("bulyan", {"byzantine": -1}),
        ("geometric_median", {"iterations": 0}),
        ("geometric_median", {"tolerance": 0.0}),
        ("centred_clipping", {"radius": 0.0}),
        ("centred_clipping", {"iterations": 0}),
        ("norm_bounding", {"bound": -1.0}),
        ("median", {"trim": 1}),
    ],
)
def test_bad_parameters_are_refused_when_the_rule_is_made(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"parameter"):
        rule(name, **parameters)


# --- what holds for any input


def test_no_rule_is_forgotten() -> None:
    assert EVERY_RULE.keys() == robust.RULES.keys()


@pytest.mark.parametrize("name", sorted(EVERY_RULE.keys() - {"bulyan"}))
@given(seed=seeds, clients=st.integers(7, 9))
@settings(max_examples=25)
def test_the_order_of_clients_does_not_matter(name: str, seed: int, clients: int) -> None:
    x, weights = drawn(seed, clients), drawn_weights(seed, clients)
    order = np.random.default_rng(seed).permutation(clients)
    one = apply(name, x, weights, **EVERY_RULE[name])
    other = apply(name, x[order], weights[order], **EVERY_RULE[name])
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


@given(seed=seeds, clients=st.integers(7, 9))
@settings(max_examples=25)
def test_the_order_of_clients_decides_ties_in_bulyan_and_nothing_else(seed: int, clients: int) -> None:
    # where one neighbour is left to count, two changes that are each other's nearest always have the same score
    x = drawn(seed, clients)
    order = np.random.default_rng(seed).permutation(clients)
    found = apply("bulyan", x[order], byzantine=1)
    allowed = [bulyan_of(x, chosen, 1) for chosen in chosen_by_bulyan(x, 1)]
    assert any(np.allclose(found, outcome, rtol=1e-9, atol=1e-12) for outcome in allowed)


@pytest.mark.parametrize("name", sorted(EVERY_RULE.keys() - CENTRED))
@given(seed=seeds, clients=st.integers(7, 9))
@settings(max_examples=25)
def test_a_common_shift_is_kept(name: str, seed: int, clients: int) -> None:
    x, shift = drawn(seed, clients), drawn(seed + 1, 1, 3.0)[0]
    one = apply(name, x + shift, **EVERY_RULE[name])
    np.testing.assert_allclose(one, apply(name, x, **EVERY_RULE[name]) + shift, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", EVERY_RULE)
@given(seed=seeds)
@settings(max_examples=25)
def test_one_outlier_does_not_move_the_result_far(name: str, seed: int) -> None:
    x = drawn(seed, 9)
    worst = max(float(np.linalg.norm(a - b)) for a, b in combinations(x[:8], 2))
    x[8] = 1e6 * x[8] / np.linalg.norm(x[8])
    moved = np.linalg.norm(apply(name, x, **EVERY_RULE[name]) - x[:8].mean(0))
    assert moved <= worst


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum", "multi_krum", "bulyan"])
def test_an_infinite_change_is_an_outlier_like_any_other(name: str) -> None:
    x = drawn(3, 9)
    x[4, 1] = np.inf
    assert np.isfinite(apply(name, x, **EVERY_RULE[name])).all()


@pytest.mark.parametrize("name", EVERY_RULE)
def test_equal_changes_stay_what_they_are(name: str) -> None:
    x = np.tile(drawn(5, 1, 0.1), (7, 1))
    np.testing.assert_allclose(apply(name, x, **EVERY_RULE[name]), x[0], rtol=1e-9)


@pytest.mark.parametrize("name", EVERY_RULE)
def test_no_change_at_all_stays_none(name: str) -> None:
    np.testing.assert_allclose(apply(name, np.zeros((7, WIDTH)), **EVERY_RULE[name]), 0.0, atol=1e-12)


def test_unknown_rules_are_refused_with_what_is_known() -> None:
    with pytest.raises(InputError, match="median"):
        FedAvg(rule="medain")
    with pytest.raises(InputError, match="byzantine"):
        FedAvg(rule={"name": "krum", "byzantime": 1})


def test_counters_are_averaged_whatever_the_rule() -> None:
    stacked = {"w": torch.from_numpy(drawn(1, 7)), "steps": torch.tensor([1, 2, 3, 4, 5, 6, 7])}
    for name, parameters in EVERY_RULE.items():
        found = rule(name, **parameters)(stacked, torch.ones(7, dtype=torch.float64))
        assert found["steps"].dtype == torch.int64
        assert int(found["steps"]) == 4


@pytest.mark.parametrize("value", [3, [1], {"name": [1]}, {"byzantine": 1}])
def test_what_is_not_a_rule_is_refused_in_words(value: Any) -> None:
    with pytest.raises(InputError, match='A rule is a name, such as "median", or a table with a name'):
        FedAvg(rule=value)
