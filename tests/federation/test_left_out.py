"""Changes far longer than the others' do not count."""

from dataclasses import replace

import pytest
import torch

from fedloom import tree
from fedloom.aggregation.outliers import outliers, update_lengths
from fedloom.algorithm import Update
from fedloom.algorithms import FedAvg
from fedloom.backends.protocol import Backend
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Vector
from fedloom.federation.client_state import ClientStates
from fedloom.federation.cohort import Cohort
from fedloom.federation.engine import fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.training.clients import Clients
from fedloom.training.probe import probe
from fedloom.tree import Groups, Tree
from tests.conftest import Dense, federation, last

LOUD_SIZES = (12, 30, 21, 45, 9, 17)
JUDGED = Sampling(outlier_factor=10)


class Loud(FedAvg):
    """One client multiplies what it learnt; everybody keeps a counter."""

    loud: int = 3
    factor: float = 100.0

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {"rounds": {"count": torch.zeros(1)}}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, _ = super().client(task, shared, {}, data)
        factors = torch.tensor([self.factor if client == self.loud else 1.0 for client in data.ids])
        change = tree.scale(tree.sub(update.groups["model"], shared["model"]), factors)
        groups = {"model": tree.add(tree.expand(shared["model"], len(data)), change)}
        counted = tree.map_leaves(lambda count: count + 1, own["rounds"])
        return Update(groups, update.weight, trained=update.trained, positions=update.positions), {"rounds": counted}


@pytest.mark.slow
@pytest.mark.parametrize("group", [None, 1, 2], ids=["serial", "vector", "lanes"])
def test_a_change_far_longer_than_the_others_is_left_out_of_a_sum(group: int | None) -> None:
    data, task, algorithm = federation(LOUD_SIZES), Task(Dense), Loud(batch_size=8, lr=0.05)
    backend: Backend = Serial(data, task)
    if group is not None:
        backend = Vector(data, task, probe(data, task).setup(group=group), workers=2)
    try:
        record = last(fit(data, task, algorithm, 2, sampling=JUDGED, backend=backend))
    finally:
        backend.close()
    assert record.outliers == (3,)
    assert record.notes == {"outliers": 1.0}
    assert record.cohort == (0, 1, 2, 4, 5)
    assert {report.client for report in record.reports} == {0, 1, 2, 4, 5}
    assert 3 not in record.own
    assert all(own["rounds"]["count"].item() == 2 for own in record.own.values())
    # as if the client had never been there
    state = algorithm.init(task, task.initial())
    states = ClientStates(algorithm.init_own(task, state["model"]))
    for round in (1, 2):
        cohort = Cohort(Serial(data, task), algorithm, task, (0, 1, 2, 4, 5), len(LOUD_SIZES), round, 0, states)
        state = algorithm.round(state, cohort)
    if group != 2:  # lanes round differently
        assert tree.sha256(record.state["model"]) == tree.sha256(state["model"])
    torch.testing.assert_close(record.state["model"], state["model"], rtol=1e-5, atol=1e-6)


def test_outliers_count_where_they_are_allowed_or_too_few_to_tell() -> None:
    data, task = federation(LOUD_SIZES), Task(Dense)
    for sampling in (Sampling(outlier_factor="off"), Sampling()):  # a simulation leaves nobody out by itself
        allowed = last(fit(data, task, Loud(batch_size=8, lr=0.05), 1, sampling=sampling))
        assert allowed.outliers == ()
        assert 3 in allowed.cohort
    few = federation(LOUD_SIZES[:4])
    assert last(fit(few, task, Loud(batch_size=8, lr=0.05), 1, sampling=JUDGED)).outliers == ()


def test_a_single_client_whose_change_would_ruin_the_model_costs_its_round() -> None:
    data, task = federation((12,)), Task(Dense)
    loud = last(fit(data, task, Loud(factor=1e30, loud=0, batch_size=8, lr=0.05), 1, sampling=JUDGED))
    assert (loud.complete, loud.outliers, loud.own) == (False, (0,), {})
    assert tree.sha256(loud.state["model"]) == tree.sha256(task.initial())
    assert last(fit(data, task, Loud(factor=1e6, loud=0, batch_size=8, lr=0.05), 1, sampling=JUDGED)).complete


def test_a_round_that_its_outliers_bring_below_the_quorum_does_not_count() -> None:
    data, task = federation(LOUD_SIZES), Task(Dense)
    record = last(fit(data, task, Loud(batch_size=8, lr=0.05), 1, sampling=JUDGED.replace(quorum=6)))
    assert not record.complete
    assert record.outliers == (3,)
    assert tree.sha256(record.state["model"]) == tree.sha256(task.initial())
    assert record.own == {}


def test_scaffold_on_a_network_is_judged_by_its_model_and_not_by_its_control_variates() -> None:
    task, model = Task(Dense), Task(Dense).initial()
    trainable = tree.select(model, task.trainable)
    long = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 10.0])  # the last client was never drawn before
    control = tree.scale(tree.expand(tree.map_leaves(torch.ones_like, trainable), 6), long)
    positions = {"model": "model"}
    update = Update({"model": tree.expand(model, 6), "control": control}, torch.ones(6), positions=positions)

    def found(update: Update) -> list[int]:
        lengths = [each for each, _ in update_lengths(update, {"model": model}, task.trainable, 6)]
        return outliers(lengths, [20] * 6, 10)

    assert found(update) == []
    assert found(replace(update, groups={**update.groups, "control": tree.scale(control, 1e3)})) == [5]  # ruinous
    alone = Update({"gradient": control}, torch.ones(6))  # FedSGD has no position: its gradient is what counts
    assert found(alone) == [5]
