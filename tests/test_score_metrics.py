"""Metrics of all examples at once, against scikit-learn's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from torch import Tensor

from fedloom import metrics
from fedloom.score_metrics import calibration_error

DRAW = np.random.default_rng(3)
TWO = torch.from_numpy(DRAW.integers(0, 2, 60))
ONE_LOGIT = torch.from_numpy(DRAW.normal(size=60)) + TWO
TWO_LOGITS = torch.stack([torch.zeros(60, dtype=torch.float64), ONE_LOGIT], 1)
FOUR = torch.from_numpy(DRAW.integers(0, 4, 80))
LOGITS = torch.from_numpy(DRAW.normal(size=(80, 4))) + 1.5 * torch.nn.functional.one_hot(FOUR, 4)
LABELS = torch.from_numpy(DRAW.integers(0, 2, (50, 3))).float()
LABEL_LOGITS = torch.from_numpy(DRAW.normal(size=(50, 3))) + LABELS


def measure(name: str, output: Tensor, target: Tensor) -> float:
    metric = metrics.metric(name)
    assert metric.scores is not None
    assert metric.summary is not None
    assert not metric.is_mean
    found = metric.summary(metric.scores(output, target).numpy(), target.numpy())
    low, high = metric.range
    assert math.isnan(found) or low <= found <= high
    return found


@pytest.mark.parametrize("output", [ONE_LOGIT, ONE_LOGIT[:, None], TWO_LOGITS])
def test_two_classes_are_about_the_second_one(output: Tensor) -> None:
    truth, chosen = TWO.numpy(), (ONE_LOGIT > 0).numpy()
    assert measure("f1", output, TWO) == pytest.approx(sk.f1_score(truth, chosen))
    assert measure("precision", output, TWO) == pytest.approx(sk.precision_score(truth, chosen))
    assert measure("recall", output, TWO) == measure("sensitivity", output, TWO)
    assert measure("recall", output, TWO) == pytest.approx(sk.recall_score(truth, chosen))
    assert measure("specificity", output, TWO) == pytest.approx(sk.recall_score(truth, chosen, pos_label=0))
    assert measure("specificity", output, TWO) == measure("recall_of_0", output, TWO)
    assert measure("f1_of_0", output, TWO) == pytest.approx(sk.f1_score(truth, chosen, pos_label=0))
    assert measure("f1_macro", output, TWO) == pytest.approx(sk.f1_score(truth, chosen, average="macro"))
    assert measure("f1_micro", output, TWO) == pytest.approx(sk.accuracy_score(truth, chosen))
    assert measure("balanced_accuracy", output, TWO) == pytest.approx(sk.balanced_accuracy_score(truth, chosen))
    assert measure("auroc", output, TWO) == pytest.approx(sk.roc_auc_score(truth, ONE_LOGIT))
    assert measure("auprc", output, TWO) == pytest.approx(sk.average_precision_score(truth, ONE_LOGIT))
    assert measure("auprc_of_0", output, TWO) == pytest.approx(sk.average_precision_score(1 - truth, -ONE_LOGIT))


@pytest.mark.parametrize("name", ["f1", "precision", "recall"])
@pytest.mark.parametrize("average", ["macro", "micro", 2])
def test_several_classes(name: str, average: Any) -> None:
    theirs = getattr(sk, f"{name}_score")
    chosen = LOGITS.argmax(1)
    if average == 2:
        expected = theirs(FOUR, chosen, average=None)[2]
        assert measure(f"{name}_of_2", LOGITS, FOUR) == pytest.approx(expected)
    else:
        assert measure(f"{name}_{average}", LOGITS, FOUR) == pytest.approx(theirs(FOUR, chosen, average=average))
    assert measure(name, LOGITS, FOUR) == measure(f"{name}_macro", LOGITS, FOUR)


def test_areas_of_several_classes_are_those_of_each_against_the_rest() -> None:
    probabilities = torch.softmax(LOGITS, -1)
    expected = sk.roc_auc_score(FOUR, probabilities, multi_class="ovr")
    assert measure("auroc", LOGITS, FOUR) == measure("auroc_macro", LOGITS, FOUR) == pytest.approx(expected)
    micro = sk.roc_auc_score(FOUR, probabilities, multi_class="ovr", average="micro")
    assert measure("auroc_micro", LOGITS, FOUR) == pytest.approx(micro)
    assert measure("auroc_of_3", LOGITS, FOUR) == pytest.approx(sk.roc_auc_score(FOUR == 3, probabilities[:, 3]))
    assert math.isnan(measure("auroc_of_9", LOGITS, FOUR))
    some = FOUR < 2  # a client that lacks two classes: the mean is over the others
    each = [sk.roc_auc_score(FOUR[some] == label, probabilities[some, label]) for label in (0, 1)]
    assert measure("auroc", LOGITS[some], FOUR[some]) == pytest.approx(np.mean(each))


def test_several_labels_of_an_example() -> None:
    chosen = LABEL_LOGITS > 0
    assert measure("f1", LABEL_LOGITS, LABELS) == pytest.approx(sk.f1_score(LABELS, chosen, average="macro"))
    assert measure("f1_micro", LABEL_LOGITS, LABELS) == pytest.approx(sk.f1_score(LABELS, chosen, average="micro"))
    assert measure("auroc", LABEL_LOGITS, LABELS) == pytest.approx(sk.roc_auc_score(LABELS, LABEL_LOGITS))
    assert measure("auroc_of_1", LABEL_LOGITS, LABELS) == pytest.approx(
        sk.roc_auc_score(LABELS[:, 1], LABEL_LOGITS[:, 1])
    )
    accuracy = metrics.metric("accuracy").values
    assert accuracy is not None
    assert accuracy(LABEL_LOGITS, LABELS).mean() == pytest.approx((chosen == (LABELS > 0)).double().mean())


def of_each_label(theirs: Any, given: Tensor) -> float:
    return float(np.mean([theirs(LABELS[:, label], given[:, label]) for label in range(LABELS.shape[1])]))


@pytest.mark.parametrize("name", ["f1", "precision", "recall", "sensitivity", "specificity"])
def test_decisions_about_several_labels_are_scikit_learns(name: str) -> None:
    chosen, truth = LABEL_LOGITS > 0, LABELS
    theirs = getattr(sk, f"{ {'sensitivity': 'recall', 'specificity': 'recall'}.get(name, name) }_score")
    if name == "specificity":  # the recall of the label's absence
        chosen, truth = ~chosen, 1 - truth
    for ending in ("macro", "micro"):
        assert measure(f"{name}_{ending}", LABEL_LOGITS, LABELS) == pytest.approx(theirs(truth, chosen, average=ending))
    assert measure(name, LABEL_LOGITS, LABELS) == pytest.approx(theirs(truth, chosen, average="macro"))
    assert measure(f"{name}_of_2", LABEL_LOGITS, LABELS) == pytest.approx(theirs(truth[:, 2], chosen[:, 2]))


def test_scores_of_several_labels_are_scikit_learns() -> None:
    for name, theirs in (("auroc", sk.roc_auc_score), ("auprc", sk.average_precision_score)):
        for ending in ("macro", "micro"):
            found = measure(f"{name}_{ending}", LABEL_LOGITS, LABELS)
            assert found == pytest.approx(theirs(LABELS, LABEL_LOGITS, average=ending))

    def best_specificity(truth: Tensor, scores: Tensor) -> float:
        false_positives, true_positives, _ = sk.roc_curve(truth, scores, drop_intermediate=False)
        return float(max(1 - false_positives[true_positives >= 0.9]))

    assert measure("specificity_at_90", LABEL_LOGITS, LABELS) == pytest.approx(
        of_each_label(best_specificity, LABEL_LOGITS)
    )

    def calibration(truth: Tensor, logits: Tensor) -> float:
        shares = torch.sigmoid(logits).numpy()
        inside = [(shares >= low / 15) & (shares < (low + 1) / 15) for low in range(15)]
        held = [some for some in inside if some.any()]
        return float(sum(some.mean() * abs(shares[some].mean() - truth.numpy()[some].mean()) for some in held))

    assert measure("calibration_error", LABEL_LOGITS, LABELS) == pytest.approx(of_each_label(calibration, LABEL_LOGITS))


def test_balanced_accuracy_of_several_labels_is_the_mean_of_theirs() -> None:
    expected = of_each_label(sk.balanced_accuracy_score, LABEL_LOGITS > 0)
    assert measure("balanced_accuracy", LABEL_LOGITS, LABELS) == pytest.approx(expected)
    assert measure("balanced_accuracy", torch.ones_like(LABEL_LOGITS), LABELS) == 0.5  # yes to everything


def test_specificity_at_a_sensitivity_takes_the_best_threshold() -> None:
    scores, truth = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4]), torch.tensor([1, 0, 1, 0, 1, 0])
    assert measure("specificity_at_66", scores, truth) == pytest.approx(2 / 3)
    assert measure("specificity_at_67", scores, truth) == pytest.approx(1 / 3)
    assert measure("specificity_at_33", scores, truth) == 1.0


def test_few_examples_make_the_calibration_error_of_a_perfectly_calibrated_model_large() -> None:
    """The numbers of docs/how-to/metrics.md, from which a caution's threshold follows."""
    draws = np.random.default_rng(0)
    for examples, expected in {11: 0.24, 100: 0.09, 150: 0.07, 1500: 0.02}.items():
        found = []
        for _ in range(500):
            confidence = draws.uniform(0.5, 1, examples)
            said, right = np.zeros(examples), draws.random(examples) < confidence
            found.append(calibration_error(np.stack([confidence, said], 1), np.where(right, 0.0, 1.0)))
        assert np.mean(found) == pytest.approx(expected, abs=0.006)


def test_calibration_error_is_the_distance_of_confidence_and_accuracy() -> None:
    logit = math.log(0.8 / 0.2)
    output = torch.tensor([logit] * 10, dtype=torch.float64)
    assert measure("calibration_error", output, torch.tensor([1] * 8 + [0] * 2)) == pytest.approx(0.0, abs=1e-12)
    assert measure("calibration_error", output, torch.tensor([1] * 5 + [0] * 5)) == pytest.approx(0.3)
    both = torch.stack([-output, output], 1) / 2
    assert measure("calibration_error", both, torch.tensor([1] * 5 + [0] * 5)) == pytest.approx(0.3)
    labels = torch.stack([torch.ones(10), torch.zeros(10)], 1)
    assert measure("calibration_error", torch.stack([output, output], 1), labels) == pytest.approx((0.2 + 0.8) / 2)


def test_r2_is_that_of_scikit_learn() -> None:
    truth = torch.from_numpy(DRAW.normal(size=30))
    output = truth[:, None] + torch.from_numpy(DRAW.normal(size=(30, 1)))
    assert measure("r2", output, truth) == pytest.approx(sk.r2_score(truth, output[:, 0]))
    both = torch.stack([truth, truth.flip(0)], 1)
    assert measure("r2", both + 0.1, both) == pytest.approx(sk.r2_score(both, both + 0.1))


def test_the_c_index_counts_pairs_in_the_right_order() -> None:
    assert measure("c_index", torch.tensor([1.0, 2.0, 2.0]), torch.tensor([5.0, 6.0, 7.0])) == pytest.approx(2.5 / 3)
    # the second patient was lost at 3, so only earlier events can be compared with that time
    survival = torch.tensor([[2.0, 1.0], [3.0, 0.0], [4.0, 1.0], [5.0, 1.0]])
    risks = torch.tensor([0.9, 0.1, 0.2, 0.5])
    assert measure("c_index", risks, survival) == pytest.approx(3 / 4)
    # a patient who was lost at the time of another's event had the event later
    same_time = torch.tensor([[2.0, 1.0], [2.0, 0.0], [2.0, 1.0], [3.0, 0.0]])
    assert measure("c_index", torch.tensor([0.9, 0.5, 0.1, 0.3]), same_time) == pytest.approx(2 / 4)


ONE_CLASS = ["auroc", "auprc", "precision", "f1", "specificity_at_90", "balanced_accuracy"]
MACRO = [f"{name}_macro" for name in ("auroc", "auprc", "precision", "recall", "specificity", "f1")]


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("name", [*ONE_CLASS, *MACRO])
def test_examples_of_one_class_have_no_metric_that_tells_classes_apart(name: str, label: int) -> None:
    for scores in ([-1.0, -2.0], [-1.0, 2.0], [1.0, 2.0]):  # whatever the model says
        output, target = torch.tensor(scores), torch.full((2,), label)
        assert math.isnan(measure(name, output, target))
        if name != "specificity_at_90":
            three = torch.stack([-output, output, torch.zeros(2)], 1)
            assert math.isnan(measure(name, three, target))


def test_recall_needs_positive_examples_only_and_specificity_negative_ones() -> None:
    output = torch.tensor([-1.0, 2.0])
    assert (
        measure("recall", output, torch.tensor([1, 1])) == measure("specificity", output, torch.tensor([0, 0])) == 0.5
    )
    assert math.isnan(measure("recall", output, torch.tensor([0, 0])))
    assert math.isnan(measure("specificity", output, torch.tensor([1, 1])))
    assert measure("f1_micro", output, torch.tensor([1, 1])) == 0.5  # accuracy, which is defined for any examples


def test_a_mean_over_classes_is_over_those_that_some_examples_have() -> None:
    some, present = FOUR < 2, [0, 1]
    output, truth, chosen = LOGITS[some], FOUR[some], LOGITS[some].argmax(1)
    assert {*chosen.tolist()} > {*present}  # the model also chooses a class that this client does not have
    for name in ("f1", "precision", "recall"):
        expected = getattr(sk, f"{name}_score")(truth, chosen, labels=present, average="macro")
        assert measure(f"{name}_macro", output, truth) == pytest.approx(expected)
    assert measure("balanced_accuracy", output, truth) == measure("recall_macro", output, truth)


def test_precision_is_zero_if_nothing_is_chosen() -> None:
    assert measure("precision", torch.tensor([-1.0, -1.0]), torch.tensor([1, 0])) == 0.0


def test_labels_that_do_not_vary_have_no_r2_and_no_c_index() -> None:
    assert math.isnan(measure("r2", torch.ones(2), torch.ones(2)))
    assert math.isnan(measure("c_index", torch.ones(2), torch.ones(2)))


@pytest.mark.parametrize("name", ["auroc", "auroc_macro", "auroc_micro", "auprc", "specificity_at_90"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_gives_no_finite_scores_has_no_rank(name: str, value: float) -> None:
    broken = TWO_LOGITS.clone()
    broken[3] = torch.tensor([-value, value])
    assert math.isnan(measure(name, broken, TWO))
