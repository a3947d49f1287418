"""Differential privacy of examples: clipped gradients of single examples, noise, and what a client spends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom import tree
from fedloom.errors import InputError, PrivacySpent
from fedloom.network.agent.loaded_experiment import HostedClients
from fedloom.privacy.dp import noise
from fedloom.privacy.dp.accounting import Mechanism, epsilon, noise_multiplier
from fedloom.privacy.dp.example_level import (
    ExamplePrivacy,
    ExampleTrainer,
    check_algorithm,
    per_example_module,
)
from fedloom.privacy.dp.ledger import KEY
from fedloom.privacy.table import ExampleTable, PrivacyTable
from fedloom.training.clients import Clients, Setup
from fedloom.training.local import Training, train
from tests.conftest import ALL_TRAIN, Dense, Normed
from tests.conftest import federation as some_clients
from tests.experiment.small_run import StopAfter

TABLE = ExampleTable(epsilon=8.0, max_grad_norm=0.5)
MEAN = Setup(loss_is_mean=True)


def trained(privacy: ExamplePrivacy | None, training: Training, size: int = 20, **more: Any) -> Any:
    federation = some_clients((size,), split=ALL_TRAIN)
    data = Clients(federation, (0,), round=1, setup=MEAN, example_privacy=privacy)
    task = fl.Task(Dense)
    return train(task, data, tree.expand(task.initial(), 1), training, **more)


def test_a_round_is_planned_from_examples_batches_and_epochs() -> None:
    steps = ExamplePrivacy(TABLE, 5, b"s").steps(25, Training(batch_size=10, epochs=2))
    assert (steps.count, steps.mechanism.q, steps.expected_batch) == (6, 0.4, 10)
    assert steps.mechanism.noise_multiplier == noise_multiplier(8.0, 1e-5, 30, 0.4)
    full = ExamplePrivacy(TABLE, 5, b"s").steps(25, Training(batch_size="full"))
    assert (full.count, full.mechanism.q, full.expected_batch) == (1, 1.0, 25)


def test_without_noise_a_full_batch_is_a_step_with_clipped_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: w − lr · mean of each example's gradient, scaled down to a norm of 0.5."""
    monkeypatch.setattr(noise, "gaussian", lambda key, count: np.zeros(count))
    found = trained(ExamplePrivacy(TABLE, 1, b"s"), Training(batch_size="full", lr=0.1)).model
    task, federation = fl.Task(Dense), some_clients((20,), split=ALL_TRAIN)
    start = task.initial()
    total = tree.zeros_like(start)
    for x, y in zip(federation.x, federation.y, strict=True):
        load = dict(task.module.named_parameters())
        with torch.no_grad():
            for name, leaf in load.items():
                leaf.copy_(start[name])
        loss = nn.functional.cross_entropy(task.module(x[None]), y[None])
        gradient = dict(zip(load, torch.autograd.grad(loss, list(load.values())), strict=True))
        total = tree.add(total, gradient, scale=min(1.0, 0.5 / float(tree.norm(gradient))))
    for name, leaf in start.items():
        assert torch.allclose(found[name][0], leaf - 0.1 * total[name] / 20, atol=1e-6)


def test_the_noise_of_a_step_has_the_claimed_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    training, differences = Training(batch_size="full", lr=1.0), []
    for number in range(60):
        privacy = ExamplePrivacy(TABLE, 1, bytes([number]))
        z = privacy.steps(20, training).mechanism.noise_multiplier
        differences.append(trained(privacy, training).model["hidden.weight"])
    drawn = torch.cat(differences)
    spread = float((drawn - drawn.mean(0)).std())
    assert spread == pytest.approx(z * 0.5 / 20, rel=4 / (2 * drawn.numel()) ** 0.5 + 1 / 60)


def test_the_same_secret_and_start_repeat_every_bit_and_another_does_not() -> None:
    training = Training(batch_size=5, epochs=2, optimizer="adam", lr=0.01)
    found = [tree.sha256(trained(ExamplePrivacy(TABLE, 3, secret), training).model) for secret in (b"a", b"a", b"b")]
    assert found[0] == found[1] != found[2]


def test_the_same_model_with_other_shared_or_kept_values_gets_other_noise() -> None:
    """Otherwise a server that asks twice could subtract the noise."""
    ones, zeros = ({"control": {"c": value}} for value in (torch.ones(2), torch.zeros(2)))
    rows = {"kept": {"k": torch.ones(1, 2)}}
    given = [{"shared": ones}, {"shared": zeros}, {"shared": ones, "own": rows}, {"shared": ones}]
    training = Training(batch_size="full")
    found = [tree.sha256(trained(ExamplePrivacy(TABLE, 1, b"a"), training, **more).model) for more in given]
    assert len(set(found)) == 3
    assert found[0] == found[3]


def test_other_settings_get_other_noise() -> None:
    start = fl.Task(Dense).initial()["hidden.weight"]
    steps = []
    for lr, table in ((0.1, TABLE), (0.2, TABLE), (0.1, TABLE.replace(max_grad_norm=0.6))):
        found = trained(ExamplePrivacy(table, 1, b"a"), Training(batch_size="full", lr=lr)).model
        steps.append((found["hidden.weight"][0] - start) / lr / table.max_grad_norm)
    assert not torch.allclose(steps[0], steps[1], atol=1e-3)
    assert not torch.allclose(steps[0], steps[2], atol=1e-3)


def test_a_client_under_another_number_or_seed_answers_the_same_with_dropout() -> None:
    """Otherwise a server that numbers clients twice could compare two answers with the same noise."""
    features, classes = some_clients((20,)).x[0].numel(), 10
    task = fl.Task(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(features, classes)))
    found = set()
    for client, seed in ((0, 1), (1, 1), (0, 2)):
        federation = some_clients((20,), split=ALL_TRAIN)
        hosted = HostedClients.of(federation, {client: 0}, 2)
        privacy = ExamplePrivacy(TABLE, 1, b"a")
        data = Clients(hosted, (client,), seed=seed, round=1, setup=MEAN, example_privacy=privacy)
        model = train(task, data, tree.expand(task.initial(), 1), Training(batch_size="full")).model
        found.add(tree.sha256(model))
    assert len(found) == 1


def test_a_correction_sees_the_noisy_gradient_and_no_second_one() -> None:
    seen: list[Any] = []

    def correct(step: fl.Step, shared: Any, own: Any) -> Any:
        seen.append(step.grad)
        return tree.zeros_like(step.grad)

    start = fl.Task(Dense).initial()
    found = trained(ExamplePrivacy(TABLE, 1, b"a"), Training(batch_size="full"), correct=correct).model
    assert len(seen) == 1
    assert all(torch.equal(found[name][0], leaf) for name, leaf in start.items())
    with pytest.raises(Exception, match="one look at a batch"):
        trained(
            ExamplePrivacy(TABLE, 1, b"a"),
            Training(batch_size="full"),
            correct=lambda step, shared, own: step.grad_at(step.params),
        )


def test_an_agent_is_charged_before_it_trains() -> None:
    charged: list[tuple[str, Mechanism, int]] = []

    def charge(name: str, mechanism: Mechanism, count: int) -> None:
        charged.append((name, mechanism, count))
        raise PrivacySpent("no more")

    privacy = ExamplePrivacy(TABLE, 2, b"a", charge)
    with pytest.raises(PrivacySpent):
        trained(privacy, Training(batch_size=10))
    ((name, mechanism, count),) = charged
    assert (mechanism, count) == (privacy.steps(20, Training(batch_size=10)).mechanism, 2)
    assert name.startswith("round 1, call 0, client client-0, given ")


def test_models_and_losses_that_mix_examples_are_refused() -> None:
    with pytest.raises(InputError, match=r"example_dp cannot train this model: .*BatchNorm"):
        per_example_module(Normed())
    federation = some_clients((20,), split=ALL_TRAIN)
    data = Clients(federation, (0,), example_privacy=ExamplePrivacy(TABLE, 1, b"s"))
    with pytest.raises(InputError, match="mean of its examples' losses"):
        train(fl.Task(Dense), data, tree.expand(fl.Task(Dense).initial(), 1), Training())
    assert isinstance(ExampleTrainer(ExamplePrivacy(TABLE, 1, b"s")).privacy, ExamplePrivacy)


@pytest.mark.parametrize("algorithm", [fl.FedSGD(), fl.IFCA(), fl.PerFedAvg(), fl.FedAvg(patience=2), fl.Ditto()])
def test_algorithms_that_use_examples_in_other_ways_are_refused(algorithm: fl.Algorithm) -> None:
    with pytest.raises(InputError, match=r"in another way|patience"):
        check_algorithm(algorithm)


def clients() -> fl.Federation:
    random = np.random.default_rng(3)
    x = random.normal(size=(90, 16)).astype("float32")
    return fl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), client=np.repeat(["a", "b"], [60, 30]))


def run(folder: Path, rounds: int = 3, **more: Any) -> Any:
    cell = folder / "cells" / "fedavg-1" / "examples"
    cell.mkdir(parents=True, exist_ok=True)
    if not (cell / KEY).exists():
        (cell / KEY).write_bytes(b"k" * 32)
    given = {"backend": "serial", "privacy": PrivacyTable(example_dp=TABLE), **more}
    return fl.run(clients(), fl.Task(Dense), fl.FedAvg(lr=0.2, batch_size=8), rounds, out=folder, **given)


@pytest.mark.slow
def test_a_run_spends_epsilon_by_its_last_round_and_continues_with_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", should_stop=StopAfter(1))
    assert run(tmp_path / "parts").weights_sha256 == whole.weights_sha256
    assert run(tmp_path / "workers", backend="vector", workers=2).weights_sha256 == whole.weights_sha256
    spent = [row["value"] for row in whole.rows("server") if row["metric"] == "example_epsilon"]
    fewest = int(clients().sizes("train").min())
    steps = ExamplePrivacy(TABLE, 3, b"").steps(fewest, Training(batch_size=8))
    assert spent == [epsilon({steps.mechanism: steps.count * n}, 1e-5).value for n in (1, 2, 3)]
    assert 7.9 < spent[-1] <= 8.0
