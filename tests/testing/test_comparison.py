"""A comparison measures how far a way to compute is from the plain loop, and says in a sentence what is wrong."""

import re
from dataclasses import replace

import torch

from fedloom.backends.serial import Serial
from fedloom.task import Task
from fedloom.testing.comparison import Comparison, Found
from fedloom.testing.ways import Way
from fedloom.training.settings import Training
from tests.conftest import Dense, federation

DATA = federation((9, 14))
TASK = Task(Dense, dtype="float64")


def a_comparison() -> Comparison:
    return Comparison(TASK, DATA, Training(lr=0.5, batch_size=4), rounds=1)


def serial() -> Serial:
    return Serial(DATA, replace(TASK))


def test_only_what_is_wrong_has_a_sentence() -> None:
    assert Found("serial", far=1e-12).sentence == ""
    assert Found("serial", wrong="other bits.").sentence == "serial: other bits."


def test_a_way_that_trains_otherwise_is_told_with_the_leaf_and_the_distance() -> None:
    comparison = a_comparison()
    _ = comparison.reference
    comparison.training = comparison.training.replace(lr=0.25)
    found = comparison.try_out(Way("serial", serial))
    assert found.far > 1e-3
    assert re.fullmatch(
        r"serial: 'out\.\w+' after round 1 differs by .*e-0\d from the plain torch loop\.", found.sentence
    )


def test_a_way_with_other_dtypes_is_told_with_both() -> None:
    comparison = Comparison(
        replace(TASK, dtype="float32"), DATA, Training(lr=0.5, batch_size=4), 1, reference_task=TASK
    )
    wrong = comparison.try_out(Way("serial", lambda: Serial(DATA, comparison.task))).wrong
    assert wrong == "the weights are float32 in 4 leaves, and in torch float64 in 4 leaves."


def test_a_way_that_computes_what_torch_computes_is_close() -> None:
    found = a_comparison().try_out(Way("serial", serial))
    assert found.sentence == ""
    assert found.far < 1e-12


def test_a_way_that_promises_the_bits_of_another_must_have_them() -> None:
    comparison = a_comparison()
    comparison.try_out(Way("first", serial))
    comparison.seed = 2  # other batches, so other weights
    found = comparison.try_out(Way("second", serial, like="first"))
    assert "other bits than 'first': round 1 differs in the server's state" in found.wrong


def test_a_way_that_moves_a_global_generator_is_named() -> None:
    def draws() -> Serial:
        torch.rand(1)
        return serial()

    assert "a global generator is not restored." in a_comparison().try_out(Way("draws", draws)).sentence


def test_a_way_that_fails_is_reported_and_not_raised() -> None:
    def fails() -> Serial:
        raise RuntimeError("no backend")

    assert a_comparison().try_out(Way("fails", fails)).sentence == "fails: RuntimeError: no backend"
