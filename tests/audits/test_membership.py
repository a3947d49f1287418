"""Membership inference: against models that remember all, nothing, or one label."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import fedloom as fl
from fedloom.audits.membership import FALSE_ALARMS, Share, infer, membership
from fedloom.data.federation import Federation
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, fit

SCORES = np.random.default_rng(1).normal(size=(2, 400))


def test_the_auc_is_that_of_scikit_learn_with_ties_too() -> None:
    members, others = (SCORES[0] + 0.5).round(1), SCORES[1].round(1)
    expected = roc_auc_score([1] * 400 + [0] * 400, np.concatenate([members, others]))
    assert infer(members, others).auc.value == pytest.approx(expected)


def test_the_interval_of_the_auc_covers_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(2)
    intervals = [infer(draw.normal(1, 1, 80), draw.normal(0, 1, 60)).auc for _ in range(100)]
    truth = 0.7602  # P[N(1, 1) > N(0, 1)]
    assert 88 <= sum(one.low <= truth <= one.high for one in intervals) <= 100
    assert np.mean([one.high - one.low for one in intervals]) == pytest.approx(0.16, abs=0.02)


def test_members_are_found_without_many_false_alarms() -> None:
    members, others = np.arange(1000.0), np.arange(200.0)  # 2 of 200 others may be taken for members
    found = infer(members, others).found
    assert found.value == (1000 - 198) / 1000
    assert found.low <= found.value <= found.high
    assert (others > 197).sum() == FALSE_ALARMS * len(others)


def test_an_attack_that_guesses_finds_nothing() -> None:
    found = infer(*SCORES)
    assert found.auc.low < 0.5 < found.auc.high
    assert found.found.low <= FALSE_ALARMS <= found.found.high


def test_a_share_has_the_interval_of_clopper_and_pearson() -> None:
    assert Share.of(0, 10) == Share(0.0, 0.0, pytest.approx(1 - 0.025**0.1))
    assert Share.of(10, 10) == Share(1.0, pytest.approx(0.025**0.1), 1.0)


def noise(examples: int) -> Federation:
    """Labels without a pattern: what a model knows about them, it has memorised."""
    draw = np.random.default_rng(3)
    x = draw.normal(size=(examples, 40)).astype(np.float32)
    return Federation.from_arrays(x, draw.integers(0, 3, examples), clients=2, split=(0.5, 0.0, 0.5))


def test_a_model_that_memorised_its_examples_is_found_out_and_an_untrained_one_is_not() -> None:
    data, task = noise(400), fl.Task("mlp", args={"features": 40, "classes": 3, "hidden": [64]})
    *_, last = fit(data, task, fl.FedAvg(lr=0.3, epochs=5, batch_size=10), 20, evaluation=Evaluation(splits=()))
    trained, untrained = (membership(task, model, data) for model in (last.state["model"], task.initial()))
    for attack in ("loss", "likelihood ratio"):
        assert trained[attack].auc.low > 0.8
        assert trained[attack].found.value > 0.1
        assert untrained[attack].auc.low < 0.5 < untrained[attack].auc.high
    assert (trained["loss"].members, trained["loss"].others) == (200, 200)
    assert trained["likelihood ratio"].others == 100  # the other half says what is usual


def test_a_regression_is_attacked_by_its_loss_alone() -> None:
    draw = np.random.default_rng(4)
    data = Federation.from_arrays(draw.normal(size=(200, 3)), draw.normal(size=200), clients=2, split=(0.5, 0, 0.5))
    task = fl.Task(torch.nn.Linear, loss="mse", metrics=[], args={"in_features": 3, "out_features": 1})
    assert list(membership(task, task.initial(), data)) == ["loss"]


def test_without_test_examples_there_is_nothing_to_compare_with() -> None:
    data = Federation.from_arrays(np.zeros((40, 3)), np.zeros(40), clients=2, split=(1, 0, 0))
    task = fl.Task(torch.nn.Linear, loss="mse", metrics=[], args={"in_features": 3, "out_features": 1})
    with pytest.raises(InputError, match="at least 16 training and 16 test examples"):
        membership(task, task.initial(), data)
