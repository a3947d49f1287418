"""Attacks on stacked changes, and what they do to whole runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.audits import poisoning
from fedloom.audits.poisoning import ATTACKERS, ATTACKS, CLIENTS, Attacked, flipped, poison
from fedloom.backends.serial import Serial
from fedloom.data.federation import Dataset, Federation
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import Place
from fedloom.training.clients import Setup
from fedloom.tree import flatten
from tests.conftest import Dense, federation

OTHERS = torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 5.0]])  # mean (3, 3), deviations (2, √3)
OWN = torch.tensor([[1.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("none", OWN),
        ("label flip", OWN),
        ("sign flip", [[-3.0, -3.0]] * 2),
        ("scaled replacement", [[2.5, 0.0], [0.0, 2.5]]),
        ("a little is enough", [[0.0, 3 - 1.5 * 3**0.5]] * 2),
        ("inner product", [[-6.75, -6.75]] * 2),
    ],
)
def test_an_attack_sends_what_its_paper_says(name: str, sent: object) -> None:
    attack, _ = ATTACKS[name]
    torch.testing.assert_close(attack(OTHERS, OWN), torch.as_tensor(sent))


def test_the_inner_product_attack_turns_the_mean_around() -> None:
    sent = ATTACKS["inner product"][0](OTHERS, OWN)
    assert float(torch.cat([OTHERS, sent]).mean(0) @ OTHERS.mean(0)) < 0


def test_the_replacement_makes_the_mean_the_attackers_model_if_the_others_have_converged() -> None:
    honest = torch.zeros(3, 2)
    sent = ATTACKS["scaled replacement"][0](honest, OWN)
    torch.testing.assert_close(torch.cat([honest, sent]).mean(0), OWN.mean(0))


def test_attackers_turn_the_order_of_labels_around_and_others_keep_theirs() -> None:
    data = federation((5,) * 6)
    theirs, last = int(data.offsets[ATTACKERS]), len(data.classes) - 1
    found = flipped(data)
    assert (found.y[:theirs] == last - data.y[:theirs]).all()
    assert (found.y[theirs:] == data.y[theirs:]).all()


def small() -> tuple[Federation, fl.Task]:
    return federation((6,) * 6), fl.Task(Dense)


def test_without_an_attack_a_run_is_the_one_of_the_serial_backend() -> None:
    data, task = small()
    setup = Setup()
    states = [
        next(fit(data, task, fl.FedAvg(lr=0.1), 1, evaluation=Evaluation(splits=()), backend=backend)).state["model"]
        for backend in (Serial(data, task, setup), Attacked(Place(data, task, setup), poisoning.honest))
    ]
    for name, leaf in states[0].items():
        torch.testing.assert_close(states[1][name], leaf)


def test_attackers_see_the_honest_changes_and_replace_only_their_own() -> None:
    data, task = small()
    seen: list[torch.Tensor] = []

    def attack(others: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        seen.extend([others.clone(), own.clone()])
        return torch.zeros_like(own)

    backend, quiet = Attacked(Place(data, task, Setup()), attack), Evaluation(splits=())
    (record,) = fit(data, task, fl.FedAvg(lr=0.1, weights="uniform"), 1, evaluation=quiet, backend=backend)
    others, own = seen
    assert (len(others), len(own)) == (2, ATTACKERS)
    changed = flatten({name: (record.state["model"][name] - leaf)[None] for name, leaf in task.initial().items()})
    torch.testing.assert_close(changed[0], others.sum(0) / 6)


def test_a_long_attack_is_an_outlier_of_the_mean() -> None:
    data, task = federation((6,) * 12), fl.Task(Dense)
    backend = Attacked(Place(data, task, Setup()), lambda others, own: own * 1000)
    quiet, sampling = Evaluation(splits=()), Sampling(outlier_factor=10)
    record = next(fit(data, task, fl.FedAvg(lr=0.1), 1, sampling=sampling, evaluation=quiet, backend=backend))
    assert record.outliers == tuple(range(ATTACKERS))


def easy() -> Dataset:
    """Two classes that a line separates."""
    draw = np.random.default_rng(1)
    y = draw.integers(0, 2, 600)
    x = draw.normal(size=(600, 2)) + 4 * y[:, None] - 2
    return Dataset(torch.from_numpy(x).float(), torch.from_numpy(y), classes=("a", "b"))


def test_rules_stop_attacks_that_ruin_the_mean() -> None:
    told: list[tuple[int, int]] = []
    task = fl.Task("logistic", args={"features": 2, "classes": 2})
    found = poison(easy(), task, fl.Training(lr=0.2, batch_size=10), 3, "none", lambda *step: told.append(step))
    assert told == [(done, 120) for done in range(121)]
    assert (found.clients, found.attackers, found.rounds) == (CLIENTS, ATTACKERS, 3)
    iid = found.accuracy["IID"]
    assert list(found.accuracy) == ["IID", "Dirichlet 0.5"]
    assert all(list(row) == list(ATTACKS) for row in iid.values())
    assert iid["mean"]["none"] > 0.9
    assert iid["mean"]["scaled replacement"] < 0.2
    assert all(row["scaled replacement"] > 0.9 for rule, row in iid.items() if rule != "mean")
    assert iid["mean"]["inner product"] < iid["krum"]["inner product"] - 0.05


def test_poisoning_is_measured_by_accuracy() -> None:
    with pytest.raises(InputError, match="needs classes, and accuracy among"):
        poison(easy(), fl.Task("logistic", metrics=["auroc"], args={"features": 2, "classes": 2}), fl.Training(), 1)
