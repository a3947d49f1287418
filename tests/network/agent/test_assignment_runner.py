"""What a site does of an assignment, and what it withholds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.experiment.progress import Silent
from fedloom.network.agent.assignment_runner import _method
from fedloom.network.agent.policy import Refused
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
    assert "site-0 refuses: the policy allows evaluate, not reduce" in run.said
