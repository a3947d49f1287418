"""The report says what left the clients."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.algorithms import FedAvg, LocalOnly, Peer
from fedloom.network.protocol.messages import Hello
from fedloom.privacy.dp.accounted import Accounted
from fedloom.privacy.table import DpTable, PrivacyTable
from fedloom.privacy.words import ADJACENCY
from fedloom.results import disclosure
from fedloom.results.disclosure import spent, what_left
from fedloom.results.run_data import RunData
from tests.conftest import Dense, federation

AGREED = {"preprocessing": "agreed.json"}


def with_privacy(run: RunData, **table: Any) -> RunData:
    return replace(run, facts={**run.facts, "description": {**run.description, "privacy": table}})


def test_without_protection_the_server_sees_each_update(run: RunData) -> None:
    found = what_left(run)
    assert found[0].startswith("This was a simulation: nothing left a machine.")
    sees = "on a network, the server would see the update of each client in each round it takes part in."
    assert any(text.endswith(sees) for text in found)
    assert any(sentence.startswith("fedavg: on a network, clients would send ") for sentence in found)
    assert any(sentence.startswith("No differential privacy") for sentence in found)


@pytest.mark.slow
def test_it_says_for_each_way_to_learn_who_saw_what(tmp_path: Path) -> None:
    algorithms = {"peer": Peer(), "local": LocalOnly(), "mean": FedAvg()}
    data = federation([20] * 3)

    def said(*labels: str) -> list[str]:
        folder = tmp_path / "-".join(labels)
        fl.run(
            data,
            fl.Task("logistic", args={"classes": 3}),
            {label: algorithms[label] for label in labels},
            rounds=1,
            out=folder,
        )
        return what_left(RunData.read(folder))

    seen = "on a network, the server would see the update of each client in each round it takes part in."
    nothing = "local: on a network, clients would send nothing of what they learn."
    everybody = said("peer", "local", "mean")
    assert f"mean: {seen}" in everybody
    assert nothing in everybody
    assert any(text.startswith("peer: on a network, clients would see the models of the clients") for text in everybody)
    alone = said("local")
    assert nothing in alone
    assert not any(
        "client's update" in text or "the update of each" in text or "see the models" in text for text in alone
    )
    assert f"mean: {seen}" in said("local", "mean")


def test_on_a_network_it_mentions_the_summaries_that_sites_agreed_with(run: RunData) -> None:
    def said(network: bool, **data: str) -> bool:
        facts = {**run.facts, "network": network, "description": {**run.description, "data": data}}
        return any(
            text.startswith("Before the run, each site gave away") for text in what_left(replace(run, facts=facts))
        )

    assert said(True, preprocessing="agreed.json")
    assert not said(True)
    assert not said(False, preprocessing="agreed.json")


def test_with_secure_aggregation_it_sees_sums(run: RunData) -> None:
    found = " ".join(what_left(with_privacy(run, secure_aggregation={"min_clients": 5})))
    assert "sums over at least 5 clients" in found
    assert "the update of each client" not in found
    assert "On a network, no client's losses and metrics would leave it" in found
    assert "was a simulation: do not publish them" in found


@pytest.mark.parametrize(
    ("cohort", "said"), [({}, "Of 4 clients in a round, 3"), ({"count": 3}, "Of 3 clients in a round, 3")]
)
def test_it_says_how_many_clients_of_a_round_may_be_lost(run: RunData, cohort: dict[str, Any], said: str) -> None:
    found = with_privacy(run, secure_aggregation={})
    found = replace(found, facts={**found.facts, "description": {**found.description, "cohort": cohort}})
    assert any(sentence.startswith(said) for sentence in what_left(found))
    assert "depends on how many it has" not in " ".join(what_left(found))


def test_a_coordinators_run_was_no_simulation(run: RunData, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run.folder, tmp_path / "served"))
    (folder / "network").mkdir()
    found = " ".join(what_left(RunData.read(folder)))
    assert "simulation" not in found
    assert "the training loss of each pass over its data; loss and metrics on its splits" in found


def test_it_says_what_a_site_tells_when_it_joins(run: RunData) -> None:
    """Everything that a hello has: see `fedloom.network.agent.disclosure`."""
    said = {
        "clients": "the names of its clients, how many examples they have for training, validation and test",
        "features": "the shape of the data",
        "classes": "the names of the classes",
        "prepared": "a hash of how rows are prepared",
        "data_mark": "a mark that shows whether the data changed",
        "versions": "the versions of its software and its kind of processor",
        "setup": "how it computes",
        "min_cohort": "the fewest clients in a sum",
        "withheld": "what its policy withholds",
    }
    assert Hello.model_fields.keys() - {"dtype", "labels", "protocol", "sends_scores"} == said.keys()
    found = " ".join(what_left(run))
    assert all(words in found for words in said.values())
    masked = " ".join(what_left(with_privacy(run, secure_aggregation={})))
    assert "how many examples they have" not in masked
    assert "the names of its clients, the shape of the data" in masked


@pytest.mark.parametrize("protection", [{"dp": {"epsilon": 2.0, "clip": 1.0}}, {"example_dp": {"epsilon": 2.0}}])
def test_losses_that_an_earlier_version_sent_are_not_denied(
    run: RunData, protection: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = with_privacy(replace(run, facts={**run.facts, "network": True}), **protection)
    assert any(text.startswith("ATTENTION: the training loss of each client left it") for text in what_left(served))
    monkeypatch.setattr(RunData, "history", lambda *_: {})
    assert any(text.startswith("No client's losses and metrics left it") for text in what_left(served))


@pytest.mark.parametrize("table", [{"unheard_of": 1}, {"dp": {"epsilon": -1}}])
def test_a_table_of_a_later_version_is_no_traceback(run: RunData, table: dict[str, Any]) -> None:
    (sentence,) = what_left(with_privacy(run, **table))
    assert sentence.startswith("This version cannot read the run's [privacy]")


def test_a_fixed_cohort_is_about_replacing_a_client(run: RunData) -> None:
    fixed = with_privacy(run, dp={"epsilon": 2.0, "clip": 1.0})
    fixed = replace(fixed, facts={**fixed.facts, "description": {**fixed.description, "cohort": {"count": 2}}})
    assert "replaced by another one" in " ".join(what_left(fixed))


def test_agents_that_add_noise_themselves_send_no_metrics(run: RunData, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run.folder, tmp_path / "served"))
    (folder / "network").mkdir()
    served = with_privacy(RunData.read(folder), example_dp={"epsilon": 2.0})
    assert "loss and metrics" not in " ".join(what_left(served))
    assert "loss and metrics" in " ".join(what_left(RunData.read(folder)))


def test_pooling_means_that_every_example_leaves(run: RunData) -> None:
    (found,) = (sentence for sentence in what_left(run) if sentence.startswith("pooled: "))
    assert "every example of every client would leave it" in found


def test_what_preparing_the_data_shares_is_named(run: RunData) -> None:
    data = {"normalize": "federated", "scale_target": True, "categorical": ["ward", "sex"]}
    prepared = replace(run, facts={**run.facts, "description": {**run.description, "data": data}})
    found = " ".join(what_left(prepared))
    assert "how many values of each feature and of the label they know, their sum" in found
    assert "which categories occur in ward, sex, by name" in found
    assert "which categories" not in " ".join(what_left(run))
    prepared = replace(run, facts={**run.facts, "description": {**run.description, "data": data | AGREED}})
    agreed = " ".join(what_left(prepared))
    assert "share" not in agreed
    assert "It was made of a summary of each site" in agreed


@pytest.mark.parametrize("agreed", [AGREED, {}])
def test_on_a_network_what_scales_the_data_is_what_happened(run: RunData, agreed: dict[str, str]) -> None:
    data = {"normalize": "federated", "scale_target": True, **agreed}
    about = {**run.description, "data": data, "privacy": {"dp": {"epsilon": 2.0, "clip": 1.0}}}
    found = " ".join(what_left(replace(run, facts={**run.facts, "network": True, "description": about})))
    assert "the sum of their squares" not in found
    assert "The sums that scale the data" not in found
    assert ("A site's summary for `fedloom data agree` gives means and variances" in found) == bool(agreed)
    assert ("ε does not cover this" in found) == bool(agreed)


def test_what_scales_the_data_is_outside_of_epsilon(run: RunData) -> None:
    noisy = with_privacy(run, example_dp={"epsilon": 8.0})
    scaled = {**noisy.description, "data": {"normalize": "federated"}}
    found = what_left(replace(noisy, facts={**noisy.facts, "description": scaled}))
    assert sum(sentence.endswith("ε does not cover this.") for sentence in found) == 1


def test_on_a_network_an_example_is_called_a_row_and_not_a_person(run: RunData) -> None:
    about = {**run.description, "privacy": {"example_dp": {"epsilon": 4.0}}}
    served = replace(run, facts={**run.facts, "network": True, "description": about})
    assert any("which are rows and not people" in text for text in what_left(served))
    assert not any("which are rows and not people" in text for text in what_left(replace(served, facts=run.facts)))


def test_no_sentence_about_a_simulation_says_that_something_happened(run: RunData, tmp_path: Path) -> None:
    """One sentence alone may be quoted."""
    tables: tuple[dict[str, Any], ...] = ({}, {"secure_aggregation": {}}, {"example_dp": {"epsilon": 2.0}})
    data = {"normalize": "federated", "scale_target": True, "categorical": ["ward"]}
    prepared = {**run.description, "data": data}
    happened = re.compile(r"\b(saw|sent|left|leaves|clients share|gave away)\b")
    for privacy in tables:
        about = replace(run, facts={**run.facts, "description": {**prepared, "privacy": privacy}})
        assert [text for text in what_left(about)[1:] if happened.search(text)] == []
    folder = Path(shutil.copytree(run.folder, tmp_path / "served"))
    (folder / "network").mkdir()
    assert not any("would" in text for text in what_left(RunData.read(folder)))


def test_equal_costs_of_seeds_are_one_line_and_few_names_are_listed(
    run: RunData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(epsilons: Mapping[tuple[str, int], float]) -> list[str]:
        found = {cell: Accounted("epsilon", epsilon, 1e-5, 1.0, 0.5, 6, cell[0]) for cell, epsilon in epsilons.items()}
        monkeypatch.setattr(disclosure, "spent", lambda _, kind: found if kind == "epsilon" else {})
        noisy = with_privacy(run, dp={"epsilon": 2.0, "clip": 1.0})
        return [text for text in what_left(noisy) if "has spent" in text or "another accountant" in text]

    spent, behind = said({("fedavg", 1): 1.0})
    assert spent == f"fedavg (seed 1) has spent ε = 1, for {ADJACENCY}."
    assert behind.startswith("fedavg (seed 1): another accountant can compute ε again from noise multiplier 1,")
    spent, behind = said({("fedavg", seed): 1.0 for seed in range(1, 6)})
    assert spent == f"fedavg (5 seeds: 1, 2, 3 and 2 more) has spent ε = 1 in each, for {ADJACENCY}."
    assert said({("fedavg", 1): 1.0, ("fedavg", 2): 2.0})[0].startswith("fedavg (2 seeds: 1, 2) has spent ε = 1 to 2,")
    *spent, behind = said({(f"a{place}", seed): 1.0 for place in range(10) for seed in (1, 2, 3)})
    assert len(spent) == 10
    assert behind.startswith("a0 (3 seeds: 1, 2, 3), a1 (3 seeds: 1, 2, 3), a2 (3 seeds: 1, 2, 3) and 7 more: another")


def test_models_that_stay_at_clients_are_not_said_to_be_private(tmp_path: Path) -> None:
    algorithms = {"alone": fl.LocalOnly(lr=0.1), "fedavg": fl.FedAvg(lr=0.1, weights="uniform")}
    private = PrivacyTable(dp=DpTable(epsilon=2.0, clip=1.0))
    fl.run(federation([20] * 4), fl.Task(Dense), algorithms, 2, backend="serial", out=tmp_path, privacy=private)
    run = RunData.read(tmp_path)
    found = what_left(run)
    (kept,) = (text for text in found if "own model has no noise" in text)
    assert kept.startswith("alone: ATTENTION")
    assert {label for label, _ in spent(run, "replace_epsilon") | spent(run, "epsilon")} == {"fedavg"}
    assert not any("alone" in text and "has spent" in text for text in found)
    assert not any("learns as much as" in text for text in found)  # one cell has spent something
