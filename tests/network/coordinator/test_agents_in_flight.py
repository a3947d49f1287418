"""Asynchronous rounds with real agents in this process, which work when it is their turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.errors import InputError, QuorumError, TrainingError
from fedloom.experiment.experiment_file import parse
from fedloom.experiment.progress import Silent
from fedloom.network.agent.agent import Agent
from fedloom.network.agent.assignment_runner import AssignmentRunner
from fedloom.network.coordinator import agents_in_flight
from fedloom.network.coordinator.agent_pool import AgentPool, Call
from fedloom.network.coordinator.backend import NetworkBackend
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.coordinator.monitoring import Traffic
from fedloom.network.coordinator.network_run import NetworkRun
from fedloom.network.coordinator.operator_page import OperatorsView
from fedloom.network.protocol.messages import Assignment
from fedloom.results.report_warnings import cautions
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from fedloom.tree import Tree
from tests.clock.test_async_clock import system
from tests.network.conftest import EXPERIMENT, InProcessRun, WorkingPool, serial_weights, weights
from tests.network.coordinator.test_backend import SIX, LateRun, far, huge, shout

Turn = int | Callable[[], object]  # which agent works now, or what happens instead
QUIET = {"splits": []}
EVERYBODY = {"mode": "async", "buffer": 4}


class Turns(WorkingPool):
    """A pool whose agents train when it is their turn, one client at a time. After the last turn, the run crashes."""

    turns: Iterator[Turn] = iter(())

    def wait_until(self, condition: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Wait for one turn only, or for an evaluation."""
        if self.call is not None:
            return super().wait_until(condition, seconds)
        with self.changed:
            if not condition():
                self.pause(seconds)
        return condition()

    def pause(self, seconds: float) -> None:
        measuring = set(self.call.waiting.values()) if self.call is not None else set()
        turn: Turn | None = next((n for n, one in enumerate(self.working) if one.signer.agent in measuring), None)
        turn = next(self.turns, None) if turn is None else turn
        if turn is None:
            raise KeyboardInterrupt
        self.changed.release()
        try:
            if callable(turn):
                turn()
            else:
                self.working[turn].carry_out(self.taken_by(turn))
        finally:
            self.changed.acquire()

    def taken_by(self, number: int) -> Assignment:
        found = self.working[number].next_assignment()
        assert isinstance(found, Assignment)
        return found

    def flight(self, client: int) -> Call:
        (found,) = (call for call in self.flights.values() if client in call.waiting)
        return found


class TurnsRun(InProcessRun):
    """Three sites with one client each, in asynchronous rounds over two answers."""

    def __init__(self, folder: Path, turns: Iterable[Turn] = (), sites: int = 3, **edits: Any) -> None:
        values = {
            **EXPERIMENT,
            "rounds": 3,
            "data": {"source": "digits", "partition": {"name": "iid", "clients": sites}},
            "train": {"batch_size": "full"},
            "evaluate": QUIET,
            **edits.pop("values", {}),
        }
        self.turns = turns
        cohort = {"mode": "async", "buffer": 2, "deadline": "10m", **edits}
        super().__init__(folder, values, *[{}] * sites, **cohort)

    def _make_pool(self, deadline: float) -> AgentPool:
        self.agents_pool = Turns(self.ledger, self.tell, deadline)
        self.agents_pool.heartbeat = 1e6  # nobody is lost only because it waits for its turn
        self.agents_pool.turns = iter(self.turns)
        return self.agents_pool


def taken(folder: Path, cell: str = "fedavg-1") -> dict[int, list[tuple[int, int]]]:
    """Round → the answers that it took, by client and version."""
    found: dict[int, list[tuple[int, int]]] = {}
    with closing(Ledger(folder / "network")) as ledger:
        for row in ledger._rows("SELECT * FROM flights WHERE cell = ? AND taken ORDER BY taken, client", cell):
            found.setdefault(row["taken"], []).append((row["client"], row["version"]))
    return found


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The version and the client of every training."""
    train, found = AssignmentRunner.train, list[tuple[int, int]]()

    def watch(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        found.append((assignment.round, one.client))
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", watch)
    return found


@pytest.mark.parametrize(
    "more",
    [
        {"algorithm": {"fedavg": {}}},
        {"algorithm": {"scaffold": {}}},  # clients keep a state
        {"compress": {"up": {"name": "topk", "keep": 0.1}}},  # which is what they left out, here
    ],
)
def test_if_nothing_is_stale_the_bits_are_those_of_rounds_that_wait(tmp_path: Path, more: dict[str, Any]) -> None:
    values = {**EXPERIMENT, **more}
    InProcessRun(tmp_path / "net", values, {}, {}, **EVERYBODY).run(Silent())
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


# client 0 takes 1 second and client 1 takes 2.5: who answers in each round, and the version that it started from
FAST_AND_SLOW = {1: [(0, 1)], 2: [(0, 2)], 3: [(1, 1)], 4: [(0, 3)], 5: [(0, 5)]}


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedadam", "fedasync"])
def test_the_same_arrivals_give_the_bits_of_a_simulation(tmp_path: Path, name: str) -> None:
    values = {"rounds": 5, "algorithm": {name: {}}}
    run = TurnsRun(tmp_path / "net", [0, 0, 1, 0, 0], sites=2, buffer=1, values=values)
    run.run(Silent())
    assert taken(tmp_path / "net", f"{name}-1") == FAST_AND_SLOW
    machines = system(tmp_path, [1.0, 0.4]).model_dump(mode="json", exclude_defaults=True)
    simulated = {**run.experiment.resolved(), "system": machines, "cohort": {"mode": "async", "buffer": 1}}
    assert weights(tmp_path / "net") == serial_weights(simulated, tmp_path / "simulated")
    notes = [row for row in Result.read(tmp_path / "net").rows("server") if row["metric"] == "staleness"]
    assert {row["round"]: row["value"] for row in notes} == {1: 0, 2: 0, 3: 2, 4: 1, 5: 0}


def test_answers_of_several_versions_move_the_model_by_their_scaled_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """w ← w + Σ p_k s(τ_k) (w_k − w_v): each change starts at the version v that the client had."""
    train, versions = AssignmentRunner.train, dict[int, Tree]()
    answers: dict[tuple[int, int], tuple[Tree, float]] = {}

    def watch(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        (answer,) = train(runner, assignment, one, write)
        versions[assignment.round] = runner._shared(assignment)["model"]
        answers[one.client, assignment.round] = answer.update.groups["model"], float(answer.update.weights("model"))
        return [answer]

    monkeypatch.setattr(AssignmentRunner, "train", watch)
    TurnsRun(tmp_path / "net", [0, 1, 2, 0, 1, 2]).run(Silent())
    assert taken(tmp_path / "net") == {1: [(0, 1), (1, 1)], 2: [(0, 2), (2, 1)], 3: [(1, 2), (2, 3)]}
    some = [(answers[0, 2], 2, 1.0), (answers[2, 1], 1, 2**-0.5)]
    total = sum(weight for (_, weight), _, _ in some)
    for name, leaf in versions[2].items():
        moved = sum((model[name][0] - versions[v][name]) * weight / total * s for (model, weight), v, s in some)
        torch.testing.assert_close(versions[3][name], leaf + moved)


@pytest.mark.parametrize("every", [1, 10])
def test_after_a_crash_nobody_is_lost_and_no_answer_counts_twice(
    tmp_path: Path, trained: list[tuple[int, int]], every: int
) -> None:
    values = {"algorithm": {"scaffold": {}}, "run": {"backend": "serial", "checkpoint_every": every}}
    TurnsRun(tmp_path / "whole", [0, 1, 2, 0, 1, 2], values=values).run(Silent())
    assert len(trained) == 6
    (tmp_path / "other").mkdir()
    crashed = tmp_path / "other" / "net"
    with pytest.raises(KeyboardInterrupt):
        TurnsRun(crashed, [0, 1, 2], values=values).run(Silent())
    # client 2 has answered, no round has taken that, and clients 0 and 1 are at work
    TurnsRun(crashed, [0, 1, 2], values=values).run(Silent())
    assert trained[6:] == trained[:6]
    assert taken(crashed, "scaffold-1") == taken(tmp_path / "whole", "scaffold-1")
    assert weights(crashed) == weights(tmp_path / "whole")


def test_a_run_that_returns_to_an_older_checkpoint_finds_what_clients_kept(tmp_path: Path) -> None:
    values = {"algorithm": {"scaffold": {}}, "rounds": 4}
    with pytest.raises(KeyboardInterrupt):
        TurnsRun(tmp_path / "net", [0, 1, 2, 0, 1, 2, 0], values=values).run(Silent())
    assert taken(tmp_path / "net", "scaffold-1")[3] == [(1, 2), (2, 3)]
    (newest,) = (tmp_path / "net" / "cells" / "scaffold-1").glob("round-000003.*json")
    newest.write_bytes(b"")  # damaged: the answers that round 3 took are deleted, and those clients train again
    run = TurnsRun(tmp_path / "net", [1, 2, 0], values=values)  # client 0 has answered
    assert run.run(Silent()).status == "done"
    assert [text for text in run.said if "failed" in text or "missing" in text] == []
    assert taken(tmp_path / "net", "scaffold-1") == {
        **{1: [(0, 1), (1, 1)], 2: [(0, 2), (2, 1)]},
        **{3: [(0, 3), (1, 3)], 4: [(0, 4), (2, 3)]},
    }


def crash(run: InProcessRun, meanwhile: Callable[[], object] = lambda: None, round: int = 2) -> None:
    """Interrupt the coordinator when a round has recorded what it takes."""
    aggregate = NetworkBackend._aggregate

    def interrupted(backend: NetworkBackend, *more: Any) -> Any:
        if backend.cell.round == round:
            meanwhile()
            raise KeyboardInterrupt
        return aggregate(backend, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NetworkBackend, "_aggregate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.run(Silent())


def test_a_round_that_had_begun_to_add_up_takes_the_same_answers_again(tmp_path: Path) -> None:
    run = TurnsRun(tmp_path / "net", [0, 1, 0, 1])

    def one_more() -> None:  # it is older than those that the round took
        run.agents[2].carry_out(run.agents_pool.taken_by(2))

    crash(run, one_more)
    TurnsRun(tmp_path / "net", [0]).run(Silent())
    assert taken(tmp_path / "net") == {1: [(0, 1), (1, 1)], 2: [(0, 2), (1, 2)], 3: [(0, 3), (2, 1)]}


def test_a_round_without_a_revoked_agent_waits_for_another_answer(tmp_path: Path) -> None:
    crash(TurnsRun(tmp_path / "net", [0, 1, 2, 0]))
    assert taken(tmp_path / "net")[2] == [(0, 2), (2, 1)]
    with closing(Ledger(tmp_path / "net" / "network")) as ledger:
        ledger.revoke("site-2")
    run = TurnsRun(tmp_path / "net", [1, 0, 1])
    run.tables.pop()  # it does not come back
    run.run(Silent())
    assert "Waiting for the agents to come back: site-0, site-1 …" in run.said
    assert taken(tmp_path / "net") == {1: [(0, 1), (1, 1)], 2: [(0, 2), (1, 2)], 3: [(0, 3), (1, 3)]}


def test_a_run_that_returns_to_a_round_finds_the_answers_of_later_rounds_again(
    tmp_path: Path, trained: list[tuple[int, int]]
) -> None:
    values = {"run": {"backend": "serial", "checkpoint_every": 10}}
    crash(TurnsRun(tmp_path / "net", [0, 1, 0, 3, 2, 0], sites=4, values=values), round=3)
    assert taken(tmp_path / "net") == {1: [(0, 1), (1, 1)], 2: [(0, 2), (3, 1)], 3: [(0, 3), (2, 1)]}
    with closing(Ledger(tmp_path / "net" / "network")) as ledger:
        ledger.revoke("site-3")
    trained.clear()
    run = TurnsRun(tmp_path / "net", [0, 1], sites=4, values=values)
    run.tables.pop()
    run.run(Silent())
    assert taken(tmp_path / "net") == {1: [(0, 1), (1, 1)], 2: [(0, 2), (2, 1)], 3: [(0, 3), (1, 2)]}
    assert trained == [(3, 0), (2, 1)]


def test_a_crash_while_a_round_lets_go_of_its_answers_does_not_make_it_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(TurnsRun(tmp_path / "net", [0, 1, 2, 0]))
    with closing(Ledger(tmp_path / "net" / "network")) as ledger:
        ledger.revoke("site-2")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def run(*turns: int) -> None:
        made = TurnsRun(tmp_path / "net", turns)
        made.tables.pop()  # it does not come back
        made.run(Silent())

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "forget_after", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    run(1, 0, 1)
    assert taken(tmp_path / "net") == {1: [(0, 1), (1, 1)], 2: [(0, 2), (1, 2)], 3: [(0, 3), (1, 3)]}


def test_a_revoked_agents_answer_does_not_count_and_its_client_does_not_start_again(tmp_path: Path) -> None:
    run = TurnsRun(tmp_path / "net", [0, 1, 2, lambda: run.ledger.revoke("site-2"), 0, 1, 0, 1])
    run.run(Silent())
    assert taken(tmp_path / "net") == {1: [(0, 1), (1, 1)], 2: [(0, 2), (1, 2)], 3: [(0, 3), (1, 3)]}


def test_an_agent_that_is_revoked_while_its_client_is_about_to_start_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, run = NetworkBackend.training_assignments, TurnsRun(tmp_path / "net", [0, 1, 0, 1, 0, 1])

    def revoke_first(backend: NetworkBackend, *more: Any) -> Any:
        run.ledger.revoke("site-2")
        return make(backend, *more)

    monkeypatch.setattr(NetworkBackend, "training_assignments", revoke_first)
    assert run.run(Silent()).status == "done"
    assert {client for found in taken(tmp_path / "net").values() for client, _ in found} == {0, 1}


def test_a_client_that_does_not_answer_until_the_deadline_leaves_its_place(
    tmp_path: Path, trained: list[tuple[int, int]]
) -> None:
    held: list[tuple[Agent, Assignment]] = []

    def too_slow() -> None:
        held.append((run.agents[2], run.agents_pool.taken_by(2)))
        run.agents_pool.flight(2).deadline = 0.0

    def answer_late() -> None:
        agent, assignment = held.pop()
        agent.carry_out(assignment)

    run = TurnsRun(tmp_path / "net", [too_slow, 0, answer_late, 1, 0, 2, 1, 0])
    run.run(Silent())
    words = "has not answered within 10m: its place is free, and its answer will be rejected"
    assert f"fedavg: '2', at work since round 1, {words}" in run.said
    assert any("client 2 was rejected (late: the round is over, its deadline has passed" in text for text in run.said)
    # it started again, in the same round, and its second answer counts
    assert trained.count((1, 2)) == 2
    assert taken(tmp_path / "net") == {1: [(0, 1), (1, 1)], 2: [(0, 2), (2, 1)], 3: [(0, 3), (1, 2)]}


def pass_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agents_in_flight, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 601))


def test_if_nobody_answers_until_the_deadline_a_round_is_abandoned_and_answers_stay(tmp_path: Path) -> None:
    def time_passes() -> None:
        pass_deadline(patch)

    def next_round(kind: str, message: str, agent: str | None = None) -> None:
        if kind == "abandoned":
            patch.undo()

    run = TurnsRun(tmp_path / "net", [0, time_passes, 1, 0, 1])
    with pytest.MonkeyPatch.context() as patch:
        run.pool.log = next_round  # type: ignore[method-assign]
        result = run.run(Silent())
    assert (result.status, result.runs[0].abandoned) == ("degraded", 1)
    assert taken(tmp_path / "net") == {2: [(0, 1), (1, 1)], 3: [(0, 3), (1, 3)]}


def test_after_a_crash_an_abandoned_round_has_the_answers_that_came_too_late_for_it(
    tmp_path: Path, trained: list[tuple[int, int]]
) -> None:
    def next_round(kind: str, message: str, agent: str | None = None) -> None:
        if kind == "abandoned":
            patch.undo()

    values = {"run": {"backend": "serial", "checkpoint_every": 10}}
    run = TurnsRun(tmp_path / "net", [0, lambda: pass_deadline(patch), 1], values=values)
    with pytest.MonkeyPatch.context() as patch:
        run.pool.log = next_round  # type: ignore[method-assign]
        crash(run)
    assert taken(tmp_path / "net") == {2: [(0, 1), (1, 1)]}
    TurnsRun(tmp_path / "net", [0, 1, 0, 1], values=values).run(Silent())
    assert taken(tmp_path / "net") == {1: [(0, 1), (1, 1)], 2: [(0, 2), (1, 2)], 3: [(0, 3), (1, 3)]}
    assert len(trained) == len({*trained}) == 6


def test_clients_that_fail_wait_for_the_next_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, asked = AssignmentRunner.train, list[tuple[int, int]]()

    def fail(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        asked.append((assignment.round, one.client))
        if one.client == 1:
            raise TrainingError("out of memory")
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", fail)
    run = TurnsRun(tmp_path / "net", [0, 1, 2, 1, 0, 2, 0, 1, 2])
    assert run.run(Silent()).status == "done"
    assert [one for one in asked if one[1] == 1] == [(1, 1), (2, 1), (3, 1)]
    assert {round: {client for client, _ in found} for round, found in taken(tmp_path / "net").items()} == {
        round: {0, 2} for round in (1, 2, 3)
    }


def test_when_no_client_can_do_its_work_the_run_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        raise TrainingError("out of memory")

    monkeypatch.setattr(AssignmentRunner, "train", fail)
    with pytest.raises(TrainingError, match=r"Round 1: no client could do its work.* failed: 3, .*: out of memory$"):
        TurnsRun(tmp_path / "net", [0, 1, 2]).run(Silent())


def test_when_all_agents_are_gone_the_run_says_so(tmp_path: Path) -> None:
    def all_leave() -> None:
        for one in run.pool.agents.values():
            one.seen = -1e9
        pass_deadline(patch)

    run = TurnsRun(tmp_path / "net", [0, all_leave])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(QuorumError, match="all agents are gone"):
        run.run(Silent())


def test_an_outlier_is_judged_with_the_answers_of_all_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shout(monkeypatch, far)
    turns = [0, 1, 2, 3, 4, 0, 1, 2, 4, 5]  # client 5 started with the first round
    run = TurnsRun(tmp_path / "net", turns, sites=6, buffer=5, values={"rounds": 2})
    result = run.run(Silent())
    assert [row["round"] for row in result.rows("public") if row["name"] == "outlier"] == [1]
    assert taken(tmp_path / "net")[2] == [(0, 2), (1, 2), (2, 2), (4, 2), (5, 1)]


@pytest.mark.parametrize("min_cohort", [3, 4])
def test_a_round_without_an_outlier_has_as_many_answers_as_its_sites_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, min_cohort: int
) -> None:
    shout(monkeypatch, huge)
    run = InProcessRun(tmp_path / "net", {**EXPERIMENT, "rounds": 1}, {"min_cohort": min_cohort}, {}, **EVERYBODY)
    with nullcontext() if min_cohort == 3 else pytest.raises(QuorumError, match="Nothing was learnt"):
        run.run(Silent())


def test_a_round_that_diverges_begins_again_without_one_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shout(monkeypatch, huge)
    values = {**EXPERIMENT, "rounds": 2}
    for name, mode in (("waiting", {}), ("net", EVERYBODY)):
        run = InProcessRun(tmp_path / name / "net", values, {}, {}, outlier_factor="off", **mode)
        result = run.run(Silent())
        assert [row["client"] for row in result.rows("public") if row["name"] == "left_out"] == ["3", "3"]
        assert "fedavg: round 1 begins again without '3'" in "\n".join(run.said)
    assert weights(tmp_path / "waiting" / "net") == weights(tmp_path / "net" / "net")


def test_agents_with_clients_at_work_are_not_asked_to_measure_until_the_end(tmp_path: Path) -> None:
    values = {"evaluate": {"splits": ["test"], "server": ["test"], "every": 1}}
    result = TurnsRun(tmp_path / "net", [0, 1, 2, 0, 1, 2], values=values).run(Silent())
    found: dict[tuple[str, int], set[str]] = {}
    for row in Result.read(tmp_path / "net").rows("clients"):
        found.setdefault((row["phase"], row["round"]), set()).add(row["client"])
    assert found["pre_fit", 1] == {"0", "1", "2"}
    assert found["pre_fit", 2] == {"0", "1"}
    assert found["pre_fit", 3] == {"0", "2"}
    assert found["final", 3] == {"0", "1", "2"}
    final = [row for row in result.rows("clients") if row["phase"] == "final" and row["metric"] == "loss"]
    examples = sum(row["examples"] for row in final)
    (last,) = (row for row in result.rows("server") if (row["round"], row["metric"]) == (3, "loss"))
    assert last["value"] == pytest.approx(sum(row["value"] * row["examples"] for row in final) / examples)
    assert any("Rounds were asynchronous over a network" in one for one in cautions(RunData.read(tmp_path / "net")))


def test_a_site_that_joins_late_starts_in_the_next_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, trained = AssignmentRunner.train, list[tuple[int, int]]()

    def watch(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        trained.append((assignment.round, one.client))
        if assignment.round == 2 and len(run.tables) == 2:
            run.join()
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", watch)
    run = LateRun(tmp_path / "net", {**SIX, "evaluate": QUIET}, **EVERYBODY)
    run.run(Silent())
    assert min(round for round, client in trained if client in (4, 5)) == 3
    assert {4, 5} <= {client for found in taken(tmp_path / "net").values() for client, _ in found}


def test_the_operator_sees_who_is_in_flight_and_since_which_round(tmp_path: Path) -> None:
    seen: list[Any] = []

    def look() -> None:
        view = OperatorsView(run.pool, Traffic())
        seen.append((view._call(), {one["name"]: one["state"] for one in view._agents()}, run.pool.counts()))

    run = TurnsRun(tmp_path / "net", [0, 1, 2, look, 0, 1, 2])
    run.run(Silent())
    call, agents, counts = seen.pop()
    assert call["title"] == "fedavg: round 2, 1 of 2 answers"
    assert call["needed"] == 2
    assert {one["name"]: one["state"] for one in call["clients"]} == {
        "2 (from round 1)": "answered",
        "0 (from round 2)": "waiting",
        "1 (from round 2)": "waiting",
    }
    assert agents == {"site-0": "working", "site-1": "working", "site-2": "idle"}
    assert counts["awaited_clients"] == 2


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (
            {"privacy": {"secure_aggregation": {}}, "cohort": {"max_examples": 9}},
            "clients that start together",
        ),
        ({"privacy": {"dp": {"epsilon": 1.0, "clip": 1.0}}}, "clients that start together"),
        ({"algorithm": {"fedavg": {"rule": "median"}}}, "the rule of FedAvg compares changes from one model"),
        ({"algorithm": {"fsvrg": {}}}, "its formulas need answers that all start from the same model"),
        ({"evaluate": {"clients": "cohort"}}, "nobody knows before which ones answer"),
    ],
)
def test_what_cannot_be_asynchronous_is_refused(tmp_path: Path, values: dict[str, Any], why: str) -> None:
    cohort = {"mode": "async", **values.get("cohort", {})}
    with pytest.raises(InputError, match=why):
        NetworkRun(parse({**EXPERIMENT, **values, "cohort": cohort}), tmp_path)
