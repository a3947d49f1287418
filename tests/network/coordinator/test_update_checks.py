"""Checks of updates and measurements."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.algorithm import Update
from fedloom.algorithms.fedavg import FedAvg
from fedloom.errors import TrainingError
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import ClientWork
from fedloom.network.coordinator.roster import Roster
from fedloom.network.coordinator.update_checks import Judge, Limits, check_history, check_measured, check_update
from fedloom.network.protocol.expected_update import ExpectedUpdate
from fedloom.network.protocol.messages import ClientAnswer
from fedloom.network.protocol.rejection import Rejected
from fedloom.task import Task
from fedloom.training.evaluation import Measured, pool
from tests.conftest import CLASSES, FEATURES, Dense
from tests.network.conftest import HELLO, World


def update_with(**changes: Any) -> Update:
    groups = {"model": {"w": torch.ones(1, 3), "b": torch.ones(1, 2, dtype=torch.float64), **changes.pop("leaves", {})}}
    return Update(groups, {"model": torch.tensor([1.0])} | changes.pop("weights", {}), **changes)


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (update_with(leaves={"w": torch.tensor([[1.0, float("nan"), 0.0]])}), "not-finite"),
        (update_with(leaves={"w": torch.tensor([[1.0, float("inf"), 0.0]])}), "not-finite"),
        (update_with(leaves={"more": torch.ones(1, 1)}), "keys"),
        (Update({"model": {"w": torch.ones(1, 3)}}, {"model": torch.ones(1)}), "keys"),
        (Update({"other": {"w": torch.ones(1, 3)}}, {"other": torch.ones(1)}), "keys"),
        (update_with(leaves={"w": torch.ones(1, 4)}), "shape"),
        (update_with(leaves={"w": torch.ones(3)}), "shape"),
        (update_with(leaves={"w": torch.ones(2, 3)}), "shape"),
        (update_with(leaves={"w": torch.ones(1, 3, dtype=torch.float64)}), "dtype"),
        (update_with(leaves={"w": torch.ones(1, 3, dtype=torch.int64)}), "dtype"),
        (update_with(weights={"model": torch.tensor([0.0])}), "weight"),
        (update_with(weights={"model": torch.tensor([-1.0])}), "weight"),
        (update_with(weights={"model": torch.tensor([float("nan")])}), "weight"),
        (update_with(weights={"model": torch.tensor([1e10])}), "weight"),
        (update_with(weights={"model": torch.tensor([1.0, 1.0])}), "weight"),
        (update_with(leaves={"w": torch.full((1, 3), 1e6)}), "norm"),
        (update_with(public={"score": torch.ones(1)}), "keys"),
    ],
)
def test_a_bad_update_rejects_its_client_with_a_reason(world: World, update: Update, reason: str) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    call = world.open_call(agent, other, limits=Limits(norm_bound=100.0))
    (result,) = agent.send("POST", "/v1/answers", agent.answer(update=update).whole).json()["results"]
    assert (result["status"], result["code"]) == ("rejected", reason)
    assert call.failures[0].message.startswith(reason)
    assert 0 not in call.waiting
    assert any("kerry" in line and reason in line for line in world.said)
    # no second try, and the others are not disturbed
    (again,) = agent.send("POST", "/v1/answers", agent.answer().whole).json()["results"]
    assert again["code"] == "duplicate"
    assert other.send("POST", "/v1/answers", other.answer(client=1).whole).json()["results"][0]["status"] == "accepted"


INF, NAN = float("inf"), float("nan")


def scored(scores: torch.Tensor | None = None, labels: torch.Tensor | None = None) -> dict[str, Measured]:
    sums = {"loss": 1.0, "accuracy": 1.0}
    scores = torch.ones(3) if scores is None else scores
    return {"test": Measured(3, sums, {"auroc": scores}, torch.ones(3) if labels is None else labels)}


def summarized(**values: float) -> dict[str, Measured]:
    return {"test": Measured(3, {"loss": 1.0, "accuracy": 1.0}, summaries=values)}


@pytest.mark.parametrize(
    ("group", "positions"),
    [("model", {}), ("other", {"model": "other"}), ("other", {})],
    ids=["name", "base", "neither"],
)
def test_a_mask_may_hold_the_infinities_that_the_coordinator_sent(group: str, positions: dict[str, str]) -> None:
    expected = ExpectedUpdate({"model": {"mask": ((2,), torch.float32)}}, {}, positions)

    def check(sent: list[float], shared: list[float]) -> None:
        update = Update({"model": {"mask": torch.tensor([sent])}}, {"model": torch.ones(1)})
        check_update(ClientAnswer(0, update), expected, {group: {"mask": torch.tensor(shared)}}, Limits())

    check([0.0, 1.0], [0.0, 0.0])
    if group == "model" or positions:
        check([0.0, -INF], [0.0, -INF])
    else:
        with pytest.raises(Rejected, match="model/mask has values that are not finite numbers"):
            check([0.0, -INF], [0.0, -INF])
    for sent, shared in (([0.0, INF], [0.0, 0.0]), ([NAN, -INF], [0.0, -INF]), ([NAN, 0.0], [NAN, 0.0])):
        with pytest.raises(Rejected, match="model/mask has values that are not finite numbers"):
            check(sent, shared)


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        ({}, "lacks the split 'test'"),
        ({"test": Measured(3, {"loss": 1.0})}, "lacks some of the metrics"),
        ({"test": Measured(2, {"loss": 1.0, "accuracy": 1.0})}, "has 3 test examples, and measured 2"),
        ({"test": Measured(3, {"loss": 1.0, "accuracy": 1.0, "f1": 1.0})}, "did not ask for"),
        ({"test": Measured(3, {"loss": 1.0, "accuracy": 1.0}, {}, torch.ones(3))}, "labels without scores"),
        ({"test": Measured(3, {"loss": 1.0, "accuracy": 1.0}, {"auroc": torch.ones(3)})}, "scores without labels"),
        (summarized(auroc=1.5), "the test auroc must be from 0 to 1, and is 1.5"),
        (summarized(auprc=0.5), "did not ask for"),
        ({"test": Measured(3, {"loss": INF, "accuracy": 1.0})}, "the test loss must be finite, and is inf"),
        ({"test": Measured(3, {"loss": -3.0, "accuracy": 1.0})}, "the test loss must be from 0 to inf, and is -1"),
        ({"test": Measured(3, {"loss": 1.0, "accuracy": 3e5})}, "the test accuracy must be from 0 to 1, and is 100000"),
        (scored(scores=torch.ones(3, 2)), "the scores of auroc must be one number for each of 3 examples"),
        (scored(scores=torch.ones(2)), "the scores of auroc must be one number for each of 3 examples"),
        (scored(scores=torch.tensor([0.0, NAN, 1.0])), "the scores of auroc must be finite real numbers"),
        (scored(scores=torch.ones(3, dtype=torch.bfloat16)), "the scores of auroc must be finite real numbers"),
        (scored(labels=torch.ones(3, 1)), "the labels must be one number for each of 3 examples"),
        (scored(labels=torch.tensor([0, 1, 2])), "labels must be whole numbers from 0 to 1"),
        (scored(labels=torch.tensor([0.0, 0.5, 1.0])), "labels must be whole numbers from 0 to 1"),
    ],
)
def test_measurements_must_be_those_that_were_asked_for(measured: dict[str, Measured], why: str) -> None:
    means = {"loss": (0.0, INF), "accuracy": (0.0, 1.0)}

    def check(measured: dict[str, Measured], size: int = 3) -> None:
        check_measured(measured, ("test",), {"test": size}, means, {"auroc": (0.0, 1.0)}, {"auroc": ()}, classes=2)

    with pytest.raises(Rejected, match=why):
        check(measured)
    hidden = Measured(3, {"loss": NAN, "accuracy": 1.0})  # a site need not tell everything
    for fine in ({"test": hidden}, scored()):
        check(fine)
    check({}, size=0)


ROWS = st.builds(
    lambda shape, dtype, value: torch.full(shape, value, dtype=torch.float64).to(dtype),
    st.sampled_from([(3,), (3,), (3, 1), (3, 2), (2,), (0,), ()]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]),
    st.sampled_from([0.0, 1.0, 2.0, -1.0, 1e30, INF, -INF, NAN]),
)


@hypothesis.settings(deadline=None, database=None, max_examples=300)
@hypothesis.given(
    st.sampled_from([3, 3, 3, 0, 4]),
    st.fixed_dictionaries({"loss": st.floats(), "accuracy": st.floats(0, 4)}, optional={"f1": st.floats()}),
    st.fixed_dictionaries({"auroc": ROWS}, optional={"f1": ROWS}),
    st.one_of(st.none(), ROWS),
)
def test_whatever_is_accepted_can_be_pooled_with_what_honest_clients_measured(
    count: int, sums: dict[str, float], scores: dict[str, torch.Tensor], labels: torch.Tensor | None
) -> None:
    found = Measured(count, sums, scores, labels)
    task = Task(Dense, metrics=("accuracy", "auroc"))
    means = {"loss": (0.0, INF), "accuracy": (0.0, 1.0)}
    try:
        check_measured({"test": found}, ("test",), {"test": 3}, means, {"auroc": (0.0, 1.0)}, {"auroc": ()}, classes=2)
    except Rejected:
        return
    values = pool([scored()["test"], found]).values(task)
    assert math.isnan(values["accuracy"]) or 0 <= values["accuracy"] <= 1 + 1e-6
    assert not math.isinf(values["loss"])


@pytest.mark.parametrize(
    ("history", "why"),
    [
        (({"loss": 1.0},) * 3, "the client trains for 2 epochs, and reports 3"),
        (({"loss": INF},), "the loss of an epoch must be finite, and is inf"),
        (({"loss": 1.0, "validation_accuracy": 2.0},), "the validation_accuracy of an epoch must be from 0 to 1"),
        (({"accuracy": 1.0},), "the history of epochs has an unknown metric 'accuracy'"),
    ],
)
def test_the_history_of_epochs_is_checked(history: tuple[dict[str, float], ...], why: str) -> None:
    ranges = {"loss": (0.0, INF), "accuracy": (0.0, 1.0)}
    with pytest.raises(Rejected, match=why):
        check_history(history, 2, ranges)
    check_history(({"loss": 1.0, "validation_loss": NAN, "validation_accuracy": 1.0},) * 2, 2, ranges)


@pytest.mark.parametrize("features", [FEATURES, FEATURES + 1])
def test_a_judge_tries_the_method_on_made_up_examples_and_never_goes_on_without(features: int) -> None:
    facts = {"features": (features,), "classes": tuple("abcdefghij"[:CLASSES])}
    row = {"client": 0, "agent": "x", "local": 0, "name": "a"}
    roster, task = Roster.of([row], {"x": HELLO.model_copy(update=facts)}), Task(Dense)
    shared = {"model": task.initial()}
    work = ClientWork(FedAvg(), "client", shared, (0,), {}, 1, 1, 0, "sum")
    judge = Judge(roster, task, Sampling(), True)
    if features == FEATURES:
        found = judge.expected_update(work)
        assert found.groups["model"].keys() == shared["model"].keys()
        assert judge.expected_update(work) is found
    else:
        with pytest.raises(TrainingError, match="'client' could not be tried on made-up examples"):
            judge.expected_update(work)


@pytest.mark.parametrize("train", [{"batch_size": 5}, {"batch_size": 32, "drop_last": True}])
def test_made_up_examples_suit_batches_of_any_size(train: dict[str, Any]) -> None:
    """Of six examples, batches of five leave one for batch normalisation, and batches of 32 leave none."""
    classes = tuple("abcdefghij"[:CLASSES])
    hello = HELLO.model_copy(update={"features": (FEATURES,), "classes": classes})
    roster = Roster.of([{"client": 0, "agent": "x", "local": 0, "name": "a"}], {"x": hello})
    task = Task(lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)))
    work = ClientWork(FedAvg(**train), "client", {"model": task.initial()}, (0,), {}, 1, 1, 0, "sum")
    judge = Judge(roster, task, Sampling(), True)
    assert judge.expected_update(work).groups["model"].keys() == task.initial().keys()


@pytest.mark.parametrize("scale", [1.0, 1e30])  # the weights of the first round, and those of a restart
def test_the_form_of_answers_is_found_though_training_diverges_on_made_up_examples(scale: float) -> None:
    """With small features, a large learning rate converges. The made-up features are not small."""
    hello = HELLO.model_copy(update={"features": (10,), "classes": (), "labels": (1,)})
    roster = Roster.of([{"client": 0, "agent": "x", "local": 0, "name": "a"}], {"x": hello})
    task = Task(nn.Linear, "mse", (), {"in_features": 10, "out_features": 1})
    shared = {"model": {name: leaf * scale for name, leaf in task.initial().items()}}
    work = ClientWork(FedAvg(lr=500.0, epochs=20), "client", shared, (0,), {}, 1, 1, 0, "sum")
    found = Judge(roster, task, Sampling(), True).expected_update(work)
    assert found.groups == {"model": {"weight": ((1, 10), torch.float32), "bias": ((1,), torch.float32)}}


class MeanOfWords(nn.Module):
    """Takes the mean over as many words as the longest text has: without a word, not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x[:, : (x != 0).sum(1).max()]).mean(1)


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_the_form_of_answers_is_found_though_zero_means_padding(scale: float) -> None:
    facts = {"features": (7,), "dtype": "int64", "classes": tuple("abcdefghij"[:CLASSES])}
    roster = Roster.of([{"client": 0, "agent": "x", "local": 0, "name": "a"}], {"x": HELLO.model_copy(update=facts)})
    task = Task(MeanOfWords)
    shared = {"model": {name: leaf * scale for name, leaf in task.initial().items()}}
    work = ClientWork(FedAvg(lr=1e38), "client", shared, (0,), {}, 1, 1, 0, "sum")
    found = Judge(roster, task, Sampling(), True).expected_update(work)
    assert found.groups == {"model": {"words.weight": ((5, CLASSES), torch.float32)}}
