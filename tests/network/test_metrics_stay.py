"""Where [privacy] says that no metric leaves, none does: by the agents' own logs, and by what the coordinator keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom import faults, tree
from fedloom.errors import FedloomError
from fedloom.experiment.experiment_file import parse
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Silent
from fedloom.experiment.run import run_plan
from fedloom.experiment.store import Store
from fedloom.network.agent.assignment_runner import AssignmentRunner
from fedloom.network.coordinator.intake import Intake
from fedloom.network.protocol.tensors import open_parcel
from tests.network.conftest import EXPERIMENT, InProcessRun

SERVER = {"dp": {"epsilon": 8.0, "clip": 1.0}}
LOCAL = {"dp": {"epsilon": 8.0, "clip": 1.0, "noise": "local"}}
EXAMPLES = {"example_dp": {"epsilon": 8.0}}
MASKS: dict[str, Any] = {"secure_aggregation": {}}
TOGETHER = {"dp": {"epsilon": 8.0, "clip": 1.0, "noise": "distributed"}}
PROTECTED = {
    "server": SERVER,
    "local": LOCAL,
    "examples": EXAMPLES,
    "masks": MASKS,
    "distributed": TOGETHER | MASKS,
    "server and masks": SERVER | MASKS,
    "server and examples": SERVER | EXAMPLES,
    "local and examples": LOCAL | EXAMPLES,
    "masks and examples": MASKS | EXAMPLES,
}
WATCHED = {"every": 1, "splits": ["validation", "test"], "epochs": True, "server": ["test"]}


def values(privacy: dict[str, Any], **more: Any) -> dict[str, Any]:
    algorithm = {"fedavg": {"weights": "uniform"}}
    return {**EXPERIMENT, "rounds": 1, "evaluate": WATCHED, "algorithm": algorithm, "privacy": privacy, **more}


def results(folder: Path) -> list[dict[str, Any]]:
    """What each client's answers said besides tensors, by the agents' audit logs."""
    logs = [path.read_text().splitlines() for path in sorted(folder.glob("state-*/audit.jsonl"))]
    facts = [json.loads(line) for lines in logs for line in lines]
    return [result for one in facts if one["event"] == "answered" for result in one["left"]["results"]]


def stored(folder: Path) -> list[Any]:
    with Store(folder, read_only=True) as store:
        return [*store.rows("history"), *store.rows("client_metrics"), *store.rows("pooled_metrics")]


@pytest.mark.parametrize("name", PROTECTED)
def test_no_metric_leaves_a_client_under_any_protection(tmp_path: Path, name: str) -> None:
    run = InProcessRun(tmp_path / "run", values(PROTECTED[name]), {}, {})
    assert run.run(Silent()).status == "done"
    said = results(tmp_path)
    assert {one["client"] for one in said} == {0, 1, 2, 3}
    assert all("history" not in one and "measured" not in one for one in said)
    assert not stored(tmp_path / "run")


def test_without_protection_losses_leave_and_the_log_says_so(tmp_path: Path) -> None:
    assert InProcessRun(tmp_path / "run", values({}), {}, {}).run(Silent()).status == "done"
    assert any(one.get("history") for one in results(tmp_path))
    assert stored(tmp_path / "run")


def test_in_a_simulation_losses_stay_for_the_one_who_simulates(tmp_path: Path) -> None:
    run_plan(Plan.of(parse(values(SERVER))), tmp_path)
    with Store(tmp_path, read_only=True) as store:
        assert store.rows("history")


@pytest.mark.parametrize("extra", [{}, {"mode": "async", "concurrency": 2, "buffer": 2}], ids=["sync", "async"])
def test_losses_that_an_older_agent_sends_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    kept: list[dict[str, Any]] = []
    commit = Intake._commit

    def look(intake: Intake) -> None:
        for path in intake.ledger.updates.iterdir():
            kept.extend(open_parcel(path)[0]["results"])
        commit(intake)

    monkeypatch.setattr(Intake, "_commit", look)
    monkeypatch.setattr(AssignmentRunner, "_withhold", lambda self, answer, task: answer)
    privacy = LOCAL if extra else SERVER  # the noise of a server needs rounds that wait for each other
    run = InProcessRun(tmp_path / "run", values(privacy), {}, {}, **extra)
    assert run.run(Silent()).status == "done"
    assert any(one.get("history") for one in results(tmp_path))
    assert kept
    assert all("history" not in one for one in kept)
    assert not stored(tmp_path / "run")
    told = [text for text in run.said if "which [privacy] does not let leave. They are not stored" in text]
    assert [text.split(" sent ")[0] for text in sorted(told)] == ["site-0", "site-1"]


def test_losses_that_an_earlier_version_kept_on_the_disk_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AssignmentRunner, "_withhold", lambda self, answer, task: answer)

    def stop(point: str) -> None:
        if point == "coordinator.aggregate":
            raise KeyboardInterrupt

    first = InProcessRun(tmp_path / "run", values(SERVER), {}, {})
    with monkeypatch.context() as patched:
        patched.setattr(faults, "point", stop)
        patched.setattr("fedloom.network.protocol.messages.ClientAnswer.without_metrics", lambda self: self)
        with pytest.raises(KeyboardInterrupt):
            first.run(Silent())
    assert [*(tmp_path / "run" / "network" / "updates").iterdir()]
    second = InProcessRun(tmp_path / "run", values(SERVER), {}, {})
    assert second.run(Silent()).status == "done"
    assert not stored(tmp_path / "run")


class Talks(fl.FedAvg):
    """Trains nothing, and says a number about each client."""

    def client(self, task: fl.Task, shared: Any, own: Any, data: fl.Clients) -> tuple[fl.Update, Any]:
        groups = {"model": tree.expand(shared["model"], len(data))}
        ones = torch.ones(len(data))
        return fl.Update(groups, ones, {"mean": ones}, positions={"model": "model"}), own


def test_public_numbers_stay_where_nothing_covers_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses them as well, but only when it has them."""
    monkeypatch.setattr(fl.FedAvg, "client", Talks.client)
    run = InProcessRun(tmp_path / "run", values(SERVER), {}, {})
    with pytest.raises(FedloomError, match="nothing covers what its clients make public: mean"):
        run.run(Silent())
    assert not results(tmp_path)


@pytest.mark.parametrize("name", ["none", *PROTECTED])
def test_a_site_is_told_how_often_its_clients_are_measured_only_if_they_are(tmp_path: Path, name: str) -> None:
    run = InProcessRun(tmp_path / "run", values(PROTECTED.get(name, {})), {}, {})
    run._publish_plan()
    with run._connected():
        told = any(text.startswith("Each client here is measured at most") for text in run.said)
    assert told == (name == "none")
