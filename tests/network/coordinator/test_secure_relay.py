"""Secure sums between real agents in this process: the coordinator relays, and learns sums only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.errors import InputError, QuorumError, TrainingError
from fedloom.experiment import checkpoint
from fedloom.experiment.progress import Silent
from fedloom.network.agent.agent import Agent
from fedloom.network.agent.secure_sessions import SecureSessions
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.protocol.messages import Assignment, SecureResult
from fedloom.privacy.dp import distributed
from fedloom.privacy.secure.session import Advertisement
from fedloom.privacy.table import DpTable
from fedloom.results.result import Result
from tests.conftest import slow_after
from tests.network.conftest import EXPERIMENT, InProcessRun, serial_weights, weights

SECURE = {"secure_aggregation": {"threshold": 0.6, "min_clients": 3, "range": 100.0}}
VALUES: dict[str, Any] = {
    **EXPERIMENT,
    "rounds": 2,
    "evaluate": {"splits": []},
    "privacy": SECURE,
    "data": {**EXPERIMENT["data"], "partition": {**EXPERIMENT["data"]["partition"], "clients": 5}},
}
CAPPED = {"max_examples": 1000}


def sites(folder: Path, *policies: dict[str, Any], **values: Any) -> InProcessRun:
    lenient = [{"min_threshold": 0.6, **policy} for policy in policies or ({},) * 5]
    return InProcessRun(folder, {**VALUES, **values}, *lenient, **CAPPED)


def simulated(folder: Path, **values: Any) -> dict[str, str | None]:
    return serial_weights({**VALUES, **values, "cohort": CAPPED}, folder)


@pytest.mark.parametrize(
    "algorithm", slow_after(1, [{"fedavg": {}}, {"scaffold": {}}, {"fsvrg": {}}, {"openai_es": {}}])
)
def test_the_bits_are_those_of_a_simulation(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    result = sites(tmp_path / "net", algorithm=algorithm).run(Silent())
    assert result.status == "done"
    assert weights(tmp_path / "net") == simulated(tmp_path / "serial", algorithm=algorithm)


def test_an_agent_may_host_several_clients(tmp_path: Path) -> None:
    sites(tmp_path / "net", {}, {}).run(Silent())
    assert weights(tmp_path / "net") == simulated(tmp_path / "serial")


def test_clients_that_send_nothing_need_no_session(tmp_path: Path) -> None:
    assert sites(tmp_path / "net", algorithm={"local": {}}).run(Silent()).status == "done"
    lines = [json.loads(line) for line in (tmp_path / "state-0" / "audit.jsonl").read_text().splitlines()]
    assert {line["asked"] for line in lines if line["event"] == "answered"} == {"reduce client"}
    refused = [line["why"] for line in lines if line["event"] == "refused"]
    assert all("no fingerprints of models of single clients leave" in why for why in refused)


def test_with_differential_privacy_clients_clip_what_they_mask(tmp_path: Path) -> None:
    dp = {"noise_multiplier": 0.01, "clip": 1e-6}
    run = sites(tmp_path / "net", privacy={**SECURE, "dp": dp})
    assert run.run(Silent()).status == "done"
    found = checkpoint.load(checkpoint.of_cell(tmp_path / "net", "fedavg", 1))
    assert found is not None
    initial, model = run.plan.task(1).initial(), found.snapshot.state["model"]
    moved = max(float((model[name] - initial[name]).abs().max()) for name in initial)
    assert 0 < moved < 1e-5


def test_clients_add_noise_together_and_charge_themselves(tmp_path: Path) -> None:
    dp = {"epsilon": 50.0, "clip": 1e-3, "noise": "distributed"}
    run = sites(tmp_path / "net", *({"max_epsilon": 50.0, "assumed_colluders": 0.1},) * 5, privacy={**SECURE, "dp": dp})
    assert run.run(Silent()).status == "done"
    found = checkpoint.load(checkpoint.of_cell(tmp_path / "net", "fedavg", 1))
    assert found is not None
    z = distributed.multiplier(DpTable(**dp), 2)
    initial, model = run.plan.task(1).initial(), found.snapshot.state["model"]
    moved = torch.cat([(model[name] - initial[name]).flatten() for name in initial])
    # 60 % of five clients are three, of which one may collude: two are enough, and five add noise, in two rounds
    expected = z * 1e-3 / 5 * (5 / 2) ** 0.5 * 2**0.5
    assert float(moved.double().std()) == pytest.approx(expected, rel=0.1)
    assert cohorts(tmp_path / "net") == {1: 5, 2: 5}
    ledgers = [path.read_text().splitlines() for path in tmp_path.glob("**/privacy/*/*/distributed/privacy.jsonl")]
    assert [len(lines) for lines in ledgers] == [1 + 2] * 5
    assert all(json.loads(line)["noise_multiplier"] == z for lines in ledgers for line in lines[1:])


def test_a_site_refuses_at_the_start_what_all_cells_of_a_run_would_cost_together(tmp_path: Path) -> None:
    policy = {"max_epsilon": 50.0, "assumed_colluders": 0.1}
    run = sites(tmp_path / "net", policy, {}, {}, {}, {}, privacy=TOGETHER, algorithm={"fedavg": {}, "fedprox": {}})
    with pytest.raises(
        InputError, match=r"the 2 cells of this run .* cost ε = \d+\.\d+ together, .* max_epsilon is 50"
    ):
        run.run(Silent())


TOGETHER = {**SECURE, "dp": {"epsilon": 50.0, "clip": 1e-3, "noise": "distributed"}}


class Crash(BaseException):
    """Stands for the end of the coordinator's process."""


def crash_at(monkeypatch: pytest.MonkeyPatch, point: str) -> Callable[[], None]:
    def strike(name: str) -> None:
        if name == point:
            raise Crash(name)

    monkeypatch.setattr("fedloom.faults.point", strike)
    return lambda: monkeypatch.setattr("fedloom.faults.point", lambda name: None)


def test_a_masked_change_is_charged_even_if_the_coordinator_says_that_its_sum_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator could have unmasked it without asking this site."""
    heal = crash_at(monkeypatch, "secure.confirm")
    with pytest.raises(Crash):
        sites(tmp_path / "net", privacy=TOGETHER).run(Silent())
    heal()
    assert sites(tmp_path / "net", privacy=TOGETHER).run(Silent()).status == "done"
    ledgers = [path.read_text().splitlines() for path in tmp_path.glob("**/privacy/*/*/distributed/privacy.jsonl")]
    assert [len(lines) for lines in ledgers] == [1 + 3] * 5


@pytest.mark.parametrize("clip", slow_after(2, [None, float("nan"), 0.0, -1.0, float("inf")]))
def test_a_change_without_a_positive_clip_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float | None
) -> None:
    def without(site: str, one: Assignment) -> Assignment:
        secure = one.secure.model_copy(update={"clip": clip}) if one.secure is not None else None
        return one.model_copy(update={"secure": secure}) if one.kind == "train" else one

    lie(monkeypatch, without)
    with pytest.raises(TrainingError, match=f"a change with the clip {clip}: it must be a positive number"):
        sites(tmp_path / "net", privacy=TOGETHER).run(Silent())


def test_a_cohort_that_changes_after_clients_agreed_on_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decides how much of the clip rounding takes, and how much noise a client adds."""
    lie(monkeypatch, lambda site, one: one.model_copy(update={"cohort": 50}) if one.kind == "train" else one)
    with pytest.raises(TrainingError, match="another session began"):
        sites(tmp_path / "net", privacy=TOGETHER).run(Silent())


def cohorts(folder: Path) -> dict[int, int]:
    """How many clients were in the sum of each round."""
    rows = Ledger(folder / "network")._rows("SELECT round, accepted FROM attempts WHERE status = 'accepted'")
    return {row["round"]: row["accepted"] for row in rows}


def fail_at(monkeypatch: pytest.MonkeyPatch, site: str, stage: str, round: int = 1) -> None:
    """Let one site fail in a stage of a round."""
    carry_out = Agent.carry_out

    def failing(self: Agent, assignment: Assignment) -> None:
        now = "mask" if assignment.kind == "train" else assignment.kind
        if (self.site.name, now, assignment.round) == (site, stage, round):
            return self._report(assignment, assignment.clients, "error", "the disk burns")
        return carry_out(self, assignment)

    monkeypatch.setattr(Agent, "carry_out", failing)


GOOD = "ab" * 32


@pytest.mark.parametrize(
    ("mask_key", "channel_key"),
    slow_after(1, [("09", GOOD), ("00" * 32, GOOD), (GOOD, "01" + "00" * 31), (GOOD, GOOD)]),
    ids=["too short", "zero", "of low order", "twice the same"],
)
def test_a_site_with_bad_keys_costs_only_itself_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask_key: str, channel_key: str
) -> None:
    """Honest clients refuse a roster with such keys, so it must not reach them."""
    advertise = SecureSessions._advertise

    def hostile(self: SecureSessions, assignment: Assignment, one: Any, algorithm: Any) -> SecureResult:
        result = advertise(self, assignment, one, algorithm)
        if one.client != 1:
            return result
        forged = Advertisement(1, bytes.fromhex(mask_key), bytes.fromhex(channel_key))
        signature = self._sign(forged.text(self.open[1].call.session))
        return SecureResult(mask_key=mask_key, channel_key=channel_key, signature=signature.hex())

    monkeypatch.setattr(SecureSessions, "_advertise", hostile)
    assert sites(tmp_path / "net").run(Silent()).status == "done"
    assert cohorts(tmp_path / "net") == {1: 4, 2: 4}


def test_a_site_that_sends_shares_of_a_wrong_length_costs_only_itself_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = SecureSessions._share

    def hostile(self: SecureSessions, assignment: Assignment, one: Any, algorithm: Any) -> SecureResult:
        result = share(self, assignment, one, algorithm)
        short = {client: text[:-2] for client, text in result.shares.items()}
        return result.model_copy(update={"shares": short}) if one.client == 1 else result

    monkeypatch.setattr(SecureSessions, "_share", hostile)
    assert sites(tmp_path / "net").run(Silent()).status == "done"
    assert cohorts(tmp_path / "net") == {1: 4, 2: 4}


def test_a_site_that_gives_wrong_shares_is_named_and_the_sum_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmask = SecureSessions._unmask

    def hostile(self: SecureSessions, assignment: Assignment, one: Any, algorithm: Any) -> SecureResult:
        result = unmask(self, assignment, one, algorithm)
        wrong = {client: "00" * (len(share) // 2 - 1) + "01" for client, share in result.shares.items()}
        return result.model_copy(update={"shares": wrong}) if one.client == 1 else result

    monkeypatch.setattr(SecureSessions, "_unmask", hostile)
    run = sites(tmp_path / "net")
    assert run.run(Silent()).status == "done"
    assert weights(tmp_path / "net") == simulated(tmp_path / "serial")
    assert any("round 2: '1' gave wrong shares. The sum was found without them" in line for line in run.said)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["advertise", "share", "mask", "confirm", "unmask"])
def test_a_site_may_vanish_at_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    fail_at(monkeypatch, "site-2", stage)
    run = sites(tmp_path / "net")
    assert run.run(Silent()).status == "done"
    assert cohorts(tmp_path / "net") == {1: 5 if stage in ("confirm", "unmask") else 4, 2: 5}
    if stage in ("confirm", "unmask"):  # its masked update had arrived, so it is in the sum
        assert weights(tmp_path / "net") == simulated(tmp_path / "serial")


def test_the_coordinator_learns_no_sizes_weights_or_metrics(tmp_path: Path) -> None:
    run = sites(tmp_path / "net", evaluate={"splits": ["test"]})
    run.run(Silent())
    assert any("evaluate.splits: left out on a network with [privacy]" in text for text in run.said)
    assert not Result.read(tmp_path / "net").rows("clients")
    hellos = [json.loads(row["hello"]) for row in Ledger(tmp_path / "net" / "network").agents()]
    assert {client[split] for hello in hellos for client in hello["clients"] for split in ("train", "test")} == {0}
    assert any("no client's update, weight or metric" in text for text in run.said)


# --- crashes


def test_an_agent_that_was_restarted_in_a_session_has_left_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out = Agent.carry_out

    def restarted(self: Agent, assignment: Assignment) -> None:
        if self.site.name == "site-1" and assignment.kind == "train" and assignment.round == 1:
            assert self.runner is not None
            self.runner.sessions.open.clear()
        return carry_out(self, assignment)

    monkeypatch.setattr(Agent, "carry_out", restarted)
    run = sites(tmp_path / "net")
    assert run.run(Silent()).status == "done"
    assert any("has no keys of the session: it was restarted" in text for text in run.said)
    assert cohorts(tmp_path / "net") == {1: 4, 2: 5}


# --- a lying coordinator


def lie(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, Assignment], Assignment]) -> None:
    """Let the coordinator change what it tells single sites."""
    carry_out = Agent.carry_out
    monkeypatch.setattr(Agent, "carry_out", lambda self, one: carry_out(self, change(self.site.name, one)))


def test_an_update_without_a_mask_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, lambda site, one: one.model_copy(update={"secure": None}) if one.kind == "train" else one)
    run = sites(tmp_path / "net")
    with pytest.raises(TrainingError, match="asks for an update without a mask"):
        run.run(Silent())


def test_two_survivor_sets_unmask_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def two_sets(site: str, one: Assignment) -> Assignment:
        if one.kind == "confirm" and site != "site-0" and one.secure is not None:
            fewer = tuple(client for client in one.secure.clients if client != 0)
            return one.model_copy(update={"secure": one.secure.model_copy(update={"clients": fewer})})
        return one

    lie(monkeypatch, two_sets)
    run = sites(tmp_path / "net")
    with pytest.raises(QuorumError, match="Nothing was learnt"):
        run.run(Silent())
    assert cohorts(tmp_path / "net") == {}
    assert any("the signature is not under the set of clients in the sum" in text for text in run.said)


def test_a_lowered_cohort_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, lambda site, one: one.model_copy(update={"cohort": 2}) if one.kind == "advertise" else one)
    run = sites(tmp_path / "net")
    with pytest.raises(TrainingError, match="a sum must cover at least 3 clients, and this session invites 2"):
        run.run(Silent())


def test_a_forged_roster_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forge(site: str, one: Assignment) -> Assignment:
        if one.kind != "share" or one.secure is None:
            return one
        peers = [
            peer.model_copy(update={"mask_key": "09" + 62 * "0"}) if peer.client == 3 else peer
            for peer in one.secure.peers
        ]
        return one.model_copy(update={"secure": one.secure.model_copy(update={"peers": tuple(peers)})})

    lie(monkeypatch, forge)
    run = sites(tmp_path / "net")
    with pytest.raises(TrainingError, match=r"keys of client 3 are not signed by it|our own keys"):
        run.run(Silent())


def test_the_key_of_a_known_agent_may_not_change(tmp_path: Path) -> None:
    sites(tmp_path / "net").run(Silent())
    pins = tmp_path / "state-0" / "peers.json"
    known = json.loads(pins.read_text())
    assert len(known) == 4  # those of the others
    changed = sorted(known)[1]
    pins.write_text(json.dumps({**known, changed: "ab" * 32}))
    again = sites(tmp_path / "net", rounds=3)
    again.run(Silent())
    assert any(f"the key of agent {changed} is not the one that was seen first" in text for text in again.said)
    assert cohorts(tmp_path / "net") == {1: 5, 2: 5, 3: 4}


def test_a_site_can_refuse_rounds_with_more_clients_than_share_masks_with_all(tmp_path: Path) -> None:
    run = sites(tmp_path / "net", {"max_secure_cohort": 4}, {}, {}, {}, {})
    assert run.run(Silent()).status == "done"
    assert any(
        "allows at most 4 clients in a round with secure aggregation" in t and "this one has 5" in t for t in run.said
    )
    assert cohorts(tmp_path / "net") == {1: 4, 2: 4}


def test_a_site_accepts_only_the_peers_that_its_policy_lists(tmp_path: Path) -> None:
    run = sites(tmp_path / "net", {"peers": ["00" * 32]}, {}, {}, {}, {})
    run.run(Silent())
    assert any("does not list the fingerprint of agent" in text for text in run.said)
    assert cohorts(tmp_path / "net") == {1: 4, 2: 4}
