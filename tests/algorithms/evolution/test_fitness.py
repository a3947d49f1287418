"""Fitness against plain loops over individuals and examples."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.algorithms.evolution import fitness as module
from fedloom.algorithms.evolution.fitness import (
    HOPELESS,
    Search,
    fitness_on,
    fitness_side_by_side,
    population_outputs,
    scores,
)
from fedloom.algorithms.evolution.neuroevolution import newcomers
from fedloom.errors import InputError
from fedloom.task import Task
from fedloom.training.clients import Clients, Setup
from fedloom.training.probe import probe
from fedloom.tree import Tree, row
from tests.conftest import ALL_TRAIN, CLASSES, Dense, Noisy, Normed, Pictures, Recurrent, federation, numbers_federation

OUTPUTS = torch.randn(4, 9, CLASSES, generator=torch.Generator().manual_seed(1)).double()
LABELS = torch.arange(9) % CLASSES
TASK = Task(Dense)


def mean_score(kind: Any, number: int) -> float:
    return float(scores(TASK, OUTPUTS, LABELS, kind)[number].mean())


def test_fitness_is_what_scikit_learn_says() -> None:
    one_hot = np.eye(CLASSES)[LABELS.numpy()]
    for number, output in enumerate(OUTPUTS.numpy()):
        chances = np.exp(output) / np.exp(output).sum(1, keepdims=True)
        assert mean_score("mse", number) == pytest.approx(-mean_squared_error(one_hot, output))
        assert mean_score("cross_entropy", number) == pytest.approx(-log_loss(LABELS.numpy(), chances))
        assert mean_score("accuracy", number) == accuracy_score(LABELS.numpy(), output.argmax(1))
        assert mean_score("loss", number) == pytest.approx(-log_loss(LABELS.numpy(), chances))


def test_a_regression_is_compared_with_its_numbers() -> None:
    found = scores(TASK, torch.tensor([[[1.0], [5.0]]]), torch.tensor([2.0, 2.0]), "mse")
    assert found.tolist() == [[-1.0, -9.0]]
    with pytest.raises(InputError, match='fitness = "accuracy" needs classes'):
        scores(TASK, torch.tensor([[[1.0], [5.0]]]), torch.tensor([2.0, 2.0]), "accuracy")


def population(task: Task, count: int = 5) -> tuple[Tree, Tree]:
    model = task.initial()
    found = newcomers(task, count, 3, model)
    return found, {name: leaf for name, leaf in model.items() if name not in found}


@pytest.mark.parametrize("net", [Dense, Normed, Pictures, Recurrent, Noisy])
def test_a_population_says_what_its_individuals_say(net: type[nn.Module]) -> None:
    task, data = Task(net, dtype="float64"), federation((11, 7), split=ALL_TRAIN)
    stacked, fixed = population(task)
    setup = probe(data, task).setup(group=1)
    x = data.x[:11].double()
    found = population_outputs(task, stacked, fixed, x, setup)
    for number in range(5):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            expected = functional_call(task.build().eval(), {**fixed, **row(stacked, number)}, (x,))
        torch.testing.assert_close(found[number], expected)


def test_individuals_go_through_the_model_together_where_they_can() -> None:
    for net, together in ((Dense, True), (Pictures, True), (Recurrent, False)):
        task = Task(net)
        stacked, fixed = population(task)
        population_outputs(task, stacked, fixed, torch.zeros(3, 16), Setup(rows_apart=True))
        assert module._CAN_STACK[task] is together


def test_fitness_does_not_depend_on_how_examples_are_cut_into_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    task, data = Task(Dense, dtype="float64"), federation((40,), split=ALL_TRAIN)
    stacked, fixed = population(task)
    clients = Clients(data, (0,))
    whole = fitness_on(task, stacked, fixed, clients, clients.rows(0, "train"), "mse")
    monkeypatch.setattr(module, "TOGETHER", 35)  # seven rows a pass
    torch.testing.assert_close(whole, fitness_on(task, stacked, fixed, clients, clients.rows(0, "train"), "mse"))


def test_clients_side_by_side_get_what_each_gets_alone() -> None:
    task, data = Task(Dense, dtype="float64"), federation((40, 1, 16, 33, 5), split=ALL_TRAIN)
    stacked, fixed = population(task)
    alone = [
        fitness_on(task, stacked, fixed, Clients(data, (client,)), data.indices(client, "train"), "mse")
        for client in range(5)
    ]
    found = {}
    for group in (2, 4):
        for ids in ((0, 1, 2, 3, 4), (0, 1), (2, 3, 4), (4,)):
            clients = Clients(data, ids, setup=Setup(group=group))
            held = [clients.rows(position, "train") for position in range(len(ids))]
            for client, mean in zip(ids, fitness_side_by_side(task, stacked, fixed, clients, held, "mse"), strict=True):
                torch.testing.assert_close(mean, alone[client])
                assert torch.equal(mean, found.setdefault((group, client), mean))  # the same bits in any company


def test_a_client_that_cannot_be_judged_does_not_spoil_the_others() -> None:
    data = federation((20, 20), split=ALL_TRAIN)
    data.x[3] = float("nan")
    task = Task(Dense)
    stacked, fixed = population(task)
    clients = Clients(data, (0, 1), setup=Setup(group=2))
    held = [clients.rows(position, "train") for position in range(2)]
    first, second = fitness_side_by_side(task, stacked, fixed, clients, held, "cross_entropy")
    assert bool((first == HOPELESS).all())
    assert bool((second > -100).all())


def test_what_cannot_be_computed_is_hopeless() -> None:
    task, data = Task(Dense), federation((5,), split=ALL_TRAIN)
    stacked, fixed = population(task)
    stacked["hidden.weight"][2] = float("nan")
    clients = Clients(data, (0,))
    found = fitness_on(task, stacked, fixed, clients, clients.rows(0, "train"), "mse")
    assert float(found[2]) == HOPELESS == -100_000
    assert all(float(found[number]) > -100 for number in (0, 1, 3, 4))


class Constant(nn.Module):
    """Says one number whatever it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(len(x), 1)


def test_the_server_sees_the_mean_over_examples_and_nothing_else() -> None:
    data = numbers_federation([[0.0]] * 4, [1.0, 3.0, 3.0, 3.0], (1, 3))
    task = Task(Constant, loss="mse", metrics=[], dtype="float64")
    shared = {"population": {"value": torch.tensor([[0.0], [3.0]]).double()}, "fixed": {}}
    update, _ = Search().judge(task, shared, {}, Clients(data, (0, 1)))
    assert update.groups["fitness"]["fitness"].tolist() == [[-1.0, -4.0], [-9.0, 0.0]]
    assert update.weights("fitness").tolist() == [1.0, 3.0]
    assert (update.public, update.trained, list(update.groups)) == ({}, None, ["fitness"])


def test_another_random_example_is_drawn_in_every_round() -> None:
    data = numbers_federation([[0.0]] * 5, [1.0, 2.0, 3.0, 4.0, 5.0], (5,))
    task = Task(Constant, loss="mse", metrics=[], dtype="float64")
    shared = {"population": {"value": torch.zeros(1, 1).double()}, "fixed": {}}
    seen = set()
    for round in range(1, 41):
        update, _ = Search(examples="one").judge(task, shared, {}, Clients(data, (0,), round=round))
        assert update.weights("fitness").tolist() == [1.0]
        seen.add(float(update.groups["fitness"]["fitness"]))
    assert seen == {-1.0, -4.0, -9.0, -16.0, -25.0}
