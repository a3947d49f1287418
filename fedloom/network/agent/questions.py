"""What a run's coordinator has asked of a site, remembered in the audit log: a client's numbers leave once a round."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedloom import tree
from fedloom.experiment.plan import Plan
from fedloom.network.agent.policy import Refused
from fedloom.network.protocol.messages import AssignedClient, Assignment
from fedloom.tree import Groups

SLACK = 2  # times what a run needs, if the policy has no limit: a coordinator that starts again repeats rounds
REPEATS = 3  # times the rounds of a cell: how often they may begin again with other models
MOST_CALLS = 8  # calls of a round

Key = tuple[Any, ...]  # cell, round, kind, call, split and client
Question = tuple[Any, ...]  # the hash of what is asked, and the version of the client's state


def is_given(assignment: Assignment) -> bool:
    """Return whether a model is to be evaluated that is not the clients' own."""
    return assignment.kind == "evaluate" and assignment.method == "given"


def question_facts(assignment: Assignment) -> dict[str, Any]:
    """Describe a question for the audit log. The same question has the same answer."""
    asked = [assignment.method, assignment.watch_epochs, sorted((part.role, part.sha256) for part in assignment.parts)]
    return {
        "kind": "evaluate given" if is_given(assignment) else assignment.kind,
        "attempt": assignment.attempt,
        "call": 0 if assignment.kind in ("evaluate", "fingerprint") else assignment.call,
        "splits": assignment.splits,
        "question": hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
        "model": next((part.sha256 for part in assignment.parts if part.role == "shared"), ""),
        "local": [one.local for one in assignment.clients],
        "tickets": [one.ticket for one in assignment.clients],
    }


def evaluations_needed(plan: Plan) -> int:
    """Return how often an honest run measures one client on one split: before and after training, and at the end."""
    evaluate = plan.evaluate
    rounds = len({1, plan.rounds, *range(evaluate.every, plan.rounds + 1, evaluate.every)}) if plan.rounds else 0
    of_cell = (2 * rounds + 1) * len(evaluate.splits) + max(rounds, 1) * len(evaluate.server or ())
    algorithms = [one for one in plan.algorithms.values() if not one.pooled]
    return len(algorithms) * len(plan.seeds) * of_cell


def check_limit(plan: Plan, most: int | None) -> None:
    """Raise `Refused` if a run needs more evaluations than the policy allows: it could not end."""
    needed = evaluations_needed(plan)
    if most is not None and most < needed:
        raise Refused(
            f"the policy allows {most} evaluations of a client in a run ([policy] max_evaluations), and this run needs "
            f"{needed}"
        )


@dataclass
class _Reached:
    """The newest round of a cell, with the hashes of its models' leaves by path."""

    attempt: int
    round: int
    start: dict[str, str]  # what the round evaluates and trains
    end: dict[str, str] = field(default_factory=dict)  # what it evaluates at its end, and the next round trains
    parcels: set[tuple[str, bool]] = field(default_factory=set)  # those found right, and whether as a given model


class Questions:
    """The questions of one run: each client answers one in each call of a round, and the same one again as before.

    A coordinator that starts again or leaves out a client may ask about other models, in a new attempt at the round.
    The agent cannot tell why it does, so it limits how often that happens in a cell: `REPEATS` times its rounds. Such
    questions count like all others.
    """

    def __init__(self, run: str, plan: Plan, most: int | None, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.run, self.plan = run, plan
        self.most = SLACK * evaluations_needed(plan) if most is None else most
        self.measured: Counter[int] = Counter()  # numbers of splits that left, by client
        self._asked: dict[Key, dict[Question, int]] = {}  # what is asked → question → attempt
        self._after_training: dict[Key, dict[Question, int]] = {}  # client in a round → question → attempt
        self._repeats: dict[Key, set[tuple[int, int]]] = {}  # client in a cell → rounds and attempts that began again
        self._reached: dict[tuple[str, int], _Reached] = {}  # by label and seed
        for line in lines:
            if line.get("event") == "answered" and line.get("run") == run and "question" in line:
                self.note(line)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Remember an answered question, as the audit log describes it."""
        for local, key, question, cost in _parts(facts, facts["measured"]):
            if self._is_new(self._asked.setdefault(key, {}), question, facts, local):
                self.measured[local] += cost
            if facts["kind"] == "train" and (facts["measured"] or facts.get("watched")):
                measured = self._after_training.setdefault(_in_round(facts, local), {})
                self._is_new(measured, (facts["call"], *question), facts, local)

    def _is_new(self, asked: dict[Question, int], question: Question, facts: Mapping[str, Any], local: int) -> bool:
        """Remember a question; return whether it is a new one."""
        if question in asked:
            return False
        if _other_attempts(asked, facts):
            self._repeats_of(facts, local).add((facts["round"], facts["attempt"]))
        asked[question] = facts["attempt"]
        return True

    def _repeats_of(self, facts: Mapping[str, Any], local: int) -> set[tuple[int, int]]:
        return self._repeats.setdefault((facts["algorithm"], facts["seed"], local), set())

    def _check_repeats(self, asked: dict[Question, int], facts: Mapping[str, Any], local: int) -> None:
        """Raise `Refused` if rounds began again too often."""
        before, most = self._repeats_of(facts, local), REPEATS * max(self.plan.rounds, 1)
        if _other_attempts(asked, facts) and len({*before, (facts["round"], facts["attempt"])}) > most:
            raise Refused(
                f"rounds of {facts['algorithm']} began again with other models {most} times, and may not do so again"
            )

    def check_announced(self, assignment: Assignment) -> None:
        """Raise `Refused` if the run announced no such round or seed. Round 0 is for runs that only evaluate."""
        rounds = self.plan.rounds
        if not min(1, rounds) <= assignment.round <= rounds or assignment.seed not in self.plan.seeds:
            raise Refused(f"the run announced {rounds} rounds and the seeds {list(self.plan.seeds)}")
        if not rounds and assignment.kind not in ("evaluate", "fingerprint"):
            raise Refused("the run announced no training")

    def check(self, assignment: Assignment, shared: Groups) -> None:
        """Raise `Refused` if this goes beyond what the run announced, asks about another model, or asks too often."""
        evaluate, last = self.plan.evaluate, 0 < self.plan.rounds == assignment.round
        self.check_announced(assignment)
        if assignment.call >= MOST_CALLS:
            raise Refused(f"a round may have {MOST_CALLS} calls, and this one is number {assignment.call + 1}")
        if assignment.watch_epochs and not evaluate.epochs:
            raise Refused("the run announced no evaluation after every epoch")
        given = is_given(assignment)
        if unknown := {*assignment.splits} - {*((evaluate.server or ()) if given else evaluate.splits)}:
            what = " of a global model" if given else ""
            raise Refused(f"the run announced no evaluation{what} on the split '{min(unknown)}'")
        if len({one.local for one in assignment.clients}) < len(assignment.clients):
            raise Refused("inconsistent request: it has one client twice")
        # the model of the last round is evaluated before training and once more at the end
        allowed = 2 if assignment.kind == "evaluate" and (last or evaluate.stop == "target") else 1
        new: Counter[int] = Counter()
        cell = {"algorithm": assignment.label, "seed": assignment.seed, "round": assignment.round}
        facts = {**cell, **question_facts(assignment)}
        for local, key, question, cost in _parts(facts, assignment.splits):
            asked = self._asked.get(key, {})
            if question in asked:
                continue
            self._check_repeats(asked, facts, local)
            if sum(attempt >= assignment.attempt for attempt in asked.values()) >= allowed:
                raise Refused(
                    f"round {assignment.round} of {assignment.label} asked the same of this client before, about "
                    "another model"
                )
            new[local] += cost
            if self.measured[local] + new[local] > self.most:
                raise Refused(
                    f"the policy allows {self.most} evaluations of a client in a run ([policy] max_evaluations), and "
                    "they are used up"
                )
        self._check_turns(assignment)
        if facts["kind"] != "fingerprint" and facts["call"] == 0:
            self._check_model(assignment, shared, at_end=allowed == 2)

    def _check_turns(self, assignment: Assignment) -> None:
        """Raise `Refused` if a client would train more often than correlated noise is made for."""
        dp = self.plan.privacy.dp
        if assignment.kind != "train" or dp is None or not dp.correlated:
            return
        turns = -(-assignment.population // self.plan.cohort.size(assignment.population))
        cell = assignment.label, assignment.seed
        for one in assignment.clients:
            trained = {key[2] for key in self._asked if (key[:2], key[3], key[-1]) == (cell, "train", one.local)}
            if near := [round for round in trained if 0 < abs(round - assignment.round) < turns]:
                raise Refused(
                    f"clients train in one of {turns} rounds, because their noise is correlated, and this one trained "
                    f"in round {near[0]}: it does not train in round {assignment.round}"
                )

    def check_measured_once(self, assignment: Assignment, one: AssignedClient) -> None:
        """Raise `Refused` if another call of this round measured this client after training."""
        only = assignment.model_copy(update={"clients": (one,)})
        facts = {"algorithm": only.label, "seed": only.seed, "round": only.round, **question_facts(only)}
        for local, _, question, _ in _parts(facts, only.splits):
            before = self._after_training.get(_in_round(facts, local), {})
            if (only.call, *question) in before:
                continue
            self._check_repeats(before, facts, local)
            if max(before.values(), default=-1) >= only.attempt:
                raise Refused(
                    f"round {only.round} of {only.label} measured this client after training before, in another call"
                )

    def _check_model(self, assignment: Assignment, shared: Groups, at_end: bool) -> None:
        """Raise `Refused` unless the model is the one that the round trains, or the one that it ends with.

        The agent cannot know which model a round ends with. So the first one counts, and the next round must train it.
        """
        reached, given = self._newest_round(assignment), is_given(assignment)
        (parcel,) = (part.sha256 for part in assignment.parts if part.role == "shared")
        if (parcel, given) in reached.parcels:
            return
        found = {f"{group}/{name}": tree.sha256({"": leaf}) for group, t in shared.items() for name, leaf in t.items()}
        ends = given or (at_end and _differ(reached.start, found))
        known = reached.end if ends else reached.start
        if _differ(known, found):
            which = "it ends with" if ends else "is trained"
            raise Refused(
                f"round {assignment.round} of {assignment.label} evaluates another model than the one that {which}"
            )
        known.update(found)
        reached.parcels.add((parcel, given))

    def _newest_round(self, assignment: Assignment) -> _Reached:
        """Return the round of this assignment; raise `Refused` if its cell has gone beyond it."""
        cell, now = (assignment.label, assignment.seed), (assignment.attempt, assignment.round)
        reached = self._reached.get(cell)
        newest = (reached.attempt, reached.round) if reached else (0, 0)
        if now < newest:
            raise Refused(f"round {assignment.round} of {assignment.label} is over: round {newest[1]} has begun")
        if reached is None or now > newest:
            follows = reached is not None and now == (newest[0], newest[1] + 1)
            reached = _Reached(*now, start=dict(reached.end) if reached and follows else {})
            self._reached[cell] = reached
        return reached


def _differ(known: Mapping[str, str], found: Mapping[str, str]) -> bool:
    return any(known.get(path, sha256) != sha256 for path, sha256 in found.items())


def _other_attempts(asked: Mapping[Question, int], facts: Mapping[str, Any]) -> bool:
    return any(attempt != facts["attempt"] for attempt in asked.values())


def _in_round(facts: Mapping[str, Any], local: int) -> Key:
    return facts["algorithm"], facts["seed"], facts["round"], local


def _parts(facts: Mapping[str, Any], measured: Collection[str]) -> Iterator[tuple[int, Key, Question, int]]:
    """List what a question asks of each client, and how many splits it measures: one thing per split, or a training."""
    if facts["kind"] == "fingerprint":
        return
    things = {"": len(measured)} if facts["kind"] == "train" else dict.fromkeys(facts["splits"], 1)
    place = facts["algorithm"], facts["seed"], facts["round"], facts["kind"], facts["call"]
    for local, ticket in zip(facts["local"], facts["tickets"], strict=True):
        for thing, cost in things.items():
            yield local, (*place, thing, local), (facts["question"], *(ticket or ())), cost
