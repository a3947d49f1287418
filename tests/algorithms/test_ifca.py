"""IFCA: every client uses the model that is best on its own training data now, whether it takes part or not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.algorithms import IFCA
from fedloom.backends.protocol import Backend
from fedloom.backends.vector import Vector
from fedloom.data.federation import Federation
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.tree import Groups
from tests.conftest import Dense, federation

ONLY_ONE = Sampling(count=1, sampling="window")  # clients 0, 1, 2, …: most are not drawn for long
STEPS = {"lr": 0.3, "batch_size": 4, "epochs": 5.0, "clusters": 2}
SPLITS = Evaluation(splits=("train", "test"))


def two_kinds() -> Federation:
    """Clients 1, 3 and 5 call things by other names."""
    data = federation((30, 30, 30, 30, 30, 30), seed=6)
    y = data.y.clone()
    for client in (1, 3, 5):
        y[30 * client : 30 * client + 30] = 2 - y[30 * client : 30 * client + 30]
    return replace(data, y=y)


def loss(task: Task, model: dict[str, torch.Tensor], data: Federation, client: int, split: str) -> float:
    rows = data.indices(client, split)  # type: ignore[arg-type]
    output = torch.func.functional_call(task.build().eval(), model, (data.x[rows].double(),))
    return nn.functional.cross_entropy(output, data.y[rows]).item()


def best(task: Task, state: Groups, data: Federation, client: int) -> str:
    return min(state, key=lambda name: loss(task, state[name], data, client, "train"))


def check(task: Task, data: Federation, records: list[RoundRecord], initial: Groups) -> set[str]:
    """Every measurement is that of the best model; returns the models that were."""
    used = set()
    for before, record in zip([initial, *(r.state for r in records)], records, strict=False):
        phases = {"pre_fit": before, "final": record.state}
        for phase in record.clients.keys() & phases.keys():
            for client in range(data.clients):
                name = best(task, phases[phase], data, client)
                expected = loss(task, phases[phase][name], data, client, "test")
                found = record.clients[phase][client]["test"].values(task)["loss"]  # type: ignore[index]
                assert found == pytest.approx(expected, rel=1e-9), f"round {record.round}, {phase}, client {client}"
                used.add(name)
    return used


def test_clients_are_measured_with_the_model_that_is_best_for_them_now() -> None:
    task, data, algorithm = Task(Dense, dtype="float64"), two_kinds(), IFCA(**STEPS)
    records = list(fit(data, task, algorithm, 4, sampling=ONLY_ONE, evaluation=SPLITS))
    assert check(task, data, records, algorithm.init(task, task.initial())) == {"model0", "model1"}


@pytest.mark.parametrize("group", [1, 3])
def test_they_are_on_worker_processes_too(vector: Callable[..., Vector], group: int) -> None:
    task, data, algorithm = Task(Dense, dtype="float64"), two_kinds(), IFCA(**STEPS)
    backend: Backend = vector(data, task, group=group)
    records = list(fit(data, task, algorithm, 3, sampling=ONLY_ONE, evaluation=SPLITS, backend=backend))
    assert check(task, data, records, algorithm.init(task, task.initial())) == {"model0", "model1"}


def test_a_clients_exported_model_is_its_best_one(tmp_path: Path) -> None:
    task, data = Task(Dense, dtype="float64"), two_kinds()
    result = fl.run(data, task, IFCA(**STEPS), 4, cohort=ONLY_ONE, out=tmp_path, backend="serial")
    state: Groups = result._checkpoint(result.runs[0]).snapshot.state
    chosen = [best(task, state, data, client) for client in range(data.clients)]
    assert chosen[5] != chosen[4], "the clients that were never drawn should differ"
    for client, name in enumerate(chosen):
        (model,) = result.weights(client=client).values()
        assert all(torch.equal(model[leaf], state[name][leaf]) for leaf in model), client


def test_a_model_without_a_loss_is_nobodys_best() -> None:
    task, data, algorithm = Task(Dense), two_kinds(), IFCA(clusters=3)
    from fedloom.training.clients import Clients

    broken = {name: torch.full_like(leaf, torch.nan) for name, leaf in task.initial().items()}
    state = {**algorithm.init(task, task.initial()), "model0": broken}
    kept = algorithm.choose(task, state, {}, Clients(data, (0, 1)))
    assert (kept["cluster"]["number"] > 0).all()


def test_agents_choose_by_the_data_of_their_site() -> None:
    from types import SimpleNamespace

    from fedloom.compression.table import NO_COMPRESSION
    from fedloom.federation.work import Place
    from fedloom.network.agent.assignment_runner import AssignmentRunner
    from fedloom.network.protocol.messages import NEW, AssignedClient, Assignment
    from fedloom.privacy.table import PrivacyTable
    from fedloom.training.clients import Setup

    task, data, algorithm = Task(Dense, dtype="float64"), two_kinds(), IFCA(**STEPS)
    *_, record = fit(data, task, algorithm, 3, sampling=ONLY_ONE, evaluation=Evaluation(splits=()))
    place, initial = Place(data, task, Setup()), algorithm.init_own(task, task.initial())
    loaded = SimpleNamespace(
        plan=SimpleNamespace(privacy=PrivacyTable(), compress=NO_COMPRESSION),
        prepared=lambda _: SimpleNamespace(task=task),
        place=lambda *_: place,
        algorithm=lambda _: algorithm,
        initial_own=lambda *_: initial,
    )
    runner = AssignmentRunner(
        experiment=loaded,  # type: ignore[arg-type]
        policy=SimpleNamespace(check_assignment=lambda *_: None, withhold=lambda answer, _: answer),  # type: ignore[arg-type]
        parcels=SimpleNamespace(shared=lambda *_: record.state),  # type: ignore[arg-type]
        states=SimpleNamespace(load=lambda *given: given[-1]),  # type: ignore[arg-type]
        questions=SimpleNamespace(check=lambda *_: None, check_announced=lambda *_: None),  # type: ignore[arg-type]
        sessions=SimpleNamespace(),  # type: ignore[arg-type]
    )
    assignment = Assignment(
        id="1", kind="evaluate", verb="evaluate", label="ifca", seed=0, round=3, attempt=0, cohort=6, population=6,
        clients=tuple(AssignedClient(client=client, local=client, ticket=NEW) for client in range(6)), splits=("test",),
    )  # fmt: skip
    chosen = [best(task, record.state, data, client) for client in range(6)]
    assert len(set(chosen)) == 2
    for client, answer in enumerate(runner.evaluate(assignment)):
        measured = answer.measured["test"]
        expected = loss(task, record.state[chosen[client]], data, client, "test")
        assert (answer.client, measured.sums["loss"]) == (client, pytest.approx(expected * measured.count))
