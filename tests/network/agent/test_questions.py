"""A coordinator that asks too much: crafted evaluations, and honest ones that are asked again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.errors import InputError
from fedloom.experiment.experiment_file import parse
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Silent
from fedloom.network.agent.agent import Agent
from fedloom.network.agent.policy import Refused
from fedloom.network.agent.questions import Questions, evaluations_needed
from fedloom.network.coordinator.agent_pool import Call
from fedloom.network.protocol.messages import AssignedClient, Assignment, ParcelInfo
from fedloom.network.protocol.tensors import Parcel, flatten
from fedloom.privacy.dp.client_level import ClientLevel
from fedloom.training.evaluation import Measured
from fedloom.tree import Groups
from tests.network.conftest import EXPERIMENT, InProcessRun, audit

# each client has 359 examples to train with, 89 or 90 to validate with, and one to test with
DATA = {**EXPERIMENT["data"], "split": [0.8, 0.198, 0.002]}
VALUES = {**EXPERIMENT, "data": DATA, "rounds": 3, "evaluate": {"splits": ["train", "validation", "test"]}}
STRICT = {
    "algorithms": ["fedavg"],
    "verbs": ["reduce", "evaluate"],
    "metrics": ["loss", "accuracy"],
    "min_cohort": 3,
    "min_examples": 50,
    "max_evaluations": 21,
}


class HostileCoordinator(InProcessRun):
    """A coordinator that asks an honest agent for whatever it likes."""

    @contextmanager
    def begun(self) -> Iterator[HostileCoordinator]:
        self._publish_plan()
        try:
            with self._connected():
                yield self
        finally:
            self.ledger.close()
            self._held.close()

    @property
    def victim(self) -> Agent:
        return self.agents[0]

    def ask(self, groups: Groups, **changes: Any) -> dict[str, Measured] | str:
        """What a client measured, or why its agent refused."""
        shared = Parcel({}, flatten(groups))
        fields = {
            "id": "ask",
            "kind": "evaluate",
            "verb": "evaluate",
            "label": "fedavg",
            "seed": 1,
            "round": 1,
            "attempt": 1,
            "cohort": 1000,
            "population": 1000,
            "clients": (AssignedClient(client=0, local=0),),
            "splits": ("train", "validation", "test"),
            "seconds": 60.0,
            "parts": (ParcelInfo(role="shared", sha256=shared.sha256, bytes=shared.size),),
        }
        assignment = Assignment(**{**fields, **changes})
        agents = {self.victim.signer.agent: assignment}
        call = Call("an attack", agents, {shared.sha256: shared}, lambda *_: None, float("inf"))
        self.pool.open(call)
        found = self.victim.parcels.next_assignment(self.victim.connection)
        assert not isinstance(found, str)
        self.victim.carry_out(found)
        if call.failures:
            return next(iter(call.failures.values())).message
        return next(iter(call.answers.values())).measured

    def crafted(self, label: int) -> Groups:
        """A model that always says the same: its accuracy is the share of that label."""
        initial = self.plan.task(1).initial()
        leaves = {name: torch.zeros_like(leaf) for name, leaf in initial.items()}
        last = [name for name, leaf in leaves.items() if leaf.shape == (10,)][-1]
        leaves[last][label] = 100.0
        return {"model": leaves}


def test_crafted_evaluations_recover_neither_label_counts_nor_the_only_test_patient(tmp_path: Path) -> None:
    with HostileCoordinator(tmp_path / "net", VALUES, STRICT).begun() as coordinator:
        hello = coordinator.victim.runner.experiment.hello  # type: ignore[union-attr]
        assert {(one.train, one.validation, one.test) for one in hello.clients} == {(359, 89, 0), (359, 90, 0)}
        first, *others = [coordinator.ask(coordinator.crafted(label)) for label in range(10)]
        assert isinstance(first, dict)
        assert (first["train"].count, first["validation"].count, first["test"].count) == (359, 90, 0)
        assert first["test"].sums == {}
        assert set(map(str, others)) == {"round 1 of fedavg asked the same of this client before, about another model"}
        # not under other names, numbers or attempts either
        (own,) = [AssignedClient(client=7, local=0)]
        for changes, why in (
            ({"clients": (own,)}, "about another model"),
            ({"method": "other", "call": 3}, "about another model"),
            ({"round": 4}, "the run announced 3 rounds"),
            ({"round": 0}, "the run announced 3 rounds"),
            ({"seed": 2}, "the run announced 3 rounds and the seeds"),
            ({"clients": (own, AssignedClient(client=8, local=0)), "round": 2}, "one client twice"),
            ({"cohort": 2, "round": 2}, "at least 3 clients"),
        ):
            assert why in str(coordinator.ask(coordinator.crafted(1), **changes)), changes
        attempts = [coordinator.ask(coordinator.crafted(label), attempt=label + 1) for label in range(10)]
        assert [isinstance(found, dict) for found in attempts] == [True] * 7 + [False] * 3
        used_up = (
            "the policy allows 21 evaluations of a client in a run ([policy] max_evaluations), and they are used up"
        )
        assert set(map(str, attempts[7:])) == {used_up}
        # a new process of the agent remembers
        again = coordinator.agent(0)
        coordinator.agents = [again]
        assert isinstance(coordinator.ask(coordinator.crafted(0)), dict)
        assert coordinator.ask(coordinator.crafted(5), attempt=20, round=3) == used_up


def test_rounds_begin_again_three_times_each_on_average_and_no_more(tmp_path: Path) -> None:
    train = {"kind": "train", "verb": "reduce", "method": "client", "splits": (), "call": 1}
    with HostileCoordinator(tmp_path / "net", VALUES, {**STRICT, "max_evaluations": 1000}).begun() as coordinator:
        # an honest coordinator may need many attempts at one round: each leaves out one more client
        attempts = [coordinator.ask(coordinator.crafted(n % 10), **train, attempt=n, round=2) for n in range(1, 8)]
        assert attempts == [{}] * 7
        assert coordinator.ask(coordinator.crafted(8), **train, attempt=7, round=2) == (
            "round 2 of fedavg asked the same of this client before, about another model"
        )
        first = [coordinator.ask(coordinator.crafted(n), attempt=n + 7) for n in range(6)]
        assert [isinstance(found, dict) for found in first] == [True] * 4 + [False] * 2
        refused = "rounds of fedavg began again with other models 9 times, and may not do so again"
        assert first[-1] == refused
        # a new process of the agent remembers; rounds that do not begin again go on
        coordinator.agents = [coordinator.agent(0)]
        assert coordinator.ask(coordinator.crafted(9), **train, attempt=20, round=2) == refused
        assert coordinator.ask(coordinator.crafted(9), **train, attempt=20, round=3) == {}


def test_the_same_question_gets_the_same_answer_again(tmp_path: Path) -> None:
    with HostileCoordinator(tmp_path / "net", VALUES, STRICT).begun() as coordinator:
        first = coordinator.ask(coordinator.crafted(3))
        assert coordinator.ask(coordinator.crafted(3)) == first
        assert coordinator.ask(coordinator.crafted(3), attempt=2) == first
        assert coordinator.victim.runner.questions.measured == {0: 3}  # type: ignore[union-attr]


def test_a_round_evaluates_the_model_that_it_trains(tmp_path: Path) -> None:
    train = {"kind": "train", "verb": "reduce", "method": "client", "splits": ()}
    with HostileCoordinator(tmp_path / "net", VALUES, STRICT).begun() as coordinator:
        coordinator.ask(coordinator.crafted(0))
        refused = "round 1 of fedavg evaluates another model than the one that is trained"
        assert coordinator.ask(coordinator.crafted(1), **train) == refused
        assert coordinator.ask(coordinator.crafted(0), **train) == {}
        assert coordinator.ask(coordinator.crafted(2), **train, round=2) == {}
        assert coordinator.ask(coordinator.crafted(0), round=2).endswith("than the one that is trained")  # type: ignore[union-attr]
        # in the last round there is one more: the model at the end
        assert isinstance(coordinator.ask(coordinator.crafted(0), round=3), dict)
        assert coordinator.ask(coordinator.crafted(0), **train, round=3) == {}
        assert isinstance(coordinator.ask(coordinator.crafted(1), round=3), dict)
        assert "about another model" in str(coordinator.ask(coordinator.crafted(2), round=3))


def test_a_client_is_measured_after_training_once_a_round_whatever_the_call(tmp_path: Path) -> None:
    train = {"kind": "train", "verb": "reduce", "method": "client", "splits": ("test", "validation")}
    with HostileCoordinator(tmp_path / "net", VALUES, {**STRICT, "max_evaluations": 1000}).begun() as coordinator:
        first = coordinator.ask(coordinator.crafted(0), **train, call=1)
        assert isinstance(first, dict)
        assert first["validation"].count == 90
        refused = "round 1 of fedavg measured this client after training before, in another call"
        assert [coordinator.ask(coordinator.crafted(n), **train, call=n) for n in range(2, 8)] == [refused] * 6
        assert coordinator.ask(coordinator.crafted(0), **train, call=1) == first
        many = coordinator.ask(coordinator.crafted(8), **train, call=8)
        assert many == "a round may have 8 calls, and this one is number 9"
        # a coordinator that starts again gets three more for each round of the run, whatever the call
        again = [coordinator.ask(coordinator.crafted(n % 10), **train, call=n % 8, attempt=n) for n in range(2, 13)]
        assert [isinstance(found, dict) for found in again] == [True] * 9 + [False] * 2
        # a new process of the agent remembers
        coordinator.agents = [coordinator.agent(0)]
        assert coordinator.ask(coordinator.crafted(8), **train, call=7, attempt=10) == refused
        assert str(coordinator.ask(coordinator.crafted(8), **train, call=7, attempt=13)).endswith("may not do so again")


def test_a_run_that_only_evaluates_asks_about_one_model_and_trains_nothing(tmp_path: Path) -> None:
    with HostileCoordinator(tmp_path / "net", {**VALUES, "rounds": 0}, STRICT).begun() as coordinator:
        train = {"kind": "train", "verb": "reduce", "method": "client", "splits": ()}
        assert coordinator.ask(coordinator.crafted(0), **train, round=0) == "the run announced no training"
        assert str(coordinator.ask(coordinator.crafted(0), round=1)).startswith("the run announced 0 rounds")
        first, second = (coordinator.ask(coordinator.crafted(label), round=0) for label in (0, 1))
        assert isinstance(first, dict)
        assert second == "round 0 of fedavg asked the same of this client before, about another model"


def test_validation_after_every_epoch_must_be_announced(tmp_path: Path) -> None:
    train = {"kind": "train", "verb": "reduce", "method": "client", "splits": ()}
    with HostileCoordinator(tmp_path / "net", VALUES, STRICT).begun() as coordinator:
        refused = coordinator.ask(coordinator.crafted(0), **train, watch_epochs=True)
        assert refused == "the run announced no evaluation after every epoch"


def test_watching_epochs_is_measuring_after_training(tmp_path: Path) -> None:
    train = {"kind": "train", "verb": "reduce", "method": "client", "splits": (), "watch_epochs": True}
    values = {**VALUES, "evaluate": {**VALUES["evaluate"], "epochs": True}}
    with HostileCoordinator(tmp_path / "net", values, STRICT).begun() as coordinator:
        assert coordinator.ask(coordinator.crafted(0), **train) == {}
        refused = "round 1 of fedavg measured this client after training before, in another call"
        assert coordinator.ask(coordinator.crafted(1), **train, call=1) == refused


def test_a_given_model_is_one_for_all_splits_and_the_next_round_trains_it(tmp_path: Path) -> None:
    given, train = {"method": "given"}, {"kind": "train", "verb": "reduce", "method": "client", "splits": ()}
    values = {**VALUES, "evaluate": {**VALUES["evaluate"], "server": ["test", "validation"]}}
    with HostileCoordinator(tmp_path / "net", values, {**STRICT, "max_evaluations": 27}).begun() as coordinator:
        assert coordinator.ask(coordinator.crafted(0), **train) == {}
        assert isinstance(coordinator.ask(coordinator.crafted(1), **given, splits=("test",)), dict)
        ends = "round 1 of fedavg evaluates another model than the one that it ends with"
        assert coordinator.ask(coordinator.crafted(2), **given, splits=("validation",)) == ends
        assert isinstance(coordinator.ask(coordinator.crafted(1), **given, splits=("validation",)), dict)
        other = "round 2 of fedavg evaluates another model than the one that is trained"
        assert coordinator.ask(coordinator.crafted(2), round=2) == other
        assert coordinator.ask(coordinator.crafted(2), **train, round=2) == other
        assert coordinator.ask(coordinator.crafted(1), **train, round=2) == {}
        # the last round ends with one model too, and rounds go forward
        assert isinstance(coordinator.ask(coordinator.crafted(4), **given, round=3, splits=("test",)), dict)
        assert isinstance(coordinator.ask(coordinator.crafted(3), round=3, splits=("test",)), dict)
        assert str(coordinator.ask(coordinator.crafted(5), round=3, splits=("test",))).endswith("that it ends with")
        over = "round 2 of fedavg is over: round 3 has begun"
        assert coordinator.ask(coordinator.crafted(6), round=2, splits=("train",)) == over


def test_a_limit_below_what_the_run_needs_is_refused_before_it_starts(tmp_path: Path) -> None:
    run = InProcessRun(tmp_path / "net", VALUES, {**STRICT, "max_evaluations": 20})
    why = "the policy allows 20 evaluations of a client in a run ([policy] max_evaluations), and this run needs 21"
    with pytest.raises(InputError, match=f"^This site does not take part: {re.escape(why)}.$"):
        run.run(Silent())
    assert f"site-0 refuses: {why}" in run.said


@pytest.mark.parametrize(
    ("rounds", "every", "needed"), [(1, 1, 3), (1, 10, 3), (10, 1, 21), (10, 10, 5), (15, 10, 7), (20, 10, 7)]
)
def test_a_run_needs_as_many_evaluations_as_it_makes(rounds: int, every: int, needed: int) -> None:
    values = {**EXPERIMENT, "rounds": rounds, "evaluate": {"splits": ["test"], "every": every}}
    assert evaluations_needed(Plan.of(parse(values))) == needed
    both = {**values, "algorithm": {"fedavg": {}, "pooled": {}}}
    assert evaluations_needed(Plan.of(parse(both))) == needed


def test_a_split_that_the_run_did_not_announce_is_not_evaluated(tmp_path: Path) -> None:
    values = {**VALUES, "evaluate": {"splits": ["test"]}}
    with HostileCoordinator(tmp_path / "net", values, {}).begun() as coordinator:
        refused = coordinator.ask(coordinator.crafted(0), splits=("validation",))
        assert refused == "the run announced no evaluation on the split 'validation'"
        refused = coordinator.ask(coordinator.crafted(0), method="given", splits=("test",))
        assert refused == "the run announced no evaluation of a global model on the split 'test'"


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavgm", "fedrep", "fsvrg", "ifca", "local", "peer", "snes"])
def test_honest_runs_are_not_refused(tmp_path: Path, algorithm: str) -> None:
    evaluate = {"splits": ["test", "validation"], "server": ["test"]}
    values = {**EXPERIMENT, "rounds": 2, "algorithm": {algorithm: {}}, "evaluate": evaluate}
    run = InProcessRun(tmp_path / "net", {**values, "train": {"lr": 0.1}}, {}, {})
    assert run.run(Silent()).status == "done"
    assert [text for text in run.said if "refuse" in text] == []
    (tmp_path / "state-0").rename(tmp_path / "site-0-state")
    needed, lines = evaluations_needed(run.plan), audit(tmp_path, 0)
    found = Questions(str(run.pool.run_plan["run"]), run.plan, None, lines)
    assert set(found.measured) == {0, 2}
    assert needed / 3 < max(found.measured.values()) <= needed


# --- turns of correlated noise


def in_turns(folder: Path) -> InProcessRun:
    """Four clients, of which two train in each round."""
    dp = {"noise_multiplier": 1.0, "clip": 1.0, "correlated": True}
    return InProcessRun(folder, {**EXPERIMENT, "privacy": {"dp": dp}}, {}, {}, count=2, max_examples=1000)


def test_clients_train_in_their_turns(tmp_path: Path) -> None:
    run = in_turns(tmp_path / "net")
    assert run.run(Silent()).status == "done"
    assert not any("refuses" in text for text in run.said)


def test_a_client_does_not_train_more_often_than_its_noise_is_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClientLevel, "draw", lambda self, round: (0, 1) if round < 4 else (2, 3))
    run = in_turns(tmp_path / "net")
    run.run(Silent())
    assert any("trained in round 1: it does not train in round 2" in text for text in run.said)
    assert not any("does not train in round 3" in text for text in run.said)
    again = in_turns(tmp_path / "net")
    again._publish_plan()
    with again._connected():  # the audit log has what was asked before
        runner = again.agents[0].runner
        assert runner is not None
        numbers = {"seed": 1, "round": 2, "attempt": 9, "cohort": 2, "population": 4}
        clients = (AssignedClient(client=0, local=0),)
        asked = Assignment(id="1", kind="train", verb="reduce", label="fedavg", clients=clients, **numbers)
        with pytest.raises(Refused, match="trained in round"):
            runner.questions._check_turns(asked)
