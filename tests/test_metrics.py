"""Losses and metrics."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import nn

from fedloom import metrics
from fedloom.errors import InputError, TrainingError

OUTPUT = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0], [1.0, 0.0, 0.5], [0.1, 0.3, 0.2]])
TARGET = torch.tensor([0, 1, 2, 1])


def test_accuracy_is_the_share_of_examples_whose_largest_output_is_right() -> None:
    assert metrics.metric("accuracy").values(OUTPUT, TARGET).tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_accuracy_of_one_logit_asks_whether_it_is_positive(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    output = torch.tensor([1.5, -0.5, 0.2, -3.0]).reshape(shape)
    target = torch.tensor([1, 1, 0, 0]).to(dtype)
    assert metrics.metric("accuracy").values(output, target).tolist() == [1, 0, 0, 1]


def test_top_k_asks_whether_the_label_is_among_the_k_largest() -> None:
    assert metrics.metric("top_1").values(OUTPUT, TARGET).tolist() == [1, 0, 0, 1]
    assert metrics.metric("top_2").values(OUTPUT, TARGET).tolist() == [1, 1, 1, 1]
    assert metrics.metric("top_9").values(OUTPUT, TARGET).tolist() == [1, 1, 1, 1]


def test_squared_and_absolute_errors_are_per_example() -> None:
    output, target = torch.tensor([[1.0], [4.0]]), torch.tensor([3.0, 3.5])
    assert metrics.metric("mse").values(output, target).tolist() == [4.0, 0.25]
    assert metrics.metric("mae").values(output, target).tolist() == [2.0, 0.5]


@pytest.mark.parametrize("columns", [1, 2])
def test_auroc_ranks_the_scores_of_the_second_class(columns: int) -> None:
    draws = np.random.default_rng(0)
    target = draws.integers(0, 2, 50)
    logit = torch.from_numpy(draws.normal(size=50) + target)
    output = torch.stack([torch.zeros(50), logit], 1) if columns == 2 else logit.reshape(-1, 1)
    auroc = metrics.metric("auroc")
    found = auroc.summary(auroc.scores(output, torch.from_numpy(target)).numpy(), target)
    assert found == pytest.approx(roc_auc_score(target, logit.numpy()))
    assert not auroc.is_mean


def test_auroc_of_one_class_is_not_a_number() -> None:
    assert math.isnan(metrics.metric("auroc").summary(np.array([0.1, 0.2]), np.array([1, 1])))


@pytest.mark.parametrize(
    ("name", "theirs", "output", "target"),
    [
        ("cross_entropy", F.cross_entropy, OUTPUT, TARGET),
        ("mse", F.mse_loss, OUTPUT[:, 0], TARGET.float()),
        ("mae", F.l1_loss, OUTPUT[:, 0], TARGET.float()),
        ("bce", F.binary_cross_entropy_with_logits, OUTPUT[:, 0], TARGET.float().clamp(max=1)),
    ],
)
def test_losses_are_torchs_per_example(name: str, theirs: object, output: torch.Tensor, target: torch.Tensor) -> None:
    expected = theirs(output, target, reduction="none")
    torch.testing.assert_close(metrics.loss(name)(output, target), expected)


def test_a_column_of_outputs_meets_a_row_of_labels() -> None:
    column, target = OUTPUT[:, :1], torch.tensor([0, 1, 1, 0])
    for name in ("mse", "mae", "bce"):
        assert metrics.loss(name)(column, target).shape == (4,)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), F.cross_entropy])
def test_a_loss_that_gives_one_number_is_asked_for_each_example(loss: object) -> None:
    expected = F.cross_entropy(OUTPUT, TARGET, reduction="none")
    torch.testing.assert_close(metrics.per_example(loss, OUTPUT, TARGET), expected)
    torch.testing.assert_close(metrics.per_example(loss, OUTPUT[:1], TARGET[:1]), expected[:1])


def test_a_loss_per_token_is_averaged_within_each_example() -> None:
    values = metrics.per_example(lambda output, target: (output - target).abs(), OUTPUT, torch.zeros(4, 3))
    torch.testing.assert_close(values, OUTPUT.mean(1))


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(InputError, match=r"There is no loss 'cross_entrop'\. Known: .* Did you mean 'cross_entropy'\?"):
        metrics.loss("cross_entrop")
    with pytest.raises(InputError, match=r"There is no metric 'acuracy'\. Known: .* Did you mean 'accuracy'\?"):
        metrics.metric("acuracy")
    for wrong in ("top_0", "top_", "top_x"):
        with pytest.raises(InputError, match=f"There is no metric '{wrong}'"):
            metrics.metric(wrong)


def test_metrics_know_which_way_is_better() -> None:
    assert metrics.metric("accuracy").higher_is_better
    assert metrics.metric("top_3").higher_is_better
    assert not metrics.metric("mse").higher_is_better


def test_functions_of_a_mean_are_not_means() -> None:
    assert [metrics.metric(name).is_mean for name in ("mse", "rmse", "perplexity")] == [True, False, False]
    rmse, perplexity = metrics.metric("rmse").of_mean, metrics.metric("perplexity").of_mean
    assert rmse is not None
    assert perplexity is not None
    assert (rmse(9.0), perplexity(0.0)) == (3.0, 1.0)
    assert math.isfinite(perplexity(1e6))


def test_your_own_function_is_a_metric_of_all_examples() -> None:
    def cost(outputs: np.ndarray, labels: np.ndarray) -> float:
        return float((outputs.argmax(1) != labels).sum())

    made = metrics.own_metric(cost)
    assert (made.name, made.is_mean, made.higher_is_better) == ("cost", False, True)
    assert made.summary(made.scores(OUTPUT, TARGET).numpy(), TARGET.numpy()) == 2.0
    cost.higher_is_better = False  # type: ignore[attr-defined]
    assert not metrics.own_metric(cost, "costs.py:cost").higher_is_better
    assert metrics.own_metric(made) is made
    with pytest.raises(
        InputError, match=r"A metric must be a name, a function of outputs and labels, or a Metric\. Got 3"
    ):
        metrics.own_metric(3)


@pytest.mark.parametrize(
    ("value", "what"), [(np.ones(2), r"an array of shape \(2,\)"), (None, "None"), ("0.3", "'0.3'"), (math.inf, "inf")]
)
def test_your_own_metric_returns_one_number(value: Any, what: str) -> None:
    def cost(outputs: np.ndarray, labels: np.ndarray) -> Any:
        return value

    with pytest.raises(TrainingError, match=rf"The metric 'cost' \(\S*test_metrics.py, line \d+\) returned {what}\. A"):
        metrics.own_metric(cost).summary(np.ones((2, 2)), np.ones(2))  # type: ignore[misc]


def test_an_error_in_your_own_metric_names_it_and_shows_the_line() -> None:
    def cost(outputs: np.ndarray, labels: np.ndarray) -> float:
        raise ValueError("no costs here")

    made = metrics.own_metric(cost)
    with pytest.raises(TrainingError, match=r"(?s)The metric 'cost' failed: ValueError: no costs.*test_metrics.py"):
        made.summary(np.ones((2, 2)), np.ones(2))

    def as_for_tensors(outputs: Any, labels: Any) -> float:
        return outputs.topk(2).values.mean()

    with pytest.raises(TrainingError, match="called with numpy arrays"):
        metrics.own_metric(as_for_tensors).summary(np.ones((2, 2)), np.ones(2))


@pytest.mark.parametrize("name", ["f1_of_x", "specificity_at_100", "specificity_at_0", "auroc_weighted", "top_0"])
def test_names_with_wrong_endings_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"There is no metric '{name}'.*or your own as 'file.py:name'"):
        metrics.metric(name)


def test_a_class_is_named_by_its_number() -> None:
    with pytest.raises(InputError, match=r"no metric 'recall_of_dead'\. Write the number .*'recall_of_2': .*describe"):
        metrics.metric("recall_of_dead")


def test_shares_and_percentages() -> None:
    assert all(map(metrics.is_percentage, ["accuracy", "top_5", "f1", "recall_of_12", "f1_macro", "specificity_at_90"]))
    assert not any(map(metrics.is_percentage, ["auroc", "mse", "r2", "f1_something"]))
    assert all(map(metrics.is_share, ["auroc_macro", "calibration_error", "c_index", "accuracy"]))
    assert not any(map(metrics.is_share, ["r2", "loss", "auroc_difference"]))
