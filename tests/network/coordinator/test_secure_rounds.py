"""Rounds under masks with real agents in this process: what is stored, what is abandoned, what outlasts a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import TrainingError
from fedloom.experiment.progress import Silent
from fedloom.network.agent.agent import Agent
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.protocol.messages import Assignment
from fedloom.privacy.words import TEST_SET
from fedloom.results.model_card import write_card
from fedloom.results.summary import table
from tests.network.conftest import weights
from tests.network.coordinator.test_secure_relay import Crash, cohorts, crash_at, fail_at, simulated, sites


def test_below_the_threshold_the_round_is_abandoned_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, "site-2", "mask")
    run = sites(tmp_path / "net", privacy={"secure_aggregation": {"threshold": 1.0, "range": 100.0}})
    assert run.run(Silent()).status == "degraded"
    assert cohorts(tmp_path / "net") == {2: 5}
    assert any("4 of 5 clients sent a masked value, and secure aggregation needs 5" in text for text in run.said)
    assert any("the disk burns" in text for text in run.said)


def test_when_no_update_fits_the_ring_the_run_ends_with_the_reason(tmp_path: Path) -> None:
    run = sites(tmp_path / "net", privacy={"secure_aggregation": {"range": 1e-9}})
    with pytest.raises(
        TrainingError,
        match=r"no client could do its work.*The first is '.+': .*out of the range 1e-09: nothing was sent",
    ):
        run.run(Silent())


# --- what the coordinator and the disks hold


def test_only_sums_are_stored_and_no_log_has_a_key_or_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[str] = []
    accept = Ledger.accept

    def remember(self: Ledger, updates: Any) -> None:
        stored.extend(update.file for update in updates)
        accept(self, updates)

    monkeypatch.setattr(Ledger, "accept", remember)
    sites(tmp_path / "net").run(Silent())
    assert len(stored) == 2
    assert all("-sum-" in file for file in stored)
    for number in range(5):
        text = (tmp_path / f"state-{number}" / "audit.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert {"advertise", "share", "confirm", "unmask"} <= {line.get("asked") for line in lines}
        assert not any(word in text for word in ("mask_key", "shares", "ciphertexts"))
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert "peers.json" in written
    assert sorted(path.name for path in (tmp_path / "state-0").iterdir() if path.is_file()) == [
        "agent.key",
        "audit.jsonl",
        "peers.json",
        "process.json",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("point", [f"secure.{stage}" for stage in ("advertise", "share", "mask", "confirm", "unmask")])
def test_a_coordinator_that_dies_before_a_sum_is_unmasked_begins_again_with_new_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    heal = crash_at(monkeypatch, point)
    with pytest.raises(Crash):
        sites(tmp_path / "net").run(Silent())
    heal()
    assert sites(tmp_path / "net").run(Silent()).status == "done"
    assert weights(tmp_path / "net") == simulated(tmp_path / "serial")


@pytest.mark.slow
def test_a_sum_that_was_unmasked_but_not_stored_is_never_unmasked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heal = crash_at(monkeypatch, "secure.unmasked")
    with pytest.raises(Crash):
        sites(tmp_path / "net").run(Silent())
    heal()
    run = sites(tmp_path / "net")
    assert run.run(Silent()).status == "degraded"
    assert any("round 1 about this model was unmasked before" in text for text in run.said)
    assert cohorts(tmp_path / "net") == {2: 5}


def test_a_sum_that_was_stored_is_used_again_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heal = crash_at(monkeypatch, "coordinator.aggregated")
    with pytest.raises(Crash):
        sites(tmp_path / "net").run(Silent())
    heal()
    sites(tmp_path / "net").run(Silent())
    assert weights(tmp_path / "net") == simulated(tmp_path / "serial")
    unmasked = [
        line["round"]
        for line in map(json.loads, (tmp_path / "state-0" / "audit.jsonl").read_text().splitlines())
        if line.get("asked") == "unmask"
    ]
    assert unmasked == [1, 2]


def test_a_stored_sum_with_the_update_of_a_revoked_agent_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heal = crash_at(monkeypatch, "coordinator.aggregated")
    with pytest.raises(Crash):
        sites(tmp_path / "net").run(Silent())
    heal()
    run = sites(tmp_path / "net")
    run.ledger.revoke("site-4")
    run.tables.pop()  # it does not come back
    assert run.run(Silent()).status == "degraded"
    assert cohorts(tmp_path / "net")[2] == 4
    assert any("'4', whose agent was revoked, and a sum under masks cannot be taken apart" in line for line in run.said)


def test_an_agent_that_is_revoked_while_it_masks_costs_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sites(tmp_path / "net")
    carry_out = Agent.carry_out

    def revoked(self: Agent, assignment: Assignment) -> None:
        carry_out(self, assignment)
        if (self.site.name, assignment.kind, assignment.round) == ("site-1", "train", 1):
            run.ledger.revoke("site-1")
            run.pool.working = tuple(one for one in run.agents if one is not self)  # type: ignore[attr-defined]

    monkeypatch.setattr(Agent, "carry_out", revoked)
    assert run.run(Silent()).status == "degraded"
    assert cohorts(tmp_path / "net") == {2: 4}


def test_report_and_card_do_not_invent_numbers_that_nobody_knows(tmp_path: Path) -> None:
    run = sites(tmp_path / "net")
    assert any(line.startswith("Caution: Nothing will be measured: with [privacy], no metrics") for line in run.said)
    result = run.run(Silent())
    why = "The model was not evaluated: under secure aggregation nothing is measured at clients."
    report = result.report().read_text()
    assert why in report
    assert "examples: not known, by design" in report
    assert "No algorithm has finished" not in report
    text = write_card(result, tmp_path, []).read_text()
    assert f"## Know this before you use it\n\n- {why} Nobody knows how good it is.\n" in text
    made = table(result)
    assert (made.title, made.caption) == ("net: not evaluated", f"{why} {TEST_SET}")
    assert "5 clients. How many examples they have is not known, by design" in text
    for false in ("0 training examples", "| 0 | 0 | 0 |", "lowest and highest client", "These numbers"):
        assert false not in text
