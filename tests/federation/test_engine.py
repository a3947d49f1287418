"""The round loop: what is measured when, what a record says, and how a run goes on."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fedloom import tree
from fedloom.algorithm import Algorithm
from fedloom.algorithms import ALGORITHMS, FedAvg, LocalOnly, Pooled
from fedloom.data.federation import Federation
from fedloom.errors import InputError, TrainingError
from fedloom.federation.engine import Evaluation, RoundRecord, Snapshot, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.training import local
from fedloom.training.clients import Clients
from fedloom.tree import Groups
from tests.conftest import Dense, Logit, Noisy, Normed, facts, federation, last, two_classes
from tests.federation.helpers import LIGHT, SIZES, by_hand, values

EVERY_ALGORITHM = {
    **{name: kind(**LIGHT) for name, kind in ALGORITHMS.items()},
    "fedavg that keeps adam": FedAvg(optimizer="adam", lr=0.01, batch_size=8, optimizer_state="keep"),
    "local that keeps momentum": LocalOnly(momentum=0.9, optimizer_state="keep", **LIGHT),
    "local that forgets": LocalOnly(momentum=0.9, **LIGHT),
    "pooled adam": Pooled(optimizer="adam", lr=0.01, batch_size=8),
}


def suited_to(name: str) -> tuple[Task, Federation]:
    """A task that an algorithm can learn: one of them is for linear models only."""
    if name in ("fsvrg", "svrg"):  # one example a step, which batch normalisation cannot take
        return Task(Dense), federation(SIZES)
    if name == "cocoa":
        return Task(Logit, loss="bce"), two_classes(federation(SIZES))
    return Task(Normed), federation(SIZES)


def test_before_the_first_round_every_client_measures_the_initial_model() -> None:
    task, data = Task(Normed, dtype="float64"), federation(SIZES)
    record = next(fit(data, task, FedAvg(**LIGHT), 3))
    assert sorted(record.clients["pre_fit"]) == [0, 1, 2, 3]
    for client, measured in record.clients["pre_fit"].items():
        expected = by_hand(task, task.initial(), data, data.indices(client, "test"))
        assert values(measured, task) == pytest.approx(expected)


def test_every_round_begins_with_the_model_that_the_last_one_left() -> None:
    task, data = Task(Normed, dtype="float64"), federation(SIZES)
    records = list(fit(data, task, FedAvg(**LIGHT), 3, evaluation=Evaluation(splits=("test", "validation"))))
    for before, after in pairwise(records):
        for client in range(4):
            for split in ("test", "validation"):
                expected = by_hand(task, before.state["model"], data, data.indices(client, split))
                assert values(after.clients["pre_fit"][client], task, split) == pytest.approx(expected)
    for client in range(4):
        expected = by_hand(task, records[-1].state["model"], data, data.indices(client, "test"))
        assert values(records[-1].clients["final"][client], task) == pytest.approx(expected)
    assert all("final" not in record.clients for record in records[:-1])


def test_after_training_a_client_measures_its_own_weights_and_not_the_mean() -> None:
    task, data = Task(Normed, dtype="float64"), federation(SIZES)
    algorithm = FedAvg(**LIGHT)
    record = next(fit(data, task, algorithm, 3, seed=5))
    everyone = Clients(data, (0, 1, 2, 3), seed=5, round=1, setup=_setup(data, task))
    trained = local.train(task, everyone, tree.expand(task.initial(), 4), algorithm.train).model
    for client in range(4):
        expected = by_hand(task, tree.row(trained, client), data, data.indices(client, "test"))
        assert values(record.clients["post_fit"][client], task) == pytest.approx(expected)


def _setup(data: Federation, task: Task) -> Any:
    from fedloom.training.probe import probe

    return probe(data, task).setup(group=1)


def test_each_client_of_local_training_measures_the_model_it_keeps() -> None:
    task, data = Task(Dense, dtype="float64"), federation(SIZES)
    records = list(fit(data, task, LocalOnly(**LIGHT), 2))
    assert records[0].state == {}
    for client in range(4):
        rows = data.indices(client, "test")
        kept = by_hand(task, records[0].own[client]["model"], data, rows)
        assert values(records[0].clients["post_fit"][client], task) == pytest.approx(kept)
        assert values(records[1].clients["pre_fit"][client], task) == pytest.approx(kept)
        final = by_hand(task, records[1].own[client]["model"], data, rows)
        assert values(records[1].clients["final"][client], task) == pytest.approx(final)


def test_only_the_cohort_is_measured_where_that_is_asked_for() -> None:
    task, data = Task(Dense), federation(SIZES)
    evaluation, sampling = Evaluation(clients="cohort"), Sampling(count=2)
    for record in fit(data, task, FedAvg(**LIGHT), 3, evaluation=evaluation, sampling=sampling):
        assert tuple(record.clients["pre_fit"]) == tuple(record.clients["post_fit"]) == record.cohort
        assert len(record.cohort) == 2


def test_rounds_between_measurements_measure_nothing() -> None:
    task, data = Task(Dense), federation(SIZES)
    records = list(fit(data, task, FedAvg(**LIGHT), 5, evaluation=Evaluation(every=3)))
    assert [sorted(record.clients) for record in records] == [
        ["post_fit", "pre_fit"],
        [],
        ["post_fit", "pre_fit"],
        [],
        ["final", "post_fit", "pre_fit"],
    ]


def test_measuring_does_not_change_what_is_learnt() -> None:
    task, data = Task(Normed), federation(SIZES)
    much = Evaluation(splits=("train", "validation", "test"), universal=True, server=("train",))
    found = [last(fit(data, task, FedAvg(**LIGHT), 2, evaluation=one)) for one in (much, Evaluation(splits=()))]
    assert tree.sha256(found[0].state["model"]) == tree.sha256(found[1].state["model"])
    assert found[1].clients == {}


def test_the_validation_split_may_be_watched_after_every_local_epoch() -> None:
    task, data = Task(Dense, dtype="float64"), federation(SIZES)
    algorithm = LocalOnly(epochs=3, **LIGHT)
    watched = last(fit(data, task, algorithm, 1, evaluation=Evaluation(epochs=True, splits=())))
    plain = last(fit(data, task, algorithm, 1, evaluation=Evaluation(splits=())))
    assert facts(watched)["own"] == facts(plain)["own"]
    for report, other in zip(watched.reports, plain.reports, strict=True):
        assert [epoch["loss"] for epoch in report.history] == [epoch["loss"] for epoch in other.history]
        assert all(set(epoch) == {"loss"} for epoch in other.history)
        rows = data.indices(report.client, "validation")
        expected = by_hand(task, watched.own[report.client]["model"], data, rows)
        seen = {name: report.history[-1][f"validation_{name}"] for name in ("loss", "accuracy")}
        assert len(report.history) == 3
        assert seen == pytest.approx(expected)


def test_the_universal_test_is_every_clients_model_on_the_union_of_all_test_splits() -> None:
    task, data = Task(Dense, dtype="float64"), federation(SIZES)
    records = list(fit(data, task, LocalOnly(**LIGHT), 2, evaluation=Evaluation(universal=True)))
    assert all("universal" not in measured for measured in records[0].clients["post_fit"].values())
    union = torch.cat([data.indices(client, "test") for client in range(4)])
    for client in range(4):
        expected = by_hand(task, records[1].own[client]["model"], data, union)
        assert values(records[1].clients["post_fit"][client], task, "universal") == pytest.approx(expected)
        assert records[1].clients["post_fit"][client]["universal"].count == len(union)


# what the server measures


# going on


def snapshot(records: list[RoundRecord], round: int) -> Snapshot:
    own: dict[int, Groups] = {}
    for record in records[:round]:
        own.update(record.own)
    return Snapshot(round, records[round - 1].state, own)


@pytest.mark.parametrize("name", EVERY_ALGORITHM)
def test_a_run_that_goes_on_after_any_round_is_the_run_that_never_stopped(name: str) -> None:
    (task, data), algorithm = suited_to(name), EVERY_ALGORITHM[name]
    settings: dict[str, Any] = {"seed": 3, "sampling": Sampling(count=2, redraw_every=2)}
    records = list(fit(data, task, algorithm, 4, **settings))
    for stop in (1, 3):
        again = list(fit(data, task, algorithm, 4, resume=snapshot(records, stop), **settings))
        assert [facts(record) for record in again] == [facts(record) for record in records[stop:]]


def test_a_run_that_goes_on_after_its_last_round_has_nothing_to_do() -> None:
    task, data = Task(Dense), federation(SIZES)
    records = list(fit(data, task, FedAvg(**LIGHT), 2))
    assert list(fit(data, task, FedAvg(**LIGHT), 2, resume=snapshot(records, 2))) == []


@pytest.mark.parametrize("name", EVERY_ALGORITHM)
def test_states_that_were_handed_out_never_change_again(name: str) -> None:
    (task, data), algorithm = suited_to(name), EVERY_ALGORITHM[name]
    initial = task.initial()
    begin = Snapshot(0, algorithm.init(task, initial), {0: algorithm.init_own(task, initial)})
    before = tree.sha256(initial)
    seen = []
    for record in fit(data, task, algorithm, 3, resume=begin):
        seen.append((record, facts(record)))
    assert tree.sha256(initial) == before
    for record, at_the_time in seen:
        assert facts(record) == at_the_time


def test_seeds_decide_about_everything_and_nothing_else_does() -> None:
    task, data = Task(Normed), federation(SIZES)
    found = []
    for seed, noise in ((1, 10), (1, 20), (2, 10)):
        torch.manual_seed(noise)
        np.random.seed(noise)
        found.append([facts(r) for r in fit(data, task, FedAvg(**LIGHT), 2, seed=seed, sampling=Sampling(count=3))])
    assert found[0] == found[1]
    assert found[0][-1]["state"] != found[2][-1]["state"]


@pytest.mark.parametrize("algorithm", [EVERY_ALGORITHM[name] for name in ("fedavg", "fedsgd", "local", "pooled")])
def test_a_run_with_a_model_that_draws_by_itself_is_reproducible_in_all_it_says(algorithm: Algorithm) -> None:
    task, data = Task(Noisy), federation((9, 20))
    found = []
    for noise in (10, 20):
        torch.manual_seed(noise)
        before = torch.random.get_rng_state()
        found.append([facts(record) for record in fit(data, task, algorithm, 2)])
        assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0] == found[1]


# rounds that do not count, and what goes wrong


def test_a_round_for_which_nobody_is_drawn_counts_and_leaves_the_state() -> None:
    task, data = Task(Dense), federation(SIZES)
    sampling = Sampling(fraction=0.1, sampling="poisson")
    records = list(fit(data, task, FedAvg(**LIGHT), 8, sampling=sampling))
    empty = [record for record in records if not record.cohort]
    assert 0 < len(empty) < 8
    before = task.initial()
    for record in records:
        assert record.complete
        if not record.cohort:
            assert tree.sha256(record.state["model"]) == tree.sha256(before)
            assert record.reports == ()
            assert record.own == {}
            assert "post_fit" not in record.clients
        before = record.state["model"]


def test_a_round_below_its_quorum_does_not_count() -> None:
    task, data = Task(Dense), federation(SIZES)
    sampling = Sampling(fraction=0.5, sampling="poisson", quorum=2)
    records = list(fit(data, task, LocalOnly(**LIGHT), 8, sampling=sampling))
    assert {len(record.cohort) >= 2 for record in records} == {True, False}
    for record in records:
        assert record.complete == (len(record.cohort) >= 2)
        assert tuple(record.own) == (record.cohort if record.complete else ())


def test_pooled_training_needs_no_cohort() -> None:
    data = federation(SIZES)
    record = last(fit(data, Task(Dense), Pooled(**LIGHT), 1, sampling=Sampling(fraction=1e-9, sampling="poisson")))
    assert record.cohort == (data.everyone,)
    assert record.complete
    assert sorted(record.clients["final"]) == [0, 1, 2, 3]


def test_a_loss_that_is_not_finite_names_round_and_client() -> None:
    data = federation(SIZES)
    records = fit(data, Task(Dense), FedAvg(**LIGHT), 3)
    next(records)
    data.x[12:42] = torch.inf
    with pytest.raises(
        TrainingError, match=r"^Round 2, client 'client-1', local training, step 1 of \d+: the loss is nan"
    ):
        next(records)


def test_a_backend_that_does_not_inherit_from_the_protocol_is_refused() -> None:
    class Lookalike:
        """Has the method that a backend needs, but not its defaults."""

        def run(self, work: object) -> object:
            return None

    message = r"^A backend must inherit from fedloom\.backends\.protocol\.Backend\. Got .*Lookalike object.* instead\.$"
    with pytest.raises(InputError, match=message):
        next(fit(federation((20,)), Task(Dense), FedAvg(), 1, backend=Lookalike()))  # type: ignore[arg-type]
