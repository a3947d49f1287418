"""Loading an experiment at a site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.errors import InputError
from fedloom.network.agent.loaded_experiment import (
    HostedClients,
    LoadedExperiment,
    admitted,
    check_form,
    check_shape,
    load_experiment,
)
from fedloom.network.agent.policy import Refused, site_of
from fedloom.network.protocol.messages import AssignedClient
from tests.conftest import federation as some_clients
from tests.network.conftest import EXPERIMENT, InProcessRun


def test_hosted_clients_are_found_by_their_numbers_in_the_run() -> None:
    site = some_clients((12, 9))
    hosted = HostedClients.of(site, {7: 1, 3: 0}, population=10)
    assert hosted.clients == 10
    assert hosted.name(7) == site.name(1)
    assert hosted.counts([7, 3], "train").tolist() == site.counts([1, 0], "train").tolist()
    assert torch.equal(hosted.indices(7, "test"), site.indices(1, "test"))


PLAN = {
    "run": "0" * 16,
    "protocol": 3,
    "experiment": {"algorithm": {"fedavg": {}}, "task": {}},
    "sources": {},
    "versions": {},
    "initial": {"1": "0" * 64},
}


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../../elsewhere"},
        {"initial": {"1": "../../elsewhere"}},
        {"initial": None},
        {"experiment": []},
        {"experiment": {"algorithm": {}}},
        {"sources": ["fedloom.tree"]},
        {"shape": "12"},
        {"shape": ["12"]},
    ],
)
def test_a_malformed_plan_is_refused(change: dict[str, Any]) -> None:
    check_form(PLAN)
    with pytest.raises(Refused, match="the coordinator's plan is malformed"):
        check_form({**PLAN, **change})


def test_examples_of_another_shape_than_the_runs_are_refused_in_words(tmp_path: Path) -> None:
    site = site_of({"data": EXPERIMENT["data"]}, tmp_path / "kerry.toml")
    check_shape((11,), [11], site)
    missing = r'11 features here, 12 features in the run: preprocessing = "agreed\.json" may be missing'
    with pytest.raises(Refused, match=missing):
        check_shape((11,), [12], site)


def test_another_protocol_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    site = site_of({"data": {"source": "nothing"}}, tmp_path / "kerry.toml")
    with pytest.raises(Refused, match="the coordinator speaks protocol 1, and this agent speaks 3"):
        load_experiment({**PLAN, "protocol": 1}, site, Path, str, print, tmp_path)


def test_a_run_whose_rounds_have_too_many_clients_for_the_policy_is_refused_before_it_starts(tmp_path: Path) -> None:
    tables = {"data": EXPERIMENT["data"], "policy": {"max_secure_cohort": 100}}
    site = site_of(tables, tmp_path / "kerry.toml")
    values = {"privacy": {"secure_aggregation": {}}, "cohort": {"count": 101, "max_examples": 10}}
    with pytest.raises(
        Refused, match=r"at most 100 clients in a round with secure aggregation .*, and this one has 101"
    ):
        admitted(values, site)


@pytest.mark.parametrize(
    ("site_seed", "announced", "seeds", "fits"),
    [("run", "run", [1, 2], True), ("run", 0, [1, 2], False), ("run", 0, [1], True), (0, "run", [1, 2], True)],
)
def test_a_site_that_splits_again_for_every_seed_needs_a_run_that_does(
    tmp_path: Path, site_seed: Any, announced: Any, seeds: list[int], fits: bool
) -> None:
    values = {**EXPERIMENT, "seeds": seeds, "data": {**EXPERIMENT["data"], "seed": announced}}
    run = InProcessRun(tmp_path / "net", values, {})
    run._publish_plan()
    run.ledger.close()
    run._held.close()
    plan = run.pool.run_plan["experiment"]
    assert plan["data"] == {"seed": announced}  # nothing else of it is sent
    site = site_of({**run.tables[0], "data": {**EXPERIMENT["data"], "seed": site_seed}}, tmp_path / "kerry.toml")
    if fits:
        assert admitted(plan, site).data.seed == site_seed
        return
    with pytest.raises(Refused, match=r'for every seed of the run \(\[data\] seed = "run"\), .* announces seed = 0'):
        admitted(plan, site)


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"example_dp": {"epsilon": 4.0}}, "Caution: ε and δ are about single examples, which are rows and not"),
        ({"secure_aggregation": {}}, "Caution: [privacy] secure_aggregation: a sum may be over only 3 clients"),
    ],
)
def test_an_agent_says_what_its_protections_leave_open(tmp_path: Path, privacy: dict[str, Any], words: str) -> None:
    run = InProcessRun(tmp_path / "net", {**EXPERIMENT, "privacy": privacy}, {}, max_examples=600)
    run._publish_plan()
    site, said = site_of(run.tables[0], tmp_path / "kerry.toml"), list[str]()
    load_experiment(
        run.pool.run_plan, site, lambda sha: run.pool.initial_weights[sha], lambda text: "mark", said.append, tmp_path
    )
    run.ledger.close()
    run._held.close()
    assert any(text.startswith(words) for text in said)


def test_data_of_another_form_is_refused(tmp_path: Path) -> None:
    run = InProcessRun(tmp_path / "net", {**EXPERIMENT, "rounds": 1}, {})
    run._publish_plan()
    plan = {**run.pool.run_plan, "data": {"features": [63], "dtype": "float32", "classes": ["a"]}}
    site, said = site_of(run.tables[0], tmp_path / "kerry.toml"), list[str]()

    def load(plan: dict[str, Any]) -> LoadedExperiment:
        weights = run.pool.initial_weights
        return load_experiment(plan, site, lambda sha: weights[sha], lambda text: "mark", said.append, tmp_path)

    with pytest.raises(Refused, match=r"the data does not fit the run's. features: \[63\] there, \[64\] here"):
        load(plan)
    loaded = load({**run.pool.run_plan, "versions": {"torch": "9\x1b[2J\nEnrolled."}})
    assert said[0].startswith("Note: the coordinator has torch 9\\x1b[2J\n  | Enrolled., this machine ")
    assert (len(loaded.hello.clients), loaded.hello.data_mark) == (4, "mark")
    with pytest.raises(InputError, match="There is no algorithm 'other' in the plan"):
        loaded.algorithm("other")
    with pytest.raises(InputError, match="There is no client 4 at this site"):
        loaded.place(1, (AssignedClient(client=0, local=4),), 4)
    run.ledger.close()
    run._held.close()
