"""An agent's side of a run: it gets ready or stays out, does its work, and reports what it cannot do."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import InputError, StoreError
from fedloom.experiment.progress import Silent
from fedloom.network.agent.agent import Agent
from fedloom.network.agent.assignment_runner import AssignmentRunner
from fedloom.network.agent.enrolment import enrol
from fedloom.network.agent.policy import site_of
from fedloom.network.agent.unsigned_requests import NEVER_REACHED, NotConnected, Unreachable
from fedloom.network.coordinator.network_folder import (
    change_certificate,
    invite,
    prepare_successor,
    set_certificate,
    unaware,
)
from fedloom.network.coordinator.serve import HttpsServer
from fedloom.network.protocol.certificates import local_authority
from fedloom.network.protocol.signatures import Signer
from fedloom.network.protocol.token import Token
from tests.network.conftest import EXPERIMENT, InProcessRun, World, audit

SMALL = {**EXPERIMENT, "rounds": 1}


def test_an_agent_whose_policy_refuses_stays_out_and_both_sides_know(tmp_path: Path) -> None:
    run = InProcessRun(tmp_path / "net", SMALL, {"algorithms": ["fedprox"]})
    why = "the policy does not allow the algorithm 'fedavg'. Allowed: fedprox ([policy] algorithms)"
    with pytest.raises(InputError, match=f"^This site does not take part: {re.escape(why)}.$"):
        run.run(Silent())
    assert f"site-0 refuses: {why}" in run.said


def test_an_agent_that_cannot_load_its_data_says_why_only_at_its_own_console(tmp_path: Path) -> None:
    run = InProcessRun(tmp_path / "net", SMALL, {})
    run.tables[0]["data"] = {"source": "csv", "path": "patients.csv", "label": "y", "client": "c"}
    with pytest.raises(InputError, match="its data or model could not be loaded; its own console says why"):
        run.run(Silent())
    told = [text for text in run.said if text.startswith("site-0 failed")]
    assert told == ["site-0 failed: its data or model could not be loaded; its own console says why"]
    assert any(text.startswith("error: ") and "patients.csv" in text for text in run.said)


def test_an_unexpected_error_is_reported_without_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = AssignmentRunner.train

    def fail(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        if one.client == 1:
            raise ValueError("could not convert 'Jane Doe' to float")
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", fail)
    run = InProcessRun(tmp_path / "net", SMALL, {}, {})
    assert run.run(Silent()).status == "done"
    (told,) = [text for text in run.said if text.startswith("site-1 failed")]
    assert "ValueError (its message stays at the site)" in told
    assert "Jane" not in told


def test_nothing_leaves_before_its_line_is_in_the_audit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = InProcessRun(tmp_path / "net", SMALL, {})
    asked: list[str] = []

    def full(log: Any, event: str, **facts: Any) -> None:
        if event == "answered":
            asked.append(event)
            raise StoreError("The audit log cannot be written.")

    monkeypatch.setattr("fedloom.network.agent.audit_log.AuditLog.write", full)
    monkeypatch.setattr("fedloom.network.agent.agent.Agent._retry", lambda agent, write, what, seconds=60.0: write())
    with pytest.raises(Exception, match="The audit log cannot be written"):
        run.run(Silent())
    assert asked
    assert run.pool.accepted == 0


def test_the_audit_log_says_what_was_asked_and_what_left(tmp_path: Path) -> None:
    InProcessRun(tmp_path / "net", SMALL, {}).run(Silent())
    (tmp_path / "state-0").rename(tmp_path / "site-0-state")
    lines = audit(tmp_path, 0)
    assert lines[0]["event"] == "hello"
    trained = [line for line in lines if line.get("asked") == "reduce client"]
    assert [line["clients"] for line in trained] == [[0], [1], [2], [3]]
    assert trained[0]["left"]["values"] == {"update model": 2410, "weights model": 1}


FULL = StoreError("The disk is full.")


@pytest.mark.parametrize("what", ["state", "tensors", "audit"])
def test_a_site_whose_disk_stays_full_is_left_out_of_rounds_at_once(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is an hour away: without this the test would not end."""
    tries: list[str] = []

    def full(*given: Any, **more: Any) -> None:
        tries.append(what)
        raise FULL

    monkeypatch.setattr("fedloom.network.agent.agent.DISK_PATIENCE", -1.0)
    values = {**EXPERIMENT, "rounds": 3, "evaluate": {"splits": []}, "algorithm": {"scaffold": {}}}
    run = InProcessRun(tmp_path / "net", values, {}, {}, deadline="1h")
    make = run.agent

    def agent(number: int) -> Agent:
        made = make(number)
        if number == 1 and made.runner is not None:
            place = {
                "state": (made.runner.states, "save"),
                "tensors": (made.parcels, "_store"),
                "audit": (made.audit, "write"),
            }
            monkeypatch.setattr(*place[what], full)
        return made

    monkeypatch.setattr(run, "agent", agent)
    result = run.run(Silent())
    assert result.status == "done"
    assert {row["participants"] for row in result.rows("rounds")} == {2}
    assert (
        len(tries) == {"state": 6, "tensors": 3, "audit": 12}[what]
    )  # one try in every round (for each of two clients)
    assert any(text.startswith("site-1 failed: The disk is full.") for text in run.said)


def test_work_for_a_closed_round_is_dropped_and_nothing_of_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, done = AssignmentRunner.train, []
    run = InProcessRun(tmp_path / "net", {**SMALL, "evaluate": {"splits": []}}, {})

    def closed(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        run.agents[0]._unwanted = "" if done else assignment.id  # as the reply to a heartbeat says
        done.append(one.client)
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", closed)
    assert run.run(Silent()).status == "done"
    assert done == [0, 0, 1, 2, 3]  # the round was not closed after all: all clients were asked again
    (tmp_path / "state-0").rename(tmp_path / "site-0-state")
    assert [line["clients"] for line in audit(tmp_path, 0) if line["event"] == "answered"] == [[0], [1], [2], [3]]
    assert "Round 1 of fedavg ended before all clients here had answered." in run.said


def test_an_agent_trusts_the_next_certificate_before_it_is_used_and_then_not_the_old_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, network, said = world.ledger, world.ledger.folder, list[str]()
    connect, made = Agent._connect, list[Any]()
    monkeypatch.setattr(Agent, "_connect", lambda agent: made.append(connect(agent)) or made[-1])
    site = site_of({"site": {"name": "kerry"}, "data": {"source": "digits"}}, tmp_path / "site.toml")

    @contextlib.contextmanager
    def served(port: int = 0) -> Iterator[HttpsServer]:
        change_certificate(ledger, said.append)
        certificates = local_authority(network, known=ledger.fact("fingerprint"))
        set_certificate(ledger, certificates.authority)
        ledger.set_fact("fingerprint", certificates.fingerprint)
        with HttpsServer(world.pool, "127.0.0.1", port, certificates) as server:
            yield server
            for one in made:
                one._client._transport.close()  # as if the network failed: agents connect again

    def joined(name: str, url: str) -> Agent:
        (token,) = (Token.parse(path.read_text()) for path in invite(ledger, 1))
        enrol(url, token, name, tmp_path / name, tell=said.append)
        return Agent(site, tmp_path / name, tell=said.append)

    def pinned(name: str) -> str:
        return str(json.loads((tmp_path / name / "coordinator.json").read_text())["authority"])

    with served() as server:
        url, port = f"https://127.0.0.1:{server.number}", server.number
        agent, absent = joined("kerry", url), joined("clare", url)
        agent.send_heartbeat()
        old = (network / "ca.pem").read_text()
        assert pinned("kerry") == old
        prepare_successor(ledger)
        new = (network / "successor" / "ca.pem").read_text()
        agent.send_heartbeat()
        assert pinned("kerry") == old + new
        assert unaware(ledger) == ["clare", "kerry"]
        agent.send_heartbeat()
        assert unaware(ledger) == ["clare"]
    with served(port):
        assert said[-1] == "The next certificate is not used yet, because these agents do not know it: clare."
        assert (network / "ca.pem").read_text() == old
        agent.send_heartbeat()
    ledger.revoke("clare")
    (unused,) = invite(ledger, 1)
    with served(port):
        assert said[-1].startswith("The coordinator has a new certificate, which all agents know.")
        assert not unused.exists()
        assert not (network / "successor").exists()
        agent.connection.get("/v1/plan")
        agent.send_heartbeat()
        assert pinned("kerry") == (network / "ca.pem").read_text() == new
        with pytest.raises(Unreachable, match="certificate verify failed"):
            absent.send_heartbeat()
        joined("cork", url)


def test_an_enrolled_agent_at_a_wrong_port_is_told_to_check_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.network.agent.agent.PATIENCE", 0.0)
    known = {"url": "http://localhost:1", "authority": "", "agent": "a", "token": "t"}
    (tmp_path / "coordinator.json").write_text(json.dumps(known))
    Signer(tmp_path / "agent.key")
    said: list[str] = []
    agent = Agent(
        site_of({"site": {"name": "kerry"}, "data": {"source": "digits"}}, tmp_path / "kerry.toml"),
        tmp_path,
        tell=said.append,
    )
    with pytest.raises(NotConnected):
        agent.run()
    assert [NEVER_REACHED in text for text in said] == [True]
