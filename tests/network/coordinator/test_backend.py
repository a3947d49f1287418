"""Work that goes out as assignments and comes back as answers, with real agents in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom import cli, tree
from fedloom.algorithm import Clients, Groups, Trained, Update
from fedloom.algorithms.fedavg import FedAvg
from fedloom.errors import Diverged, QuorumError, TrainingError
from fedloom.experiment.progress import ASKED, Lines, Silent
from fedloom.experiment.store import Store
from fedloom.federation import engine
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import ClientWork, Report
from fedloom.network.agent.assignment_runner import AssignmentRunner
from fedloom.network.agent.policy import SCORES_LEAVE, Refused, rehearsal
from fedloom.network.coordinator.backend import NetworkBackend
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.coordinator.network_folder import invite
from fedloom.network.coordinator.update_checks import Judge
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.signatures import Signer
from fedloom.network.protocol.token import Token
from fedloom.results.disclosure import what_left
from fedloom.results.report_warnings import cautions
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from tests.conftest import slow_after
from tests.network.conftest import EXPERIMENT, InProcessRun, WorkingPool, serial_weights, weights

SMALL = {**EXPERIMENT, "rounds": 2, "evaluate": {"every": 1}}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"scaffold": {}},  # clients keep a state
        {"staged": {"groups": 3}},  # every client gets its own message
        {"peer": {"name": "peer", "weights": "score", "topology": "ring"}},  # clients receive their peers' models
    ],
)
def test_the_bits_are_those_of_the_serial_backend(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    values = {**SMALL, "algorithm": algorithm}
    result = InProcessRun(tmp_path / "net", values, {}, {}).run(Silent())
    assert result.status == "done"
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


def test_what_a_client_measures_is_in_the_results(tmp_path: Path) -> None:
    InProcessRun(tmp_path / "net", SMALL, {}, {}).run(Silent())
    serial_weights(SMALL, tmp_path / "serial")

    def rows(folder: str) -> list[tuple[Any, ...]]:
        found = Result.read(tmp_path / folder).rows("clients")
        return sorted((row["round"], row["client"], row["split"], row["metric"], row["value"]) for row in found)

    assert "accuracy" in (Result.read(tmp_path / "net").report()).read_text()
    assert rows("net")
    assert rows("net") == rows("serial")


def test_answers_that_were_accepted_before_a_crash_are_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**SMALL, "algorithm": {"scaffold": {}}}
    trained: list[tuple[int, int]] = []
    train = AssignmentRunner.train

    def crash_in_round_two(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        if (assignment.round, one.client) == (2, 3) and (2, 3) not in trained:
            trained.append((2, 3))
            raise KeyboardInterrupt
        trained.append((assignment.round, one.client))
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", crash_in_round_two)
    with pytest.raises(KeyboardInterrupt):
        InProcessRun(tmp_path / "net", values, {}, {}).run(Silent())
    assert trained == [(1, 0), (1, 2), (1, 1), (1, 3), (2, 0), (2, 2), (2, 1), (2, 3)]
    InProcessRun(tmp_path / "net", values, {}, {}).run(Silent())
    assert trained[8:] == [(2, 3)]
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


def test_a_round_below_its_quorum_is_abandoned_and_the_next_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = AssignmentRunner.train

    def fail_in_round_one(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        if assignment.round == 1 and one.client != 0:
            raise TrainingError("out of memory")
        return train(runner, assignment, one, write)

    steps: dict[int, dict[str, float]] = {}

    class Listening(Silent):
        def step(self, cell: str, round: int, values: dict[str, float], seconds: float) -> None:
            steps[round] = values

    monkeypatch.setattr(AssignmentRunner, "train", fail_in_round_one)
    unmeasured = {**SMALL, "evaluate": {"splits": []}}  # as with [privacy], where no metrics leave sites
    run = InProcessRun(tmp_path / "net", unmeasured, {}, {}, quorum=0.5)
    assert run.run(Listening()).status == "degraded"
    assert steps[1]["abandoned"] == 1
    assert ASKED not in steps[1]  # such a round has no values over clients, so nothing is said about how many
    assert (
        "fedavg: round 1 is abandoned, because 1 of 4 clients answered and 2 are needed. Clients that "
        "failed: 3, refused or rejected: 0. The first is '1': out of memory"
    ) in run.said
    assert "site-1 failed: out of memory" in run.said


@pytest.mark.parametrize("answers", [0, 1])
def test_an_update_is_summed_only_with_as_many_others_as_its_site_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    train = AssignmentRunner.train

    def only_one_answers(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        if assignment.round == 1 and one.client != answers:
            raise TrainingError("out of memory")
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", only_one_answers)
    run = InProcessRun(tmp_path / "net", SMALL, {"min_cohort": 3}, {})  # the first site hosts clients 0 and 2
    result = run.run(Silent())
    abandoned = "fedavg: round 1 is abandoned, because 1 of 4 clients answered and 3 are needed"
    assert [line.startswith(abandoned) for line in run.said].count(True) == result.runs[0].abandoned == (answers == 0)


def test_the_results_say_why_clients_did_not_take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = AssignmentRunner.train

    def fail_in_round_one(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        if assignment.round == 1 and one.client in (1, 2):
            raise TrainingError("out of memory") if one.client == 1 else Refused("not today")
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", fail_in_round_one)
    result = InProcessRun(tmp_path / "net", SMALL, {}, {}, quorum=0.75).run(Silent())
    assert (result.status, result.runs[0].abandoned) == ("degraded", 1)  # in such a round, the reasons matter most
    marks = [(row["round"], row["client"], row["name"]) for row in result.rows("public")]
    assert marks == [(1, "1", "failed"), (1, "2", "refused")]


def test_progress_and_report_say_how_many_of_the_clients_a_round_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, lines = AssignmentRunner.train, Lines(io.StringIO())

    def fail(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        if one.client == 3:
            raise TrainingError("out of memory")
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", fail)
    InProcessRun(tmp_path / "net", SMALL, {}, {}).run(lines)
    assert "over 3 of 4 clients" in lines.stream.getvalue()
    (found,) = (text for text in cautions(RunData.read(tmp_path / "net")) if "were asked" in text)
    assert "in 2 of 2 rounds" in found
    assert "at worst 3 of 4" in found
    assert found.endswith(": 3 (2 rounds).")
    assert not any("final model are means" in text for text in cautions(RunData.read(tmp_path / "net")))
    with Store(tmp_path / "net") as store:  # as if the client had been away at the end, too
        store._database.execute("DELETE FROM client_metrics WHERE phase = 'final' AND client = 3")
    said = " ".join(cautions(RunData.read(tmp_path / "net")))
    assert "the numbers of its final model are means over 3 of 4 clients" in said


def test_when_no_client_can_do_its_work_the_run_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        raise TrainingError("out of memory")

    monkeypatch.setattr(AssignmentRunner, "train", fail)
    with pytest.raises(TrainingError, match=r"Round 1: no client could do its work.* failed: 4, .*: out of memory$"):
        InProcessRun(tmp_path / "net", SMALL, {}).run(Silent())


@pytest.mark.parametrize("failing", [{3}, {0, 1, 2, 3}])
def test_a_run_ends_only_if_no_client_of_any_cohort_can_do_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: set[int]
) -> None:
    train, asked = AssignmentRunner.train, []

    def fail(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        asked.append(one.client)
        if one.client in failing:
            raise TrainingError("out of memory")
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", fail)
    run = InProcessRun(tmp_path / "net", {**SMALL, "rounds": 12}, {}, {}, count=1)
    if failing == {3}:
        result = run.run(Silent())
        assert 3 in asked
        assert (result.status, result.runs[0].abandoned) == ("degraded", asked.count(3))
    else:
        with pytest.raises(TrainingError, match="no client could do its work"):
            run.run(Silent())
        assert (set(asked), asked.count(asked[-1])) == (failing, 1)  # it ends with the first failure of the last client


def test_an_update_above_the_norm_bound_costs_its_client_the_round(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"refused or rejected: 4. The first is '.*': norm: the change of model"):
        InProcessRun(tmp_path / "net", SMALL, {}, norm_bound=1e-9).run(Silent())


MANY = {**SMALL, "data": {"source": "digits", "partition": {"name": "iid", "clients": 6}}}
JUDGED = {**MANY, "cohort": {"outlier_factor": 10}}  # a simulation that leaves out what a network does


def shout(monkeypatch: pytest.MonkeyPatch, change: Callable[[Update, Groups], Update]) -> None:
    """Let client 3 change what it sends."""
    answer = FedAvg.answer

    def louder(self: FedAvg, shared: Groups, trained: Trained, data: Clients) -> Update:
        update = answer(self, shared, trained, data)
        return change(update, shared) if data.ids == (3,) else update

    monkeypatch.setattr(FedAvg, "answer", louder)


def far(update: Update, shared: Groups) -> Update:
    changes = tree.scale(tree.sub(update.groups["model"], shared["model"]), 100.0)
    return replace(update, groups={"model": tree.add(tree.expand(shared["model"], 1), changes)})


def huge(update: Update, shared: Groups) -> Update:
    filled = {group: tree.map_leaves(lambda leaf: leaf * 0 + 3.4e38, leaves) for group, leaves in update.groups.items()}
    return replace(update, groups=filled)


def heavy(update: Update) -> Update:
    return replace(update, weight=update.weights("model") + 1)


def test_an_outlier_is_left_out_as_in_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = serial_weights(MANY, tmp_path / "quiet")
    shout(monkeypatch, far)
    result = InProcessRun(tmp_path / "net", MANY, {}, {}).run(Silent())
    assert weights(tmp_path / "net") == serial_weights(JUDGED, tmp_path / "serial")
    assert weights(tmp_path / "net") != quiet
    with closing(Ledger(tmp_path / "net" / "network")) as ledger:
        assert [ledger.left_out("fedavg-1", round, 0) for round in (1, 2)] == [{3: "outlier"}] * 2
    found = [row["client"] for row in result.rows("public") if row["name"] == "outlier"]
    assert found == ["3", "3"]


def test_a_decision_about_an_outlier_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shout(monkeypatch, far)
    expected = serial_weights(JUDGED, tmp_path / "serial")
    aggregate = NetworkBackend._aggregate
    decided: list[dict[int, str]] = []

    def crash(backend: NetworkBackend, work: ClientWork, *more: Any) -> Any:
        decided.append(backend.pool.ledger.left_out("fedavg-1", work.round, work.call))
        if len(decided) == 1:
            raise KeyboardInterrupt
        return aggregate(backend, work, *more)

    monkeypatch.setattr(NetworkBackend, "_aggregate", crash)
    with pytest.raises(KeyboardInterrupt):
        InProcessRun(tmp_path / "net", MANY, {}, {}).run(Silent())
    outliers = Judge.outliers
    later = lambda judge, work, *more: outliers(judge, work, *more) if work.round > 1 else []  # noqa: E731
    monkeypatch.setattr(Judge, "outliers", later)  # round 1 is not decided again
    InProcessRun(tmp_path / "net", MANY, {}, {}).run(Silent())
    assert decided == [{3: "outlier"}] * 3
    assert weights(tmp_path / "net") == expected


def test_finite_updates_that_make_the_model_infinite_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outliers count here, so that the aggregate overflows."""
    shout(monkeypatch, huge)
    run = InProcessRun(tmp_path / "net", SMALL, {}, {}, outlier_factor="off")
    aggregate = NetworkBackend._aggregate
    rounds: list[int] = []

    def crash(backend: NetworkBackend, work: ClientWork, *more: Any) -> Any:
        rounds.append(work.round)
        if len(rounds) == 2:  # the round has begun again
            raise KeyboardInterrupt
        return aggregate(backend, work, *more)

    monkeypatch.setattr(NetworkBackend, "_aggregate", crash)
    with pytest.raises(KeyboardInterrupt):
        run.run(Silent())
    said = "its result was not finite, and the update of '3' is the largest"
    assert f"fedavg: round 1 begins again without '3': {said}" in run.said
    result = InProcessRun(tmp_path / "net", SMALL, {}, {}, outlier_factor="off").run(Silent())
    assert rounds == [1, 1, 1, 2, 2]  # what was decided before the crash is not tried again
    assert result.status == "done"
    left_out = [row["client"] for row in result.rows("public") if row["name"] == "left_out"]
    assert left_out == ["3", "3"]
    with pytest.raises(TrainingError, match=r"the new model is not finite; the largest update, .* is that of '3'"):
        serial_weights({**SMALL, "cohort": {"outlier_factor": "off"}}, tmp_path / "serial")


def test_agents_answer_a_round_of_two_calls_that_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the gradient of client 3, the others are asked about another mean gradient, in a new attempt."""
    train = AssignmentRunner.train
    asked: list[tuple[int, int, int]] = []

    def overflow(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        (answer,) = train(runner, assignment, one, write)
        asked.append((assignment.attempt, assignment.call, one.client))
        return [replace(answer, update=huge(answer.update, {})) if (assignment.call, one.client) == (1, 3) else answer]

    monkeypatch.setattr(AssignmentRunner, "train", overflow)
    values = {**SMALL, "rounds": 1, "algorithm": {"fsvrg": {}}}
    run = InProcessRun(tmp_path / "net", values, {}, {}, outlier_factor="off")
    assert run.run(Silent()).status == "done"
    assert sorted(asked) == [(1, call, client) for call in (0, 1) for client in range(4)] + [
        (2, 1, client) for client in range(3)
    ]


def test_agents_answer_though_a_round_of_two_calls_leaves_out_one_client_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, wrong = engine.checked, [5, 4, 3, 2, 1]

    def diverging(state: Groups, cohort: Any, *more: Any) -> Groups:
        if cohort.round == 2 and wrong:
            raise Diverged("too large", wrong.pop(0))
        return checked(state, cohort, *more)

    monkeypatch.setattr(engine, "checked", diverging)
    values = {**MANY, "rounds": 3, "algorithm": {"fsvrg": {}}}
    run = InProcessRun(tmp_path / "net", values, {}, {}, outlier_factor="off")
    result = run.run(Silent())
    assert [text for text in run.said if "refuse" in text] == []
    assert (result.status, wrong) == ("done", [])
    assert [row["participants"] for row in result.rows("rounds")] == [6, 1, 6]


@pytest.mark.parametrize("algorithm", ["fedavg", "fsvrg"])
def test_a_single_client_that_would_ruin_the_model_costs_its_round_as_in_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    train = AssignmentRunner.train

    def ruin(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        (answer,) = train(runner, assignment, one, write)
        return [replace(answer, update=huge(answer.update, {})) if assignment.round == 2 else answer]

    monkeypatch.setattr(AssignmentRunner, "train", ruin)
    values = {**SMALL, "rounds": 3, "algorithm": {algorithm: {}}}
    run = InProcessRun(tmp_path / "net", values, {}, {}, count=1)
    result = run.run(Silent())
    assert (result.status, result.runs[0].abandoned) == ("degraded", 1)
    assert [row["round"] for row in result.rows("public") if row["name"] == "outlier"] == [2]


@pytest.mark.parametrize("algorithm", ["fedavg", "fsvrg"])  # fsvrg sends a gradient in the first of two calls
def test_among_few_clients_a_finite_update_that_would_ruin_the_model_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    train = AssignmentRunner.train

    def ruin(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        (answer,) = train(runner, assignment, one, write)
        groups = {g: tree.map_leaves(lambda leaf: leaf * 0 + 1e30, part) for g, part in answer.update.groups.items()}
        bad = replace(answer, update=replace(answer.update, groups=groups))
        return [bad if (one.client, assignment.call) == (3, 0) else answer]

    monkeypatch.setattr(AssignmentRunner, "train", ruin)
    result = InProcessRun(tmp_path / "net", {**SMALL, "algorithm": {algorithm: {}}}, {}, {}).run(Silent())
    assert result.status == "done"
    left_out = [(row["round"], row["client"]) for row in result.rows("public") if row["name"] == "outlier"]
    assert left_out == [(1, "3"), (2, "3")]


def test_updates_of_a_revoked_agent_do_not_count_in_rounds_that_are_not_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**SMALL, "algorithm": {"scaffold": {}}}
    aggregate = NetworkBackend._aggregate

    def crash(backend: NetworkBackend, work: ClientWork, *more: Any) -> Any:
        if work.round == 2:
            raise KeyboardInterrupt
        return aggregate(backend, work, *more)

    with monkeypatch.context() as patch:
        patch.setattr(NetworkBackend, "_aggregate", crash)
        with pytest.raises(KeyboardInterrupt):
            InProcessRun(tmp_path / "net", values, {}, {}).run(Silent())
    counted: list[list[int]] = []

    def watch(backend: NetworkBackend, work: ClientWork, calls: Any, expected: Any, counting: list[Report]) -> Any:
        counted.append([report.client for report in counting])
        return aggregate(backend, work, calls, expected, counting)

    monkeypatch.setattr(NetworkBackend, "_aggregate", watch)
    run = InProcessRun(tmp_path / "net", values, {}, {})
    run.ledger.revoke("site-1")
    run.tables.pop()  # it does not come back
    result = run.run(Silent())
    assert (result.status, counted) == ("done", [[0, 2]])
    marks = [(row["round"], row["client"], row["name"]) for row in result.rows("public")]
    assert marks == [(2, "1", "revoked"), (2, "3", "revoked")]


@pytest.mark.parametrize("cap", [None, 100])
def test_a_client_counts_for_the_examples_that_its_agent_announced_and_the_operator_believes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cap: int | None
) -> None:
    train = AssignmentRunner.train

    def heavier(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        (answer,) = train(runner, assignment, one, write)
        return [replace(answer, update=heavy(answer.update)) if one.client == 3 else answer]

    monkeypatch.setattr(AssignmentRunner, "train", heavier)
    run = InProcessRun(tmp_path / "net", {**SMALL, "rounds": 1}, {}, {}, **({"max_examples": cap} if cap else {}))
    assert run.run(Silent()).status == "done"
    refused = [line for line in run.said if "rejected (weight" in line and line.startswith("site-1")]
    why = f"weight: the weight of model must be from 0 to {cap or 269}, and is {(cap or 269) + 1}"
    assert refused == [f"site-1: the answer of client 3 was rejected ({why})"]


def test_a_site_with_many_examples_weighs_what_the_operator_allows_as_in_a_simulation(tmp_path: Path) -> None:
    unbalanced = {"source": "digits", "partition": {"name": "quantity", "clients": 4}}
    values, cap = {**SMALL, "rounds": 1, "data": unbalanced}, {"max_examples": 100}
    run = InProcessRun(tmp_path / "net", values, {}, {}, **cap)
    assert run.run(Silent()).status == "done"
    assert [line for line in run.said if "rejected" in line] == []
    capped = serial_weights({**values, "cohort": cap}, tmp_path / "capped")
    assert weights(tmp_path / "net") == capped != serial_weights(values, tmp_path / "serial")


def two_class_experiment(folder: Path) -> dict[str, Any]:
    """Two classes at four clients, measured by a metric that is no mean."""
    draws = np.random.default_rng(0)
    np.savez(folder / "two.npz", x=draws.normal(size=(200, 4)).astype(np.float32), y=np.arange(200) % 2)
    return {
        **SMALL,
        "data": {"source": "npz", "path": str(folder / "two.npz"), "partition": {"name": "iid", "clients": 4}},
        "task": {"model": "mlp", "args": {"features": 4}, "metrics": ["accuracy", "auroc"]},
    }


def measurements(folder: Path, table: str = "clients") -> list[dict[str, Any]]:
    return [row for row in Result.read(folder).rows(table) if row["metric"] == "auroc"]


def left(folder: Path, site: int) -> list[dict[str, Any]]:
    """What left a site with its answers, by its audit log."""
    lines = (folder / f"state-{site}" / "audit.jsonl").read_text().splitlines()
    return [found["left"] for line in lines if (found := json.loads(line))["event"] == "answered"]


def test_a_metric_that_is_no_mean_leaves_as_one_number_with_the_bits_of_a_simulation(tmp_path: Path) -> None:
    values = two_class_experiment(tmp_path)
    run = InProcessRun(tmp_path / "net", values, {}, {})  # their policies name the metrics
    run.run(Silent())
    serial_weights(values, tmp_path / "serial")
    assert len(measurements(tmp_path / "net")) > 8
    assert measurements(tmp_path / "net") == measurements(tmp_path / "serial")
    for one in (*left(tmp_path, 0), *left(tmp_path, 1)):
        assert not any(kind.startswith(("scores", "targets")) for kind in one["values"])
    assert measurements(tmp_path / "serial", "pooled")
    assert not measurements(tmp_path / "net", "pooled")
    found = RunData.read(tmp_path / "net")
    assert any(
        text.startswith("auroc: means over clients only. There is no value over the") for text in cautions(found)
    )
    assert not any("ATTENTION" in text for text in (*what_left(found), *run.said))


def test_scores_of_single_examples_leave_only_with_a_warning_on_every_side(tmp_path: Path) -> None:
    values, loud = two_class_experiment(tmp_path), {"example_scores": True}
    run = InProcessRun(tmp_path / "net", values, loud, loud)
    run.run(Silent())
    serial_weights(values, tmp_path / "serial")
    assert measurements(tmp_path / "net", "pooled") == measurements(tmp_path / "serial", "pooled")
    assert any("scores test" in one["values"] and "targets test" in one["values"] for one in left(tmp_path, 0))
    assert SCORES_LEAVE in run.said
    assert any(line.startswith("site-0 sends the scores and the true label of every single") for line in run.said)
    assert "SCORES AND LABELS OF SINGLE EXAMPLES" in (tmp_path / "state-0" / "audit.jsonl").read_text()
    found = RunData.read(tmp_path / "net")
    assert any(text.startswith("ATTENTION: the server saw the model's scores") for text in what_left(found))
    assert not any("There is no value over" in text for text in cautions(found))


def test_a_metric_that_policies_withhold_is_not_called_undefined(tmp_path: Path) -> None:
    values = two_class_experiment(tmp_path)
    run = InProcessRun(tmp_path / "net", values, {"metrics": "means"}, {"metrics": "means"})
    run.run(Silent())
    found = [text for text in cautions(RunData.read(tmp_path / "net")) if text.startswith("auroc")]
    assert len(found) == 1
    assert found[0].startswith("auroc is withheld by the policies of 0, 1, 2 and 1 more, ")
    assert found[0].endswith('[policy] metrics = ["loss", "accuracy", "auroc"].')
    assert "site-0 withholds auroc: its [policy] metrics must name what may leave" in run.said
    assert any(line.startswith("The policy withholds auroc. To let each leave") for line in run.said)


def test_a_site_that_allows_a_metric_counts_beside_one_that_does_not(tmp_path: Path) -> None:
    values = two_class_experiment(tmp_path)
    loud = {"metrics": ["loss", "accuracy", "auroc"], "example_scores": True}
    InProcessRun(tmp_path / "net", values, loud, {"metrics": "means"}).run(Silent())
    assert {row["client"] for row in measurements(tmp_path / "net")} == {"0", "2"}  # those of the first site
    assert not measurements(tmp_path / "net", "pooled")
    found = [text for text in cautions(RunData.read(tmp_path / "net")) if text.startswith("auroc")]
    assert found[0].startswith("auroc is withheld by the policies of 1, 3, and means over clients leave them out.")


@pytest.mark.parametrize(
    ("scores", "why"), [(torch.full((1,), float("nan")), "finite real"), (torch.ones(1, 2), "one number for each")]
)
def test_scores_that_are_no_numbers_cost_their_client_the_round_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: torch.Tensor, why: str
) -> None:
    train = AssignmentRunner.train

    def send(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        (answer,) = train(runner, assignment, one, write)
        test = answer.measured["test"]
        bad = replace(test, scores={"auroc": scores.expand(test.count, *scores.shape[1:]).contiguous()})
        return [replace(answer, measured={"test": bad}) if one.client == 3 else answer]

    monkeypatch.setattr(AssignmentRunner, "train", send)
    values = two_class_experiment(tmp_path)
    allowed = {"metrics": ["loss", "accuracy", "auroc"], "example_scores": True}
    run = InProcessRun(tmp_path / "net", values, allowed, allowed)
    assert run.run(Silent()).status == "done"
    rejected = [
        line for line in run.said if "the answer of client 3 was rejected (metrics: the scores of auroc" in line
    ]
    assert len(rejected) == 2
    assert why in rejected[0]


def test_a_run_ends_when_too_many_rounds_are_abandoned_and_continues_when_more_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = AssignmentRunner.train

    def fail_at_first(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        if assignment.round <= 2 and one.client != 0:
            raise TrainingError("out of memory")
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", fail_at_first)
    values = {**SMALL, "rounds": 3}
    with pytest.raises(QuorumError, match=r"2 of 2 rounds did not count, .* cohort.max_abandoned = 1"):
        InProcessRun(tmp_path / "net", values, {}, {}, quorum=0.5, max_abandoned=1).run(Silent())
    result = InProcessRun(tmp_path / "net", values, {}, {}, quorum=0.5, max_abandoned=2).run(Silent())
    assert (result.status, result.runs[0].abandoned) == ("degraded", 2)
    assert result.json()["runs"][0]["abandoned"] == 2


def test_a_served_run_returns_to_an_earlier_round_and_agents_have_the_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keeping = {"backend": "serial", "keep_checkpoints": 3}
    values = {**SMALL, "rounds": 4, "algorithm": {"scaffold": {}}, "run": keeping}
    expected = InProcessRun(tmp_path / "net", values, {}, {}).run(Silent()).weights_sha256
    monkeypatch.setattr(sys, "argv", ["fedloom", "rollback", str(tmp_path / "net"), "--to", "2"])

    def roll_back() -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, "".join(capsys.readouterr())

    active = InProcessRun(tmp_path / "net", values, {}, {})
    code, said = roll_back()
    assert (code, "Another process is running" in said) == (1, True)
    active.ledger.close()
    active._held.close()
    deleted = "scaffold-1: returned to round 2. Deleted results, checkpoints and updates of rounds 3 to 4."
    assert roll_back() == (0, f"{deleted}\n")
    trained: list[int] = []
    train = AssignmentRunner.train

    def watch(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        trained.append(assignment.round)
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", watch)
    assert InProcessRun(tmp_path / "net", values, {}, {}).run(Silent()).weights_sha256 == expected
    assert trained == [3] * 4 + [4] * 4


def test_a_round_in_which_no_update_counts_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def everybody_at_first(judge: Judge, work: ClientWork, reports: list[Report]) -> list[int]:
        return [report.client for report in reports if work.round == 1]

    monkeypatch.setattr(Judge, "outliers", everybody_at_first)
    result = InProcessRun(tmp_path / "net", SMALL, {}, {}).run(Silent())
    assert (result.status, result.runs[0].abandoned) == ("degraded", 1)


@pytest.mark.parametrize("over_select", [0.0, 1.0])
def test_the_ledger_calls_a_round_abandoned_that_outliers_bring_below_its_quorum(
    over_select: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_at_first(judge: Judge, work: ClientWork, reports: list[Report]) -> list[int]:
        return [report.client for report in reports[:2] if work.round == 1]

    monkeypatch.setattr(Judge, "outliers", two_at_first)
    result = InProcessRun(tmp_path / "net", SMALL, {}, {}, quorum=0.75, over_select=over_select).run(Silent())
    assert (result.status, result.runs[0].abandoned) == ("degraded", 1)
    with closing(Ledger(tmp_path / "net" / "network")) as ledger:
        assert ledger.round_counts() == {"accepted": 1, "abandoned": 1, "running": 0}


class LateRun(InProcessRun):
    """A run of two sites with two clients each, which a third one joins, while client 0 trains in round 2."""

    def __init__(self, folder: Path, values: dict[str, Any], **edits: Any) -> None:
        super().__init__(folder, values, {}, {}, **edits)
        self.everybody = [rehearsal(self.experiment, f"site-{n}", range(2 * n, 2 * n + 2)) for n in range(3)]
        self.tables = self.everybody[: 2 + any(row["late"] for row in self.ledger.clients())]
        self.refused = ""

    def join(self) -> None:
        self.tables = self.everybody
        try:
            with pytest.raises(Rejected, match=r"the run began without it\. With a token that `fedloom agents invite`"):
                self.agent(2)
            key = Signer(self.folder.parent / "state-2" / "agent.key").public
            (token,) = (Token.parse(path.read_text()) for path in invite(self.ledger, 1))
            self.ledger.enrol(token.digest, "site-2", key)
            late = self.agent(2)
            assert isinstance(self.pool, WorkingPool)
            self.pool.working = (*self.pool.working, late)
        except Rejected as error:
            self.refused = str(error)


SIX = {
    **EXPERIMENT,
    "rounds": 4,
    "data": {"source": "digits", "partition": {"name": "iid", "clients": 6}},
    "evaluate": {"every": 1, "splits": ["test"]},
}


@pytest.mark.parametrize("crash", slow_after(1, [((2, 3),), None, ((3, 5),)]))
@pytest.mark.parametrize("sampling", [{}, {"count": 3}])
def test_a_site_joins_a_run_between_two_rounds_and_no_bit_depends_on_a_crash(
    crash: tuple[int, int] | None, sampling: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, trained = AssignmentRunner.train, list[tuple[int, int]]()

    def watch(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        trained.append((assignment.round, one.client))
        if assignment.round == 2 and len(run.tables) == 2:
            run.join()
        if trained.count((assignment.round, one.client)) == 1 and crash == trained[-1]:
            raise KeyboardInterrupt
        return train(runner, assignment, one, write)

    with monkeypatch.context() as patch:
        patch.setattr(AssignmentRunner, "train", watch)
        run = LateRun(tmp_path / "net", SIX, **sampling)
        if crash in {(round, client) for round in range(5) for client in _drawn(sampling, round)}:
            with pytest.raises(KeyboardInterrupt):
                run.run(Silent())
            run = LateRun(tmp_path / "net", SIX, **sampling)
        run.run(Silent())
    assert {round: {client for when, client in trained if when == round} for round in range(1, 5)} == {
        round: set(_drawn(sampling, round)) for round in range(1, 5)
    }
    monkeypatch.setattr(Sampling, "draw", lambda self, population, round, seed: _drawn(sampling, round))
    assert weights(tmp_path / "net") == serial_weights(SIX, tmp_path / "serial")
    data = RunData.read(tmp_path / "net")
    assert data.marked_clients("fedavg", 1, "joined") == [(name, 3) for name in data.client_names[4:]]
    assert len(data.client_names) == 6
    measured = [row for row in Result.read(tmp_path / "net").rows("clients") if row["phase"] == "pre_fit"]
    counts = [len({row["client"] for row in measured if row["round"] == round}) for round in range(1, 5)]
    assert counts == [4, 4, 6, 6]
    assert any("joined the run late" in caution and "(round 3)" in caution for caution in cautions(data))


DRAW = Sampling.draw


def _drawn(sampling: dict[str, Any], round: int) -> tuple[int, ...]:
    """The clients of a round of `LateRun`."""
    return DRAW(Sampling(**sampling), 4 if round <= 2 else 6, round, 1)


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        ({"scaffold": {}}, "scaffold needs all clients from the start: the control variate"),
        ({"peer": {"topology": "ring"}}, "peer needs all clients from the start: its topology"),
    ],
)
def test_an_algorithm_that_counts_on_all_clients_lets_nobody_join_late(
    algorithm: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = AssignmentRunner.train

    def watch(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        if len(run.tables) == 2:
            run.join()
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", watch)
    run = LateRun(tmp_path / "net", {**SIX, "rounds": 2, "algorithm": algorithm})
    assert run.run(Silent()).status == "done"
    assert f"the run began without it, and {why}" in run.refused
