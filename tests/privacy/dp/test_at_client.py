"""What clients do by themselves: noise on their answers, and ledgers that stand for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.algorithm import Update
from fedloom.errors import InputError, PrivacySpent
from fedloom.privacy.dp.accounting import Mechanism, epsilon, noise_multiplier
from fedloom.privacy.dp.at_client import AtClients, LocalNoise
from fedloom.privacy.dp.ledger import KEY
from fedloom.privacy.table import DpTable, ExampleTable, PrivacyTable
from fedloom.task import Task
from tests.experiment.small_run import StopAfter
from tests.privacy.dp.test_client_level import SHARED, One, clients, update
from tests.privacy.dp.test_client_level import Net as Net

LOCAL = DpTable(epsilon=8.0, clip=0.5, noise="local")


def local(**more: Any) -> LocalNoise:
    return LocalNoise(LOCAL.replace(**more), 3, b"s" * 32)


def test_noise_covers_twice_the_clip_because_other_data_could_turn_a_change_around() -> None:
    z = noise_multiplier(8.0, 1e-5, 3)
    assert local().mechanism == Mechanism(z)
    count = 100_000
    change = Update({"change": {"w": torch.zeros(1, count)}}, torch.ones(1))
    sent = local().apply(change, {}, Task(One), "round 1", ["a"]).groups["change"]["w"]
    assert float(sent.std()) == pytest.approx(2 * 0.5 * z, rel=4 / (2 * count) ** 0.5)


def test_a_given_multiplier_is_about_the_clip_and_half_of_it_counts() -> None:
    assert local(epsilon=None, noise_multiplier=3.0).mechanism == Mechanism(1.5)


def test_positions_stay_positions_and_what_nobody_trains_keeps_its_base() -> None:
    sent = local(epsilon=None, noise_multiplier=1e-9).apply(
        update((3.0, 4.0), (0.0, 0.1)), SHARED, Task(One), "round 1", ["a", "b"]
    )
    assert torch.allclose(sent.groups["model"]["w"], torch.tensor([[1.3, 1.4], [1.0, 1.1]]), atol=1e-5)
    assert sent.groups["model"]["seen"].tolist() == [0, 0]
    assert sent.positions == {"model": "model"}
    assert sent.weights("model").tolist() == [1.0, 1.0]


def test_noise_repeats_for_the_same_answer_and_for_no_other() -> None:
    def sent(where: str, name: str, *change: float) -> Any:
        return local().apply(update(change), SHARED, Task(One), where, [name]).groups["model"]["w"]  # type: ignore[arg-type]

    first = sent("round 1", "a", 0.1, 0.1)
    assert torch.equal(first, sent("round 1", "a", 0.1, 0.1))
    others = [sent("round 2", "a", 0.1, 0.1), sent("round 1", "b", 0.1, 0.1), sent("round 1", "a", 0.1, 0.2)]
    assert all(not torch.allclose(first, other, atol=0.15) for other in others)


def test_weights_and_public_numbers_that_show_data_are_refused() -> None:
    with pytest.raises(InputError, match=r"Set weights = \"uniform\""):
        local().apply(update((0.1, 0.1), weight=[5.0]), SHARED, Task(One), "round 1", ["a"])
    public = Update({"w": {"w": torch.zeros(1, 2)}}, torch.ones(1), {"score": torch.ones(1)})
    with pytest.raises(InputError, match="public numbers about their data"):
        local().apply(public, {}, Task(One), "round 1", ["a"])


def test_a_local_clip_cannot_adapt() -> None:
    with pytest.raises(InputError, match="needs a number as clip"):
        DpTable(epsilon=8.0, noise="local")


def run(folder: Path, rounds: int = 3, **more: Any) -> Any:
    cell = folder / "cells" / "one-1" / "local"
    cell.mkdir(parents=True, exist_ok=True)
    if not (cell / KEY).exists():
        (cell / KEY).write_bytes(b"k" * 32)
    given = {"backend": "serial", "privacy": PrivacyTable(dp=LOCAL), "algorithms": fl.FedAvg(weights="uniform"), **more}
    given["algorithms"] = {"one": given["algorithms"]}
    return fl.run(clients(), fl.Task(Net), rounds=rounds, out=folder, **given)


def test_a_run_with_local_noise_continues_with_the_same_bits_and_says_what_a_client_spent(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", should_stop=StopAfter(1))
    assert run(tmp_path / "parts").weights_sha256 == whole.weights_sha256
    spent = [row["value"] for row in whole.rows("server") if row["metric"] == "local_epsilon"]
    z = noise_multiplier(8.0, 1e-5, 3)
    assert spent == [epsilon({Mechanism(z): n}, 1e-5).value for n in (1, 2, 3)]
    assert 7.9 < spent[-1] <= 8.0


def test_a_robust_rule_may_judge_noisy_answers(tmp_path: Path) -> None:
    assert run(tmp_path, rounds=1, algorithms=fl.FedAvg(weights="uniform", rule="median")).status == "done"


def test_more_rounds_than_planned_are_refused(tmp_path: Path) -> None:
    table = PrivacyTable(dp=LOCAL, example_dp=ExampleTable(epsilon=8.0))
    AtClients(table, 2, tmp_path).charge(1, 20, fl.FedAvg())
    again = AtClients(table, 5, tmp_path)
    assert again.charge(2, 20, fl.FedAvg()).keys() >= {"example_epsilon", "local_epsilon"}
    with pytest.raises(PrivacySpent, match="is for 2 rounds"):
        again.charge(3, 20, fl.FedAvg())
