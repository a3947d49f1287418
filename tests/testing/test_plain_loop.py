"""The plain loop, which everything is compared with, against numbers computed by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedloom import keys
from fedloom.task import Task
from fedloom.testing.plain_loop import KeyedDropout, evaluate, mean, plain_fedavg
from fedloom.training.settings import Training
from tests.conftest import numbers_federation
from tests.odd.harness import federation
from tests.odd.nets.draws import AddsNoise
from tests.odd.nets.gradients import HasAnUnusedLayer, HasFrozenParameters
from tests.odd.nets.state import CountsItsCalls, DrawsFromNumpy, DrawsFromPython
from tests.test_imports import imported


def line() -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    return module


def test_it_uses_nothing_of_what_it_is_compared_with() -> None:
    forbidden = ("fedloom.training.", "fedloom.federation.", "fedloom.metrics")
    used = imported("fedloom.testing.plain_loop")
    assert used, "the check must see something"
    # its settings, and how global generators are seeded
    assert {name for name in used if name.startswith(forbidden)} == {
        "fedloom.training.generators",
        "fedloom.training.settings",
    }


def test_two_clients_meet_at_the_mean_by_examples() -> None:
    """From w = 1, a step on (x, y) is w − 2 lr x (w x − y): to 0.6 with (1, −1), and to 0.8 with (1, 0), thrice."""
    data = numbers_federation([[1.0]] * 4, [-1.0, 0.0, 0.0, 0.0], [1, 3])
    task = Task(line, loss="mse", metrics=[], dtype="float64")
    (found,) = plain_fedavg(task, data, Training(lr=0.1, batch_size="full"), 1, split="train")
    assert found.weights["weight"].item() == pytest.approx((0.6 + 3 * 0.8) / 4, abs=1e-15)
    assert found.losses == {0: [pytest.approx(4.0)], 1: [pytest.approx(1.0)]}
    assert found.measured["pre_fit"][0] == {"loss": pytest.approx(4.0)}
    assert found.measured["post_fit"][1] == {"loss": pytest.approx(0.64)}


def test_momentum_and_decay_are_torchs() -> None:
    """v ← 0.5 v + (g + 0.1 w) with g = 2 w, w ← w − 0.1 v: v = 2.1, then v = 1.05 + 2.1 · 0.79."""
    data = numbers_federation([[1.0]], [0.0], [1])
    task = Task(line, loss="mse", metrics=[], dtype="float64")
    training = Training(lr=0.1, momentum=0.5, weight_decay=0.1, epochs=2, batch_size="full")
    (found,) = plain_fedavg(task, data, training, 1)
    assert found.weights["weight"].item() == pytest.approx(0.79 - 0.1 * (1.05 + 2.1 * 0.79), abs=1e-15)


def test_a_kept_optimiser_goes_on_where_it_was() -> None:
    data = numbers_federation([[1.0]], [0.0], [1])
    task = Task(line, loss="mse", metrics=[], dtype="float64")
    twice = Training(lr=0.1, momentum=0.5, epochs=2, batch_size="full")
    once = Training(lr=0.1, momentum=0.5, batch_size="full", optimizer_state="keep")
    (expected,) = plain_fedavg(task, data, twice, 1)
    *_, found = plain_fedavg(task, data, once, 2)
    assert torch.equal(found.weights["weight"], expected.weights["weight"])


def test_whole_numbers_are_rounded_and_frozen_ones_untouched() -> None:
    frozen = torch.tensor(0.1, dtype=torch.float64)  # (0.1 + 2 · 0.1) / 3 is another number
    trees = [{"count": torch.tensor(n), "w": frozen, "z": torch.tensor(n * 3j)} for n in (1, 6)]
    found = mean(trees, [1, 2])
    assert found == {"count": torch.tensor(4), "w": frozen, "z": torch.tensor(13j)}
    assert found["count"].dtype == torch.int64


def test_what_has_no_gradient_is_left_alone() -> None:
    training = Training(lr=0.1, momentum=0.9, weight_decay=0.5, batch_size=4)
    for model, names in ((HasAnUnusedLayer, ["unused.weight", "unused.bias"]), (HasFrozenParameters, ["first.weight"])):
        task = Task(model, dtype="float64")
        begin = task.initial()
        (found,) = plain_fedavg(task, federation("features"), training, 1)
        for name, leaf in begin.items():
            close = torch.allclose(leaf, found.weights[name], rtol=1e-15)
            assert close == (name in names or (model is HasFrozenParameters and name == "first.bias"))


def test_every_client_begins_with_a_fresh_model() -> None:
    """Two clients with the same examples, trained in the same order, count the same."""
    data = numbers_federation([[1.0] * 16] * 8, [1.0] * 8, [4, 4])
    task = Task(CountsItsCalls, loss=lambda output, target: output.square().mean(), metrics=[], dtype="float64")
    (found,) = plain_fedavg(task, data, Training(lr=0.1, batch_size=2), 1, split="train")
    assert found.losses[0] == found.losses[1]
    assert found.measured["post_fit"][0] == found.measured["post_fit"][1]


def test_no_generator_is_moved_and_draws_depend_on_the_seed_alone() -> None:
    data = federation("features")
    for model in (AddsNoise, DrawsFromNumpy, DrawsFromPython):
        before = torch.random.get_rng_state(), random.getstate(), repr(np.random.get_state())
        runs = [
            next(plain_fedavg(Task(model, dtype="float64"), data, Training(batch_size=4), 1, seed=seed)).weights
            for seed in (1, 1, 2)
        ]
        assert torch.equal(before[0], torch.random.get_rng_state())
        assert before[1:] == (random.getstate(), repr(np.random.get_state()))
        assert torch.equal(runs[0]["out.weight"], runs[1]["out.weight"])
        assert not torch.equal(runs[0]["out.weight"], runs[2]["out.weight"])


def test_dropout_is_torchs_with_a_mask_from_a_key() -> None:
    values = torch.ones(50, 40, dtype=torch.float64)
    with KeyedDropout(keys.key(1, "dropout")):
        first, second = F.dropout(values, 0.25), F.dropout(values, 0.25)
        channels = F.dropout2d(values.reshape(50, 8, 5, 1), 0.25)
        untouched = F.dropout(values, 0.25, training=False)
        changed = values.clone()
        F.dropout(changed, 0.25, inplace=True)
    with KeyedDropout(keys.key(1, "dropout")):
        again = F.dropout(values, 0.25)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 1 / 0.75}
    assert first.mean().item() == pytest.approx(1.0, abs=0.05)
    assert torch.equal(channels, channels[:, :, :1].expand_as(channels))
    assert torch.equal(untouched, values)
    assert set(changed.unique().tolist()) == {0.0, 1 / 0.75}


def test_a_split_is_measured_in_batches_of_about_one_size() -> None:
    data = numbers_federation([[1.0]] * 5, [0.0, 0.0, 0.0, 3.0, 3.0], [5])
    task = Task(line, loss=lambda output, target: (output.reshape(-1) - target).square().sum(), metrics=[])
    # batches of 3 and 2 rows, with sums of 3 and 8, count by their rows
    assert evaluate(task, task.initial(), data, 0, "train", 3) == {"loss": pytest.approx((3 * 3 + 2 * 8) / 5)}
