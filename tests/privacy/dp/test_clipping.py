"""Clipping bounds a client's whole change, and an adaptive bound finds the median of the norms."""

import math

import numpy as np
import pytest
import torch

from fedloom.errors import InputError
from fedloom.privacy.dp.clipping import change_multiplier, clip_jointly, indicator_deviation, joint_norm, next_clip


def stacked() -> dict[str, dict[str, torch.Tensor]]:
    """Three clients with norms 13, 1.3 and 0."""
    unit = torch.tensor([1.0, 0.1, 0.0])
    return {
        "model": {"w": unit[:, None, None] * torch.tensor([[3.0], [0.0]]), "b": unit[:, None] * 4.0},
        "control": {"w": unit[:, None] * 12.0, "count": torch.tensor([[7], [8], [9]])},
    }


def test_the_norm_is_over_all_floating_leaves_of_all_groups() -> None:
    assert joint_norm(stacked()).tolist() == pytest.approx([13.0, 1.3, 0.0])


def test_a_long_change_is_scaled_as_a_whole_and_a_short_one_is_left_alone() -> None:
    clipped, within = clip_jointly(stacked(), 6.5)
    assert within.tolist() == [False, True, True]
    assert clipped["model"]["b"][0].item() == pytest.approx(2.0, rel=1e-5)
    assert clipped["control"]["w"][0].item() == pytest.approx(6.0, rel=1e-5)
    for group, leaves in stacked().items():
        for name, leaf in leaves.items():
            assert torch.equal(clipped[group][name][1:], leaf[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_no_change_is_longer_than_the_bound_even_by_rounding(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    changes = {"model": {"w": (torch.randn(500, 1000, generator=generator) * 3).to(dtype)}}
    for most in (0.1, 1.0, 7.3):
        clipped, _ = clip_jointly(changes, most)
        assert float(joint_norm(clipped).max()) <= most


def test_a_change_that_is_not_finite_counts_as_too_long_and_becomes_zero() -> None:
    changes = {"model": {"w": torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [0.5, 0.0]])}}
    clipped, within = clip_jointly(changes, 1.0)
    assert clipped["model"]["w"].tolist() == [[0.0, 0.0], [0.0, 0.0], [0.5, 0.0]]
    assert within.tolist() == [False, False, True]


@pytest.mark.parametrize("start", [0.1, 5.0])
def test_an_adaptive_bound_settles_near_the_median_norm(start: float) -> None:
    """With norms near 1, the bound must come to about 1 from below and from above."""
    generator, expected = np.random.default_rng(1), 200
    clip = start
    for _ in range(300):
        norms = generator.normal(1.0, 0.1, generator.binomial(2000, 0.1))
        within = (norms <= clip).astype(float)
        noise = generator.normal(0, indicator_deviation(expected))
        clip = next_clip(clip, float((within - 0.5).sum() + noise), expected)
    assert clip == pytest.approx(1.0, abs=0.1)


def test_a_bound_that_is_too_large_shrinks_and_one_that_is_too_small_grows() -> None:
    everybody_short, nobody_short = 50.0, -50.0
    assert next_clip(1.0, everybody_short, 100) == pytest.approx(math.exp(-0.1))
    assert next_clip(1.0, nobody_short, 100) == pytest.approx(math.exp(0.1))


def test_both_releases_together_cost_what_the_noise_multiplier_says() -> None:
    z, expected = 1.2, 100.0
    of_changes, of_count = change_multiplier(z, expected), 2 * indicator_deviation(expected)
    assert of_changes > z
    assert of_changes**-2 + of_count**-2 == pytest.approx(z**-2)


def test_a_cohort_too_small_for_the_count_leaves_nothing_for_the_changes() -> None:
    with pytest.raises(InputError, match="needs more clients in a round than 10 × the noise multiplier 1, and 10 are"):
        change_multiplier(1.0, 10.0)
    assert math.isfinite(change_multiplier(1.0, 10.1))
