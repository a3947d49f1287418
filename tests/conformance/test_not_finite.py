"""Updates and scores that are not finite: rules leave them out and say whose, scores count as the docs state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.aggregation import weights
from fedloom.algorithm import Algorithm, Update
from fedloom.algorithms import ALGORITHMS
from fedloom.data.federation import Federation
from fedloom.data.split import Split
from fedloom.errors import RoundAbandoned, TrainingError
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.results.report_warnings import cautions
from fedloom.results.run_data import RunData
from fedloom.task import Task
from fedloom.training.clients import Clients
from fedloom.tree import is_sound, map_leaves, per_client, sha256
from tests.aggregation import rules_by_hand as brute
from tests.conformance.test_robust import PLAIN, WITH_RULE
from tests.conformance.transcriptions import Attendance
from tests.conftest import ALL_TRAIN, Dense, Logit, Pictures, federation, two_classes

QUIET = Evaluation(splits=())

# --- rules on numbers: a client that is certainly wrong is one fewer to be afraid of

EXPECTED: dict[str, tuple[dict[str, Any], Callable[[brute.Vectors, int], brute.Vectors]]] = {
    "median": ({}, lambda x, gone: brute.median(x)),
    "trimmed_mean": ({"trim": 2}, lambda x, gone: brute.trimmed_mean(x, 2 - gone)),
    "krum": ({"byzantine": 2}, lambda x, gone: brute.krum(x, 2 - gone)),
    "multi_krum": ({"byzantine": 2}, lambda x, gone: brute.multi_krum(x, 2 - gone)),
    "bulyan": ({"byzantine": 2}, lambda x, gone: brute.bulyan(x, 2 - gone)),
    "geometric_median": (
        {"tolerance": 1e-9, "iterations": 1000},
        lambda x, gone: brute.apply("geometric_median", x, tolerance=1e-9, iterations=1000),
    ),
    "centred_clipping": ({}, lambda x, gone: brute.centred_clipping(x, 1.0, 3)),
    "norm_bounding": ({}, lambda x, gone: brute.norm_bounding(x, np.ones(len(x)), 1.0)),
}


def apply(name: str, x: brute.Vectors, **settings: Any) -> brute.Vectors:
    found: brute.Vectors = brute.rule(name, **settings)({"w": torch.from_numpy(x)}, torch.ones(len(x)))["w"].numpy()
    return found


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("gone", [1, 2])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_rule_is_what_it_is_without_the_clients_that_are_certainly_wrong(name: str, gone: int, wrong: float) -> None:
    settings, expected = EXPECTED[name]
    x = brute.drawn(3, 11)
    for client in (4, 9)[:gone]:
        x[client, client % 5] = wrong
    sound = np.isfinite(x).all(1)
    np.testing.assert_allclose(apply(name, x, **settings), expected(x[sound], gone), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "clients", "tolerated"),
    [
        ("median", {}, 5, 2),
        ("median", {}, 6, 2),
        ("trimmed_mean", {"trim": 1}, 7, 1),
        ("krum", {"byzantine": 2}, 7, 2),
        ("multi_krum", {"byzantine": 1, "keep": 5}, 5, 1),
        ("bulyan", {"byzantine": 1}, 7, 1),
        ("geometric_median", {}, 7, 3),
        ("centred_clipping", {}, 5, 2),
        ("norm_bounding", {}, 3, 1),
    ],
)
def test_more_wrong_clients_than_a_rule_tolerates_abandon_the_round(
    name: str, settings: dict[str, Any], clients: int, tolerated: int
) -> None:
    x = brute.drawn(1, clients)
    x[:tolerated] = np.nan
    assert np.isfinite(apply(name, x, **settings)).all()
    x[: tolerated + 1] = np.nan
    with pytest.raises(RoundAbandoned, match=rf"{tolerated + 1} of {clients} clients .* tolerates {tolerated}"):
        apply(name, x, **settings)


def test_a_finite_number_however_large_does_not_break_the_geometric_median() -> None:
    x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [3e38, 3e38], [0.5, 0.5], [0.4, 0.6]])
    found = brute.rule("geometric_median")({"w": x}, torch.ones(5))["w"]
    assert (found.abs() < 2).all()


# --- rules in rounds


def sending(kind: type[Algorithm], wrong: float, liars: tuple[int, ...], rounds: tuple[int, ...] = ()) -> Any:
    """The same algorithm with clients that answer with numbers that are none, in all rounds or some."""

    def told(method: str) -> Callable[..., Any]:
        def answer(self: Any, task: Task, shared: Any, own: Any, data: Clients) -> tuple[Update, Any]:
            update, kept = getattr(kind, method)(self, task, shared, own, data)
            here = torch.tensor([client in liars and (not rounds or data.round in rounds) for client in data.ids])

            def lie(leaf: Tensor) -> Tensor:
                mask = here.reshape(-1, *[1] * (leaf.dim() - 1))
                return torch.where(mask, torch.full_like(leaf, wrong), leaf) if leaf.is_floating_point() else leaf

            spoilt = {group: {name: lie(leaf) for name, leaf in leaves.items()} for group, leaves in kept.items()}
            groups = {g: {name: lie(leaf) for name, leaf in leaves.items()} for g, leaves in update.groups.items()}
            return replace(update, groups=groups), spoilt

        answer.__name__ = method
        return answer

    methods = {method: told(method) for method in ("client", "gradient") if hasattr(kind, method)}
    return type("Lying", (kind,), {**methods, "__module__": __name__, "__doc__": "Some clients lie."})


def last(records: Any) -> RoundRecord:
    *_, record = records
    return record


@pytest.mark.parametrize("name", WITH_RULE)
def test_a_round_goes_on_as_if_the_client_had_not_been_there(name: str) -> None:
    kind, task, data = ALGORITHMS[name], Task(Pictures, dtype="float64"), federation([20] * 5)
    given = {**PLAIN, "rule": "median"}
    record = last(fit(data, task, sending(kind, np.nan, (2,))(**given), 2, evaluation=QUIET))
    without = Attendance(rounds=((0, 1, 3, 4),) * 2)
    expected = last(fit(data, task, kind(**given), 2, sampling=without, evaluation=QUIET))
    assert record.left_out == (2,)
    assert record.notes["not_finite"] == 1
    assert record.cohort == expected.cohort == (0, 1, 3, 4)
    assert {group: sha256(tree) for group, tree in record.state.items()} == {
        group: sha256(tree) for group, tree in expected.state.items()
    }
    assert record.own.keys() == expected.own.keys()  # what the client that was left out keeps did not change


def test_a_client_that_was_left_out_in_the_first_call_of_a_round_still_counts_in_the_second() -> None:
    class Twice(sending(ALGORITHMS["fsvrg"], np.nan, (0,))):  # type: ignore[misc]
        """One client lies at first, another one later."""

        def client(self, task: Task, shared: Any, own: Any, data: Clients) -> tuple[Update, Any]:
            update, kept = ALGORITHMS["fsvrg"].client(self, task, shared, own, data)
            bad = torch.tensor([client == 1 for client in data.ids])
            nan = {name: torch.full_like(leaf, torch.nan) for name, leaf in update.groups["change"].items()}
            change = map_leaves(lambda x, y: torch.where(per_client(bad, x) > 0, x, y), nan, update.groups["change"])
            return replace(update, groups={**update.groups, "change": change}), kept

    data, task = federation([8] * 5), Task(Dense)
    one = {"name": "trimmed_mean", "trim": 1}
    (record,) = fit(data, task, Twice(lr=0.1, rule=one), 1, evaluation=QUIET)
    assert (record.left_out, record.complete) == ((0, 1), False)
    (record,) = fit(data, task, Twice(lr=0.1, rule={**one, "trim": 2}), 1, evaluation=QUIET)
    assert (record.left_out, record.complete) == ((0, 1), True)


class Masked(nn.Module):
    """Has a buffer with infinities, as attention masks have."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 3)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) + self.mask[0]


@pytest.mark.parametrize("name", ["fedavg", "fednova"])
def test_a_buffer_that_holds_infinities_makes_nobody_wrong(name: str) -> None:
    algorithm = ALGORITHMS[name](**PLAIN, rule="median")
    record = last(fit(federation([9] * 3), Task(Masked), algorithm, 2, evaluation=QUIET))
    assert record.left_out == ()
    assert record.complete
    assert record.state["model"]["mask"].tolist() == [0.0, -torch.inf]


def test_too_many_abandon_the_round_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind = sending(ALGORITHMS["fedavg"], np.inf, (1, 3), rounds=(2,))
    algorithms = {"one": kind(lr=0.1, rule={"name": "trimmed_mean", "trim": 1}), "two": kind(lr=0.1, rule="median")}
    with caplog.at_level(logging.WARNING, "fedloom"):
        fl.run(federation([10] * 5), Task(Dense), algorithms, 3, out=tmp_path, backend="serial")
    told = [record.getMessage() for record in caplog.records]
    end = "left out updates that are not finite, or made the model so, of 'client-1', 'client-3'"
    assert f"two (seed 1), round 2: {end}." in told
    assert f"one (seed 1), round 2: {end}, too many: the round does not count." in told
    found = cautions(RunData.read(tmp_path))
    why = "left out updates that were not finite, or made the model so"
    assert f"two (seed 1) {why}: client-1 (1 round), client-3 (1 round)." in found
    assert any(text.startswith("one (seed 1): 1 of 3 rounds did not count") for text in found)
    assert not any(text.startswith("two (seed 1): 1 of 3") for text in found)


def test_an_abandoned_round_leaves_everything_as_it_was() -> None:
    kind = sending(ALGORITHMS["scaffold"], np.nan, (0, 1, 2), rounds=(2,))
    first, second, third = fit(federation([10] * 5), Task(Dense), kind(lr=0.1, rule="median"), 3, evaluation=QUIET)
    assert [record.complete for record in (first, second, third)] == [True, False, True]
    assert [sha256(second.state[group]) for group in second.state] == [
        sha256(first.state[group]) for group in first.state
    ]
    assert second.own == {}
    assert third.left_out == ()


# --- without a rule


def test_the_plain_mean_stops_and_names_the_client() -> None:
    algorithm = sending(ALGORITHMS["fedavg"], np.nan, (2,))(lr=0.1)
    message = r"^Round 1: the new model is not finite, because the update of 'client-2' is not\. A smaller lr"
    with pytest.raises(TrainingError, match=message):
        list(fit(federation([10] * 4), Task(Dense), algorithm, 2, evaluation=QUIET))


def exploding(clients: int = 3) -> Federation:
    """One step takes client 1 beyond all numbers; its loss before that step is finite."""
    data = federation([6] * clients, split=ALL_TRAIN)
    data.x[6:12] *= 1e30
    return data


def straight() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 3))


@pytest.mark.parametrize("name", ["peer", "local", "ditto", "fedrep", "fedbn"])
def test_a_last_round_never_ends_with_models_that_are_not_finite(name: str) -> None:
    algorithm = ALGORITHMS[name](lr=1e10, batch_size="full")
    with pytest.raises(TrainingError, match=r"^Round 1\b.* 'client-1'"):
        list(fit(exploding(), Task(straight), algorithm, 1, evaluation=QUIET))


# --- scores that are not defined


def one_class_at(client: int) -> Federation:
    """Two classes, but a client whose validation split has one: its AUROC is not defined."""
    data = two_classes(federation((40, 30, 50), split=Split(train=0.5, validation=0.5, test=0.0)))
    data.y[data.indices(client, "validation")] = 1
    return data


AUROC = {"lr": 0.1, "batch_size": 8, "metric": "auroc"}
LOGIT = Task(Logit, loss="bce", metrics=["auroc"], dtype="float64")


def test_scores_that_are_not_defined_count_for_nothing_beside_others_and_the_same_alone() -> None:
    nan, inf = float("nan"), float("inf")
    row = weights.by_score(torch.tensor([0.5, nan, 1.0, inf]))
    assert row.tolist() == [0.5, 1e-12, 1.0, 1e-12]
    assert weights.by_score(torch.tensor([0.5, nan, inf]), higher_is_better=False).tolist() == [2.0, 1e-12, 1e-12]
    assert len(set(weights.by_score(torch.full((3,), nan)).tolist())) == 1
    assert len(set(weights.by_score(torch.full((3,), nan), higher_is_better=False).tolist())) == 1
    assert weights.within_one_std(torch.tensor([0.9, nan, 0.9, 0.9, 0.1])).tolist() == [1, 0, 1, 1, 0]
    assert weights.within_one_std(torch.tensor([1.0, inf, 1.1]), higher_is_better=False).tolist() == [1, 0, 1]
    assert weights.within_one_std(torch.full((3,), nan)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", [fl.EvaluationWeighted, fl.Selective])
def test_a_client_without_a_score_has_no_say_in_the_mean(kind: type[Algorithm]) -> None:
    data = one_class_at(1)
    record = last(fit(data, LOGIT, kind(**AUROC), 1, evaluation=QUIET))
    # the others by themselves; of two, both are within one deviation of their mean
    without = Attendance(rounds=((0, 2),))
    expected = last(fit(data, LOGIT, kind(**AUROC), 1, sampling=without, evaluation=QUIET))
    for name, leaf in expected.state["model"].items():
        torch.testing.assert_close(record.state["model"][name], leaf, rtol=1e-10, atol=1e-10)
    assert {row[0] for row in record.public} == {0, 2}  # what is not defined is not in the record


@pytest.mark.parametrize("kind", [fl.EvaluationWeighted, fl.Selective])
def test_where_no_score_is_defined_all_count_the_same(kind: type[Algorithm]) -> None:
    data = two_classes(federation((40, 30, 50), split=Split(train=0.5, validation=0.5, test=0.0)))
    data.y[:] = 1
    found = last(fit(data, LOGIT, kind(**AUROC), 1, evaluation=QUIET))
    plain = last(fit(data, LOGIT, fl.FedAvg(lr=0.1, batch_size=8, weights="uniform"), 1, evaluation=QUIET))
    for name, leaf in plain.state["model"].items():
        torch.testing.assert_close(found.state["model"][name], leaf, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scores", ["post", "pre"])
@pytest.mark.parametrize("weigh", ["score", "within_std"])
def test_a_peer_that_can_score_nobody_takes_the_plain_mean(weigh: str, scores: str) -> None:
    data = one_class_at(1)
    judged, plain = (
        last(fit(data, LOGIT, fl.Peer(**{**AUROC, **given}), 1, evaluation=QUIET))
        for given in ({"weights": weigh, "scores": scores}, {"weights": "uniform"})
    )
    for name, leaf in plain.own[1]["model"].items():
        torch.testing.assert_close(judged.own[1]["model"][name], leaf, rtol=1e-12, atol=1e-12)
    assert all(is_sound(own["model"], own["model"]) for own in judged.own.values())
    assert {row[0] for row in judged.public} == {0, 2}
