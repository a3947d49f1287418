"""Loss and metrics of a model on some examples."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import nn

from fedloom.algorithms import FedAvg
from fedloom.data.federation import Federation
from fedloom.federation.engine import fit
from fedloom.task import Task
from fedloom.training.clients import Clients, Setup
from fedloom.training.evaluation import evaluate, evaluate_rows, measure, passes, pool, prepare
from tests.conftest import FEATURES, Dense, Noisy, Normed, federation


def clients(data: Federation, **setup: object) -> Clients:
    return Clients(data, tuple(range(data.clients)), setup=Setup(**setup))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_loss_and_metrics_are_means_over_the_clients_own_split(split: str) -> None:
    task, data = Task(Dense, metrics=["accuracy", "top_2"], dtype="float64"), federation((30, 50))
    weights = task.initial()
    for client in range(2):
        rows = data.indices(client, split)
        output = torch.func.functional_call(task.build(), weights, (data.x[rows].double(),))
        found = evaluate(task, weights, clients(data), client, split)
        assert found.count == len(rows)
        assert found.values(task) == pytest.approx(
            {
                "loss": F.cross_entropy(output, data.y[rows]).item(),
                "accuracy": (output.argmax(1) == data.y[rows]).double().mean().item(),
                "top_2": (output.topk(2).indices == data.y[rows, None]).any(1).double().mean().item(),
            }
        )


def test_a_large_split_in_passes_gives_what_one_pass_gives() -> None:
    task, data = Task(Dense, dtype="float64"), federation((203,))
    rows = torch.arange(203)
    whole = evaluate_rows(task, task.initial(), clients(data), rows)
    parts = evaluate_rows(task, task.initial(), clients(data, evaluation_batch=50), rows)
    assert parts.count == whole.count == 203
    assert parts.values(task) == pytest.approx(whole.values(task))


def test_evaluation_uses_running_statistics_and_no_dropout_and_changes_nothing() -> None:
    task, data = Task(Normed), federation((40,))
    weights = task.initial()
    weights["norm.running_mean"].fill_(0.7)
    before = {name: leaf.clone() for name, leaf in weights.items()}
    first = evaluate(task, weights, clients(data), 0, "train").values(task)
    assert first == evaluate(task, weights, clients(data), 0, "train").values(task)
    assert all(torch.equal(weights[name], before[name]) for name in before)
    module = task.build().eval()
    module.load_state_dict(weights)
    rows = data.indices(0, "train")
    assert first["loss"] == pytest.approx(F.cross_entropy(module(data.x[rows]), data.y[rows]).item(), rel=1e-5)


def test_a_split_without_examples_has_no_values() -> None:
    task, data = Task(Dense), federation((1, 30))
    nothing = evaluate(task, task.initial(), clients(data), 0, "test")
    assert nothing.count == 0
    assert nothing.values(task) == {}


def test_measurements_add_up_also_where_some_clients_have_no_examples() -> None:
    task, data = Task(Dense, dtype="float64"), federation((1, 30, 1, 50))
    each = [evaluate(task, task.initial(), clients(data), client, "test") for client in range(4)]
    union = evaluate_rows(task, task.initial(), clients(data), data.indices(data.everyone, "test"))
    for order in (each, each[::-1]):
        total = pool(order)
        assert total.count == union.count
        assert total.values(task) == pytest.approx(union.values(task))
    assert pool(each[::2]).values(task) == {}


class Score(nn.Module):
    """The first feature is the logit."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0] * self.factor


def test_auroc_is_computed_from_all_scores_and_never_averaged() -> None:
    draws = np.random.default_rng(1)
    y = draws.integers(0, 2, 60)
    # the second client's scores are shifted: each client ranks well by itself, the union ranks badly
    scores = draws.normal(size=60) + 2 * y + np.repeat([0.0, 20.0], 30)
    data = Federation(
        torch.from_numpy(scores[:, None]).float(), torch.from_numpy(y), np.array([0, 30, 60]), classes=("no", "yes")
    )
    task = Task(Score, loss="bce", metrics=["auroc", "accuracy"])
    parts = [evaluate_rows(task, task.initial(), clients(data), torch.arange(b, b + 30)) for b in (0, 30)]
    pooled = pool(parts).values(task)
    assert pooled["auroc"] == pytest.approx(roc_auc_score(y, scores))
    mean = np.mean([part.values(task)["auroc"] for part in parts])
    assert abs(pooled["auroc"] - mean) > 0.05
    assert pooled["accuracy"] == pytest.approx(np.mean((scores > 0) == y))


def test_auroc_of_a_client_with_one_class_is_not_a_number_but_counts_in_the_union() -> None:
    task = Task(Score, loss="bce", metrics=["auroc"])
    one, two = (measure(task, task.initial(), torch.tensor([[s]]), torch.tensor([y])) for s, y in ((2.0, 1), (1.0, 0)))
    assert math.isnan(one.values(task)["auroc"])
    assert pool([one, two]).values(task)["auroc"] == 1.0


def test_a_metric_over_several_outputs_is_the_mean_over_them_like_the_loss() -> None:
    task = Task(
        nn.Linear,
        loss="mse",
        metrics=["mse", "mae"],
        args={"in_features": FEATURES, "out_features": 3},
        dtype="float64",
    )
    x, y = torch.ones(5, FEATURES, dtype=torch.float64), torch.arange(15, dtype=torch.float64).reshape(5, 3)
    found = measure(task, task.initial(), x, y).values(task)
    error = torch.func.functional_call(task.build(), task.initial(), (x,)).detach() - y
    assert found["loss"] == pytest.approx(error.square().mean().item())
    assert found["mse"] == pytest.approx(found["loss"])
    assert found["mae"] == pytest.approx(error.abs().mean().item())


def test_evaluating_a_model_that_draws_by_itself_is_reproducible_and_leaves_the_generator_alone() -> None:
    task, data = Task(Noisy), federation((30,))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        found.append(evaluate(task, task.initial(), clients(data), 0, "test").sums)
        assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0] == found[1]


class AlwaysDropped(nn.Module):
    """Forgot to say `training=self.training`, as happens with the function."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.dropout(x, 0.5))


def test_dropout_that_is_never_switched_off_is_reproducible_and_leaves_the_generator_alone() -> None:
    task, data = Task(AlwaysDropped), federation((30, 20))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        found.append([record.clients for record in fit(data, task, FedAvg(), 2)])
        assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0] == found[1]


@given(st.integers(1, 500), st.integers(1, 100))
def test_passes_are_of_about_one_size_and_keep_every_row(count: int, largest: int) -> None:
    parts = passes(torch.arange(count), largest)
    sizes = [len(part) for part in parts]
    assert torch.cat(list(parts)).tolist() == list(range(count))
    assert max(sizes) <= largest
    assert max(sizes) - min(sizes) <= 1


def test_bytes_are_scaled_words_stay_numbers_and_floats_take_the_tasks_precision() -> None:
    task = Task(Dense, dtype="float64")
    labels = torch.tensor([1, 0])
    pixels, y = prepare(torch.tensor([[0], [255]], dtype=torch.uint8), labels, 1 / 255, task)
    assert pixels.tolist() == [[0.0], [1.0]]
    assert pixels.dtype == torch.float64
    assert y.dtype == torch.int64
    words, _ = prepare(torch.tensor([[3], [7]]), labels, 1.0, task)
    assert words.dtype == torch.int64
    numbers, target = prepare(torch.ones(2, 1), torch.ones(2), 1.0, task)
    assert numbers.dtype == target.dtype == torch.float64


def test_preparing_examples_leaves_the_federation_as_it_was() -> None:
    data = replace(federation((10,)), scale=0.5)
    data = replace(data, x=torch.full((10, FEATURES), 4, dtype=torch.uint8))
    evaluate(Task(Dense), Task(Dense).initial(), clients(data), 0, "train")
    assert (data.x == 4).all()
