"""What a run's coordinator has asked of a site, remembered in the audit log: a client's numbers leave once a round."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from fedloom import tree
from fedloom.experiment.plan import Plan
from fedloom.network.agent.policy import Refused
from fedloom.network.protocol.messages import Assignment
from fedloom.tree import Groups

SLACK = 10  # times what a run needs, if the policy has no limit: algorithms with several calls, repeated rounds

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
        "call": assignment.call if assignment.kind == "train" else 0,
        "splits": assignment.splits,
        "question": hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
        "model": next((part.sha256 for part in assignment.parts if part.role == "shared"), ""),
        "local": [one.local for one in assignment.clients],
        "tickets": [one.ticket for one in assignment.clients],
    }


def evaluations_needed(plan: Plan) -> int:
    """Return how often an honest run measures one client on one split: before and after training, and at the end."""
    measured = plan.rounds // plan.evaluate.every + 2
    splits = 2 * len(plan.evaluate.splits) + len(plan.evaluate.server or ())
    return len(plan.algorithms) * len(plan.seeds) * measured * splits


class Questions:
    """The questions of one run: each client answers one in each call of a round, and the same one again as before.

    A coordinator that starts again may repeat rounds with other models. Such questions count like all others.
    """

    def __init__(self, run: str, plan: Plan, most: int | None, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.run, self.plan = run, plan
        self.most = SLACK * evaluations_needed(plan) if most is None else most
        self.measured: Counter[int] = Counter()  # numbers of splits that left, by client
        self._asked: dict[Key, dict[Question, int]] = {}  # what is asked → question → attempt
        self._models: dict[str, str] = {}  # hashes of leaves of this round's model
        self._current: tuple[Any, ...] = ()  # the round that they belong to, and their parcels
        for line in lines:
            if line.get("event") == "answered" and line.get("run") == run and "question" in line:
                self.note(line)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Remember an answered question, as the audit log describes it."""
        for local, key, question, cost in _parts(facts, facts["measured"]):
            asked = self._asked.setdefault(key, {})
            if question not in asked:
                asked[question] = int(facts["attempt"])
                self.measured[local] += cost

    def check(self, assignment: Assignment, shared: Groups) -> None:
        """Raise `Refused` if this goes beyond what the run announced, asks about another model, or asks too often."""
        evaluate, last = self.plan.evaluate, assignment.round == self.plan.rounds
        if assignment.round > self.plan.rounds or assignment.seed not in self.plan.seeds:
            raise Refused(f"the run announced {self.plan.rounds} rounds and the seeds {list(self.plan.seeds)}")
        if unknown := {*assignment.splits} - {*evaluate.splits, *(evaluate.server or ())}:
            raise Refused(f"the run announced no evaluation on the split '{min(unknown)}'")
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
            if sum(attempt >= assignment.attempt for attempt in asked.values()) >= allowed:
                raise Refused(
                    f"round {assignment.round} of {assignment.label} asked the same of this client before, about "
                    "another model"
                )
            new[local] += cost
            if self.measured[local] + new[local] > self.most:
                raise Refused(f"the policy allows {self.most} evaluations of a client in a run, and they are used up")
        if facts["kind"] in ("evaluate", "train") and facts["call"] == 0:
            self._check_model(assignment, shared, at_end=allowed == 2)

    def _check_model(self, assignment: Assignment, shared: Groups, at_end: bool) -> None:
        """Raise `Refused` unless this model is the one that the round evaluated or trained before."""
        current = assignment.label, assignment.seed, assignment.round, assignment.attempt
        if self._current[:4] != current:
            self._current, self._models = current, {}
        (parcel,) = (part.sha256 for part in assignment.parts if part.role == "shared")
        if parcel in self._current[4:]:
            return
        found = {f"{group}/{name}": tree.sha256({"": leaf}) for group, t in shared.items() for name, leaf in t.items()}
        if any(self._models.get(path, sha256) != sha256 for path, sha256 in found.items()):
            if at_end:
                return
            raise Refused(
                f"round {assignment.round} of {assignment.label} evaluates another model than the one that is trained"
            )
        self._models |= found
        self._current += (parcel,)


def _parts(facts: Mapping[str, Any], measured: Collection[str]) -> Iterator[tuple[int, Key, Question, int]]:
    """List what a question asks of each client, and how many splits it measures: one thing per split, or a training."""
    if facts["kind"] == "fingerprint":
        return
    things = {"": len(measured)} if facts["kind"] == "train" else dict.fromkeys(facts["splits"], 1)
    place = facts["algorithm"], facts["seed"], facts["round"], facts["kind"], facts["call"]
    for local, ticket in zip(facts["local"], facts["tickets"], strict=True):
        for thing, cost in things.items():
            yield local, (*place, thing, local), (facts["question"], *(ticket or ())), cost
