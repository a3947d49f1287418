"""A comparison measures how far a way to compute is from the plain loop, and says in a sentence what is wrong."""

import math
from dataclasses import replace

import pytest
import torch

from fedloom.backends.serial import Serial
from fedloom.task import Task
from fedloom.testing.comparison import Comparison, Found, Way, leaf_distance, values_distance
from fedloom.training.schedule import Training
from tests.conftest import Dense, federation

DATA = federation((9, 14))
TASK = Task(Dense, dtype="float64")


def a_comparison() -> Comparison:
    return Comparison(TASK, DATA, Training(lr=0.5, batch_size=4), rounds=1)


def serial(task: Task) -> Serial:
    return Serial(DATA, task)


def test_the_distance_of_leaves_is_a_share_of_the_largest_value() -> None:
    one = torch.tensor([1.0, -4.0])
    assert leaf_distance(one, torch.tensor([1.0, -3.0])) == 0.25
    assert leaf_distance(one / 100, torch.tensor([0.01, 0.06])) == pytest.approx(0.1)  # small values count as they are
    assert leaf_distance(torch.zeros(0), torch.zeros(0)) == 0.0


def test_equal_infinities_agree_and_everything_that_cannot_be_compared_is_infinitely_far() -> None:
    infinite = torch.tensor([math.inf, 1.0])
    assert leaf_distance(infinite, infinite.clone()) == 0.0
    assert leaf_distance(torch.ones(2), torch.tensor([1.0, math.nan])) == math.inf
    assert leaf_distance(torch.ones(2), torch.ones(3)) == math.inf


def test_the_distance_of_named_numbers_needs_the_same_names() -> None:
    assert values_distance({"loss": 10.0, "accuracy": 0.5}, {"loss": 9.0, "accuracy": 0.5}) == pytest.approx(0.1)
    assert values_distance({"loss": 1.0}, {"loss": math.nan}) == math.inf
    assert values_distance({"loss": 1.0}, {}) == math.inf
    assert values_distance({}, {}) == 0.0


def test_only_what_is_wrong_has_a_sentence() -> None:
    good = Found("serial", far=1e-12, where="'out.bias' after round 1")
    assert good.sentence == ""
    assert replace(good, far=0.5).sentence == (
        "serial: 'out.bias' after round 1 differs by 5.0e-01 from the plain torch loop."
    )
    assert replace(good, wrong="other bits.").sentence == "serial: other bits."
    assert Found("serial", error=ValueError("no")).sentence == "serial: ValueError: no"


def test_a_way_that_computes_what_torch_computes_is_close() -> None:
    found = a_comparison().try_out(Way("serial", serial))
    assert found.sentence == ""
    assert found.far < 1e-12


def test_a_way_that_promises_the_bits_of_another_must_have_them() -> None:
    comparison = a_comparison()
    comparison.try_out(Way("first", serial))
    comparison.seed = 2  # other batches, so other weights
    found = comparison.try_out(Way("second", serial, like="first"))
    assert "other bits than 'first' in the weights" in found.wrong


def test_a_way_that_moves_a_global_generator_is_named() -> None:
    def draws(task: Task) -> Serial:
        torch.rand(1)
        return serial(task)

    assert "a global generator is not restored." in a_comparison().try_out(Way("draws", draws)).sentence


def test_a_way_that_fails_is_reported_and_not_raised() -> None:
    def fails(task: Task) -> Serial:
        raise RuntimeError("no backend")

    assert a_comparison().try_out(Way("fails", fails)).sentence == "fails: RuntimeError: no backend"
