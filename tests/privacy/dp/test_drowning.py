"""Cautions about noise that is longer than what clients can learn."""

from __future__ import annotations

from typing import Any

import pytest

import fedloom as fl
from fedloom.privacy.dp import drowning
from fedloom.privacy.table import PrivacyTable

CLIENTS, ROUNDS, PARAMETERS = 20, 16, 2500  # the square roots are 4 and 50


def said(table: dict[str, Any], clients: int = CLIENTS, **training: Any) -> list[str]:
    sampling, train = fl.Sampling(), fl.FedAvg(**training).train
    examples = [100] * clients
    return [*drowning.cautions(PrivacyTable(**table), sampling, ROUNDS, PARAMETERS, examples, train)]


def test_noise_that_is_longer_than_all_changes_is_told_with_its_length() -> None:
    # 6.4 √2500 / 20 = 16 times as long in a round, and 16 / √16 = 4 times over all rounds
    (caution,) = said({"dp": {"noise_multiplier": 6.4, "clip": 0.1}})
    assert (
        "[privacy] dp: noise will drown what is learnt. Over 16 rounds with 20 clients it is about 4 times" in caution
    )
    assert "on 2,500 parameters" in caution


@pytest.mark.parametrize(
    ("table", "clients"),
    [
        ({}, 20),
        ({"dp": {"noise_multiplier": 6.4, "clip": 0.1}}, 40),  # 2 times
        ({"dp": {"noise_multiplier": 6.4, "clip": 0.1, "noise": "local"}}, 2000),  # 50 · 6.4 / √(2000 · 16) = 1.8 times
        ({"example_dp": {"epsilon": 8.0}}, 1000),
    ],
)
def test_less_noise_needs_no_caution(table: dict[str, Any], clients: int) -> None:
    assert said(table, clients) == []


@pytest.mark.parametrize(("clients", "times"), [(5, "1.8"), (8, "1.1"), (9, "")])
def test_a_few_clients_are_told_that_one_round_drowns_a_small_model(clients: int, times: str) -> None:
    table = PrivacyTable(dp={"noise_multiplier": 8.9, "clip": 1.0})
    found = [*drowning.cautions(table, fl.Sampling(), 20, 10, [50] * clients, fl.FedAvg().train)]
    assert len(found) == bool(times)
    assert all(f"with {clients} clients in a round" in text and f"is {times} times as large" in text for text in found)


def test_noise_of_each_client_counts_as_often_as_there_are_clients() -> None:
    (caution,) = said({"dp": {"noise_multiplier": 6.4, "clip": 0.1, "noise": "local"}}, 100)  # 50 · 6.4 / √(100 · 16)
    assert "about 8 times as long as all clients' changes" in caution


def test_nothing_is_said_of_noise_on_examples_whose_number_sites_do_not_say() -> None:
    table, train = PrivacyTable(example_dp={"epsilon": 0.1}), fl.FedAvg().train
    assert [*drowning.cautions(table, fl.Sampling(), ROUNDS, PARAMETERS, [0, 0, 0], train)] == []
    assert [*drowning.cautions(table, fl.Sampling(), ROUNDS, PARAMETERS, [9, 9, 9], train)]


def test_noise_of_examples_counts_steps() -> None:
    (caution,) = said({"example_dp": {"epsilon": 0.1}}, 4, batch_size="full")
    assert "[privacy] example_dp: noise will drown much of what is learnt." in caution
    assert "all gradients together" in caution


@pytest.mark.parametrize(("epsilon", "drowned"), [(0.5, True), (1.0, True), (2.0, False), (8.0, False)])
def test_noise_of_examples_drowns_digits_below_an_epsilon_of_two(epsilon: float, drowned: bool) -> None:
    # 20 rounds on digits ended with 21, 43, 60 and 59 % accuracy (lr 0.1), and with 15, 31, 69 and 93 % (lr 0.5)
    table, train = PrivacyTable(example_dp={"epsilon": epsilon}), fl.FedAvg(batch_size=16).train
    said = [*drowning.cautions(table, fl.Sampling(), 20, 2410, [108] * 10, train)]
    assert len(said) == drowned


def test_a_small_client_adds_as_much_noise_as_it_counts() -> None:
    def times(examples: list[int], by_examples: bool = False) -> float:
        table, train = PrivacyTable(example_dp={"epsilon": 1.0}), fl.FedAvg(batch_size=10, epochs=1.0).train
        (text,) = drowning.cautions(table, fl.Sampling(), 10, 10**8, examples, train, by_examples)
        return float(text.split("it is about ")[1].split(" times")[0].replace(",", ""))

    alike, small, uneven = times([200] * 4), times([20] * 4), times([200, 200, 200, 20])
    assert small > 5 * alike
    assert uneven == pytest.approx(((3 * alike**2 + small**2) / 4) ** 0.5, rel=0.05)
    weighted = times([200, 200, 200, 20], by_examples=True)
    assert weighted == pytest.approx(((3 * 200**2 * alike**2 + 20**2 * small**2) * 4) ** 0.5 / 620, rel=0.05)
