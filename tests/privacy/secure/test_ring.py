"""Sums of fixed-point numbers are exact, and a client refuses what does not fit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import InputError, RoundAbandoned
from fedloom.privacy.secure.ring import Ring, RingConfig, dtypes_of, means
from fedloom.privacy.secure.session import Refusal

LIKE = {"model": {"w": torch.zeros(3), "count": torch.zeros((), dtype=torch.int64)}}
BASE = {"model": {"w": torch.tensor([1.0, -2.0, 0.5]), "count": torch.tensor(7)}}


def decode(found: Ring, total: np.ndarray, clients: int, bases: dict) -> tuple:  # type: ignore[type-arg]
    """The server's half: means and sums of weights."""
    sums, weights = found.sums(total, clients)
    return means(sums, weights, bases, dtypes_of(found.like)), weights


def ring(**changes) -> Ring:  # type: ignore[no-untyped-def]
    values = {"range": 4.0, "clients": 10, "weight_bound": 1, **changes}
    return Ring(RingConfig(**values), LIKE)


def update(*values: float, count: int = 8) -> dict:  # type: ignore[type-arg]
    return {"model": {"w": torch.tensor(values), "count": torch.tensor(count)}}


@given(
    st.floats(1e-6, 1e6),
    st.integers(1, 10_000),
    st.integers(1, 10_000),
    st.sampled_from([32, 64]),
)
def test_the_scale_is_the_largest_power_of_two_that_cannot_overflow(range_, clients, weight, bits) -> None:
    scale = RingConfig(range_, clients, weight, bits).scale("model", bits)
    assert math.frexp(scale)[0] == 0.5
    assert clients * weight * math.ceil(range_ * scale) < 2 ** (bits - 1) or scale < 1
    assert clients * weight * math.ceil(2 * range_ * scale) >= 2 ** (bits - 1) or scale == 2**40


def test_the_design_s_settings_are_as_exact_as_it_says() -> None:
    """100 clients with equal weights in 32 bits: an error below 1.2e-7; weights up to 1,000 need 64 bits."""
    equal = Ring(RingConfig(1.0, 100, 1), LIKE)
    assert equal.bits == 32
    assert 0.5 / equal.scales["model"] < 1.2e-7
    weighted = Ring(RingConfig(1.0, 100, 1000), LIKE)
    assert weighted.bits == 64
    assert weighted.scales["model"] >= 2**24


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.lists(st.floats(-4, 4, width=32), min_size=3, max_size=3)), min_size=1),
    st.sampled_from(["auto", 64]),
)
def test_the_mean_of_the_sum_is_the_weighted_mean_to_half_a_step(clients, bits) -> None:
    found = Ring(RingConfig(4.0, len(clients), 50, bits), {"model": {"w": torch.zeros(3)}})
    base = {"model": {"w": torch.zeros(3, dtype=torch.float32)}}
    total = np.zeros(found.size, found.dtype)
    for weight, values in clients:
        total += found.encode({"model": {"w": torch.tensor(values)}}, {"model": float(weight)}, base)
    mean, weights = decode(found, total, len(clients), base)
    exact = np.average([v for _, v in clients], axis=0, weights=[w for w, _ in clients])
    assert weights["model"] == sum(weight for weight, _ in clients)
    assert np.abs(mean["model"]["w"].double().numpy() - exact).max() <= 0.5 / found.scales["model"] + 2.4e-7


def test_positions_are_sent_as_changes_and_whole_numbers_are_exact() -> None:
    found = ring()
    sent = [update(1.5, -2.0, 0.5, count=9), update(1.0, -1.0, 0.5, count=11)]
    total = sum(found.encode(one, {"model": 1.0}, BASE) for one in sent)
    mean, weights = decode(found, total, 2, BASE)
    assert mean["model"]["w"].tolist() == [1.25, -1.5, 0.5]
    assert mean["model"]["w"].dtype == torch.float32
    assert mean["model"]["count"] == 10
    assert mean["model"]["count"].dtype == torch.int64
    assert weights["model"] == 2.0


def test_changes_start_from_zero() -> None:
    found = ring()
    total = found.encode(update(1.5, -2.0, 0.5, count=9), {"model": 1.0}, {})
    assert decode(found, total, 1, {})[0]["model"]["w"].tolist() == [1.5, -2.0, 0.5]


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool])
def test_every_kind_of_leaf_comes_back_as_it_is(kind: torch.dtype) -> None:
    leaf = torch.tensor([1.0, 0.0]).to(kind) if kind != torch.complex64 else torch.tensor([1.0 + 2.0j, 0.5j])
    like, base = {"g": {"x": leaf}}, {"g": {"x": torch.zeros_like(leaf)}}
    found = Ring(RingConfig(4.0, 3, 1), like)
    mean, _ = decode(found, found.encode(like, {"g": 1.0}, base), 1, base)
    assert mean["g"]["x"].dtype == kind
    assert torch.equal(mean["g"]["x"], leaf)


def test_infinities_that_do_not_change_stay() -> None:
    leaf = {"g": {"x": torch.tensor([-math.inf, 1.0])}}
    found = Ring(RingConfig(4.0, 3, 1), leaf)
    mean, _ = decode(found, found.encode(leaf, {"g": 1.0}, leaf), 1, leaf)
    assert mean["g"]["x"].tolist() == [-math.inf, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 4.01, -4.01])
def test_a_value_that_is_not_finite_or_out_of_range_is_refused_and_never_clipped(value: float) -> None:
    with pytest.raises(Refusal, match=r"a number of 'model' \(w\) is out of the range 4: nothing was sent"):
        ring().encode(update(0.0, 0.0, value), {"model": 1.0}, {})


@pytest.mark.parametrize("range_", [4.0, 0.1, 1 / 3, 2e8])
def test_the_range_itself_is_allowed_for_all_clients(range_: float) -> None:
    found = Ring(RingConfig(range_, 10, 1, bits=32), {"g": {"x": torch.zeros(2, dtype=torch.float64)}})
    sent = {"g": {"x": torch.tensor([range_, -range_], dtype=torch.float64)}}
    total = sum(found.encode(sent, {"g": 1.0}, {}) for _ in range(10))
    assert decode(found, total, 10, {})[0]["g"]["x"].tolist() == pytest.approx([range_, -range_], abs=1)


def test_a_whole_number_that_could_overflow_is_refused() -> None:
    largest = (2**31 - 1) // 10
    found = ring()
    total = sum(found.encode(update(0.0, 0.0, 0.0, count=largest), {"model": 1.0}, {}) for _ in range(10))
    assert decode(found, total, 10, {})[0]["model"]["count"] == largest
    with pytest.raises(Refusal, match=r"'model' \(count\)"):
        found.encode(update(0.0, 0.0, 0.0, count=largest + 1), {"model": 1.0}, {})


@pytest.mark.parametrize("weight", [0.0, 0.5, -1.0, 6.0, math.nan, math.inf])
def test_a_weight_that_is_not_whole_or_out_of_bounds_is_refused(weight: float) -> None:
    with pytest.raises(Refusal, match="must be a whole number from 1 to 5"):
        ring(weight_bound=5).encode(update(0.0, 0.0, 0.0), {"model": weight}, {})


def test_an_update_with_other_leaves_is_refused() -> None:
    with pytest.raises(Refusal, match="other groups or leaves"):
        ring().encode({"model": {"w": torch.zeros(3)}}, {"model": 1.0}, {})


def test_each_group_can_have_its_range() -> None:
    like = {"model": {"w": torch.zeros(1)}, "fitness": {"f": torch.zeros(1)}}
    config = RingConfig({"model": 1.0, "fitness": 1000.0}, 10, 1, bits=32)
    scales = Ring(config, like).scales
    assert scales["model"] == 2**27
    assert scales["fitness"] == 2**17
    with pytest.raises(
        InputError, match=r"no range for the group 'modle'. Known: fitness, model. Did you mean 'model'"
    ):
        config.range_of("modle")


def test_bits_that_are_too_few_are_refused() -> None:
    with pytest.raises(InputError, match="bits = 32 is too few for 1000 clients with weights up to 1000000"):
        _ = ring(clients=1000, weight_bound=1_000_000, bits=32).scales


def test_a_sum_that_no_clients_can_have_made_abandons_the_round() -> None:
    found = ring()
    total = found.encode(update(1.0, 1.0, 1.0), {"model": 1.0}, {})
    with pytest.raises(RoundAbandoned, match="sum of the weights of 'model' is 1 for 2 clients"):
        decode(found, total, 2, {})
    total[1] += np.uint32(2**30)
    with pytest.raises(RoundAbandoned, match=r"sum of 'model' \(w\) is larger than its clients' range"):
        decode(found, total, 1, {})


def test_updates_without_leaves_are_empty_vectors() -> None:
    found = Ring(RingConfig(4.0, 3, 1), {})
    assert found.encode({}, {}, {}).size == 0 == found.size
    assert decode(found, np.zeros(0, found.dtype), 3, {}) == ({}, {})
