"""What a site does of an assignment, and what it withholds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.experiment.progress import Silent
from fedloom.network.agent.assignment_runner import _method
from fedloom.network.agent.policy import Refused
from fedloom.network.protocol.messages import AssignedClient, Assignment
from fedloom.results.result import Result
from tests.network.conftest import EXPERIMENT, InProcessRun


@pytest.mark.parametrize("name", ["_private", "round", "init", "epochs", "nothing"])
def test_clients_run_only_public_methods_of_the_algorithm_itself(name: str) -> None:
    with pytest.raises(Refused, match=f"FedAvg has no method '{name}' for clients"):
        _method(fl.FedAvg(lr=0.1), name)
    assert _method(fl.FedAvg(lr=0.1), "client") == "client"


def test_a_metric_that_the_policy_withholds_stays_at_the_site(tmp_path: Path) -> None:
    values = {**EXPERIMENT, "rounds": 1, "evaluate": {"every": 1, "splits": ["test"]}}
    InProcessRun(tmp_path / "net", values, {"metrics": ["loss"]}, {}).run(Silent())
    found: dict[tuple[Any, Any], Any] = {}
    for row in Result.read(tmp_path / "net").rows("clients"):
        found[row["client"], row["metric"]] = row["value"]
    withheld = {client for (client, metric), value in found.items() if metric == "accuracy" and value is None}
    assert len(withheld) == 2
    assert all(value is not None for (_, metric), value in found.items() if metric == "loss")


def test_a_verb_that_the_policy_does_not_allow_is_refused(tmp_path: Path) -> None:
    run = InProcessRun(tmp_path / "net", {**EXPERIMENT, "rounds": 1}, {"verbs": ["evaluate"]}, {})
    assert run.run(Silent()).status == "done"  # the other site's clients go on
    assert "site-0 refuses: the policy allows evaluate, not reduce ([policy] verbs)" in run.said


@pytest.mark.parametrize(("kind", "what"), [("evaluate", "metrics"), ("fingerprint", "fingerprints of models")])
def test_nothing_about_a_single_client_leaves_a_run_with_secure_aggregation(
    tmp_path: Path, kind: Any, what: str
) -> None:
    values = {**EXPERIMENT, "privacy": {"secure_aggregation": {}}}
    run = InProcessRun(tmp_path / "net", values, {}, {}, {}, max_examples=1000)
    run._publish_plan()
    with run._connected():
        runner = run.agents[0].runner
        assert runner is not None
        numbers = {"seed": 1, "round": 1, "attempt": 1, "cohort": 4, "population": 4}
        clients = (AssignedClient(client=0, local=0),)
        asked = Assignment(id="1", kind=kind, verb="evaluate", label="fedavg", clients=clients, **numbers)
        with pytest.raises(Refused, match=f"announced secure aggregation, so no {what} of single clients leave"):
            runner.evaluate(asked)
