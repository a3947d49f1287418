"""The verbs between server and clients."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom import tree
from fedloom.aggregation import means
from fedloom.algorithm import Algorithm, Update
from fedloom.algorithms import FedAvg
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Vector
from fedloom.data.federation import Federation
from fedloom.errors import InputError
from fedloom.federation.cohort import Cohort
from fedloom.federation.engine import fit
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import Inbox
from fedloom.task import Task
from fedloom.training.clients import Clients
from fedloom.tree import Groups, Tree
from tests.conftest import Dense, assert_close, facts, federation, last


class Ring(Algorithm):
    """Peer-to-peer: everybody trains, then mixes the models of its two neighbours and itself."""

    linear: ClassVar[bool] = False

    def init(self, task: Task, model: Tree) -> Groups:
        return {}

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {"model": model}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        trained = cohort.map(self.improve, state)
        size = len(cohort)
        graph = torch.zeros(size, size)
        for client in range(size):
            for step in (-1, 0, 1):
                graph[client, (client + step) % size] = 1
        cohort.exchange(self.blend, trained.groups, graph)
        return state

    def improve(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, own["model"], shared, own, data)
        return Update({"model": trained.model}, torch.ones(len(data)), trained=trained), {"model": trained.model}

    def blend(self, task: Task, shared: Groups, own: Groups, data: Clients, inbox: Inbox) -> tuple[Update, Groups]:
        mixed = []
        for position in range(len(data)):
            received = tree.rows(inbox.trees["model"], torch.tensor(inbox.senders(position)))
            mixed.append(means.mean(received, torch.ones(len(inbox.senders(position)))))
        return Update({}, torch.ones(len(data))), {"model": tree.stack(mixed)}

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        return own["model"]


class Median(FedAvg):
    """A rule that is not linear."""

    linear: ClassVar[bool] = False

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        middle = cohort.reduce(self.client, state, rule=lambda changes, *_: tree.map_leaves(coordinate_median, changes))
        return {**state, "model": middle["model"]}


def coordinate_median(leaf: Tensor) -> Tensor:
    return leaf.sort(0).values[(len(leaf) - 1) // 2]


class Personal(FedAvg):
    """The server sends every client a message of its own and looks at every answer; nothing is private here."""

    linear: ClassVar[bool] = False

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        each = {"shift": {"by": torch.tensor([float(client) for client in cohort.ids], dtype=torch.float64)}}
        answers = cohort.map(self.shifted, state, each=each)
        summed = cohort.reduce(self.shifted, state, each=each)
        assert torch.equal(answers.public["examples"], summed.public["examples"])
        again = means.mean(answers["model"], answers.weights["model"])
        assert tree.sha256(again) == tree.sha256(summed["model"])  # one implementation of averaging
        return {"model": summed["model"], "seen": {"examples": answers.public["examples"]}}

    def shifted(self, task: Task, shared: Groups, own: Groups, data: Clients, each: Groups) -> tuple[Update, Groups]:
        moved = tree.add(
            tree.expand(shared["model"], len(data)),
            tree.expand(tree.map_leaves(torch.ones_like, shared["model"]), len(data)),
            scale=each["shift"]["by"],
        )
        return Update({"model": moved}, data.examples.double(), public={"examples": data.examples}), own


class TwoWeights(FedAvg):
    """Two groups, each with weights of its own."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        found = cohort.reduce(self.both, state)
        return {"model": state["model"], "a": found["a"], "b": found["b"], "sums": found.weights}

    def both(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        number = {"x": torch.tensor([float(client) for client in data.ids], dtype=torch.float64)}
        weight = {"a": torch.ones(len(data)), "b": data.examples.double()}
        return Update({"a": number, "b": number}, weight), own


class NamedWeight(FedAvg):
    """A group may have any name."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        found = cohort.reduce(self.named, state)
        return {"model": state["model"], "weight": found["weight"]}

    def named(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        return Update({"weight": {"weight": torch.full((len(data), 2), 3.0)}}, torch.ones(len(data))), own


SIZES = (9, 20, 33, 14, 26)
Backends = Callable[[Federation, Task], Any]


@pytest.fixture(params=["serial", "vector 1", "vector 3"])
def backend(request: pytest.FixtureRequest, vector: Callable[..., Vector]) -> Backends:
    if request.param == "serial":
        return Serial
    return lambda data, task: vector(data, task, group=int(request.param.split()[1]))


def test_the_neighbours_of_a_ring_mix_what_they_have_learnt(backend: Backends) -> None:
    task, data = Task(Dense, dtype="float64"), federation(SIZES)
    algorithm = Ring(batch_size=8)
    record = last(fit(data, task, algorithm, 2, backend=backend(data, task)))
    reference = list(fit(data, task, algorithm, 2))
    assert_close(record, reference[-1])
    # one round by hand: what each has trained alone, then the mean of three neighbours
    everyone = Clients(data, tuple(range(5)), seed=0, round=1, call=0)
    trained = algorithm.improve(task, {}, {"model": tree.expand(task.initial(), 5)}, everyone)[0].groups["model"]
    for client in range(5):
        neighbours = sorted((client + step) % 5 for step in (-1, 0, 1))
        for name, leaf in trained.items():
            expected = (leaf[neighbours[0]] + leaf[neighbours[1]] + leaf[neighbours[2]]) / 3
            torch.testing.assert_close(reference[0].own[client]["model"][name], expected)


def test_a_client_of_an_exchange_receives_from_its_neighbours_alone_and_pays_for_them() -> None:
    inbox = Inbox({}, torch.tensor([[True, False, True], [False, False, False]]))
    assert inbox.senders(0) == [0, 2]
    assert inbox.senders(1) == []
    task, data = Task(Dense, dtype="float64"), federation(SIZES)
    record = last(fit(data, task, Ring(), 1))
    size = tree.size(task.initial())
    assert [report.bytes_down for report in record.reports] == [0] * 5 + [2 * size] * 5  # its own it has already


def test_a_rule_may_be_any_function_of_the_stacked_changes(backend: Backends) -> None:
    task, data = Task(Dense, dtype="float64"), federation(SIZES)
    record = last(fit(data, task, Median(batch_size=8), 1, backend=backend(data, task)))
    everyone = Clients(data, tuple(range(5)), seed=0, round=1, call=0)
    trained = FedAvg(batch_size=8).client(task, {"model": task.initial()}, {}, everyone)[0].groups["model"]
    for name, leaf in trained.items():
        torch.testing.assert_close(record.state["model"][name], torch.from_numpy(np.median(leaf.numpy(), axis=0)))


def test_each_client_gets_its_own_message_and_map_shows_every_answer(backend: Backends) -> None:
    task, data = Task(Dense, dtype="float64"), federation(SIZES)
    record = last(fit(data, task, Personal(), 1, backend=backend(data, task), sampling=Sampling(count=3), seed=2))
    counts = data.counts(record.cohort, "train")
    assert record.state["seen"]["examples"].tolist() == counts.tolist()
    shift = np.average(record.cohort, weights=counts)
    for name, leaf in task.initial().items():
        torch.testing.assert_close(record.state["model"][name], leaf + shift)
    assert facts(record) == facts(last(fit(data, task, Personal(), 1, sampling=Sampling(count=3), seed=2)))


def test_groups_of_one_update_may_be_weighted_differently(backend: Backends) -> None:
    task, data = Task(Dense), federation(SIZES)
    record = last(fit(data, task, TwoWeights(), 1, backend=backend(data, task)))
    counts = data.counts(range(5), "train")
    assert record.state["a"]["x"].item() == pytest.approx(2.0)
    assert record.state["b"]["x"].item() == pytest.approx(np.average(range(5), weights=counts))
    assert record.state["sums"]["a"].item() == 5
    assert record.state["sums"]["b"].item() == counts.sum()


def test_a_group_may_be_called_weight() -> None:
    record = last(fit(federation((9, 9)), Task(Dense), NamedWeight(), 1))
    assert record.state["weight"]["weight"].tolist() == [3, 3]


def test_two_calls_of_a_round_and_two_rounds_have_other_keys() -> None:
    data = federation((20,))
    found = {
        Clients(data, (0,), seed, round, call).key(0, "batches")
        for seed in (0, 1)
        for round in (1, 2)
        for call in (0, 1)
    }
    assert len(found) == 8


class Stranger(FedAvg):
    """Hands the server a function that is not one of its methods."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        return {"model": cohort.reduce(client, state)["model"]}


def client(task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
    return Update({"model": tree.expand(tree.zeros_like(shared["model"]), len(data))}, torch.ones(len(data))), own


def test_a_function_that_is_not_a_method_of_the_algorithm_is_refused_and_not_mistaken_for_one() -> None:
    with pytest.raises((InputError, TypeError), match="method"):
        last(fit(federation((9, 9)), Task(Dense), Stranger(), 1))


def test_all_verbs_take_a_message_for_each_client() -> None:
    class Told(Ring):
        def round(self, state: Groups, cohort: Cohort) -> Groups:
            each = {"shift": {"by": torch.arange(len(cohort), dtype=torch.float64)}}
            trees = {"model": tree.expand(cohort.task.initial(), len(cohort))}
            answers = cohort.exchange(self.answer, trees, torch.eye(len(cohort)), each=each)
            return {"shift": answers["shift"]}

        def answer(
            self, task: Task, shared: Groups, own: Groups, data: Clients, *received: Any
        ) -> tuple[Update, Groups]:
            (each,) = (part for part in received if not isinstance(part, Inbox))
            return Update({"shift": each["shift"]}, torch.ones(len(data))), own

    record = last(fit(federation((9, 9, 9)), Task(Dense), Told(), 1))
    assert record.state["shift"]["by"].tolist() == [0, 1, 2]


class Flagged(nn.Module):
    """A buffer that is a flag, as attention masks and pruning masks are."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 3)
        self.register_buffer("used", torch.arange(16) % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.where(self.used, x, 0.0))


def test_a_buffer_of_flags_is_still_one_after_averaging() -> None:
    record = last(fit(federation((9, 20)), Task(Flagged), FedAvg(), 2))
    assert torch.equal(record.state["model"]["used"], torch.arange(16) % 2 == 0)
