"""What an agent does when it is asked: run a method on a client's data, or evaluate; within what the site allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedloom import faults, tree
from fedloom.algorithm import Algorithm, Update
from fedloom.errors import TrainingError
from fedloom.federation.evaluation import EvaluationWork
from fedloom.federation.work import ClientWork, Outcome, Place
from fedloom.network.agent.client_state import Versions
from fedloom.network.agent.descriptions import bare
from fedloom.network.agent.policy import Policy, Refusal
from fedloom.network.agent.preparation import Prepared
from fedloom.network.agent.tensor_cache import Parts
from fedloom.network.protocol.messages import Ask, Asked, Outgoing, Ticket
from fedloom.task import Task
from fedloom.training.evaluation import Measured
from fedloom.training.local import Groups


@dataclass(frozen=True)
class Performer:
    """An experiment that is ready, with everything that its asks need."""

    prepared: Prepared
    policy: Policy
    device: str
    parts: Parts
    versions: Versions

    def examine(self, ask: Ask) -> Outgoing:
        """What all clients of an ask answer that are to measure something."""
        place, algorithm = self._place(ask), self.prepared.algorithm(ask.label)
        shared, outgoing = self.parts.groups(ask, "shared"), Outgoing(ask.id)
        for one in ask.clients:
            own = self._own(ask, one, place.task)
            if ask.kind == "fingerprint":
                outgoing.add(one.client, sha256=tree.sha256(algorithm.model(place.task, shared, own)))
            else:
                kept = {group: {name: leaf[None] for name, leaf in leaves.items()} for group, leaves in own.items()}
                given = shared["model"] if ask.method == "given" else None
                work = EvaluationWork(algorithm, shared, kept, (one.client,), ask.splits, ask.round, given)
                measured = work.perform(place).get(one.client, {})
                outgoing.add(one.client, measured=self._may_leave(measured, place.task))
        return outgoing

    def _place(self, ask: Ask) -> Place:
        """Where an ask is carried out, if the site allows it."""
        self.policy.check_ask(ask.kind, ask.verb, ask.cohort, {part.role for part in ask.parts})
        return self.prepared.place(ask.seed, ask.clients, ask.population, self.device)

    def _own(self, ask: Ask, one: Asked, task: Task) -> Groups:
        """What a client keeps, in the version that counts."""
        if one.ticket is None:
            return {}
        initial = self.prepared.initial_own(ask.label, ask.seed, task)
        return self.versions.load(_cell(ask), one.client, one.ticket, initial)

    def train(self, ask: Ask, one: Asked, write: Callable[[Callable[[], None]], None]) -> Outgoing:
        """One client runs one method of the algorithm and keeps what it keeps; `write` is patient with a full disk."""
        place, algorithm = self._place(ask), self.prepared.algorithm(ask.label)
        if one.ticket is not None:
            self.versions.prune(_cell(ask), one.client, one.ticket, ask.durable)
        own = self._own(ask, one, place.task)
        peers, graph = self.parts.peers(ask, one)
        work = ClientWork(
            algorithm=algorithm,
            method=_method(algorithm, ask.method),
            shared=self.parts.groups(ask, "shared"),
            ids=(one.client,),
            own={group: {name: leaf[None] for name, leaf in leaves.items()} for group, leaves in own.items()},
            seed=ask.seed,
            round=ask.round,
            call=ask.call,
            keep="stack",
            each=self.parts.private(ask, one),
            peers=peers,
            graph=graph,
            measure=ask.splits,
            watch_epochs=ask.watch_epochs,
        )
        outcome = work.perform(place)
        faults.point("agent.trained")
        ticket: Ticket | None = None
        if one.ticket is not None:
            ticket = (ask.round, ask.attempt, ask.call)
            kept = {group: tree.row(stacked, 0) for group, stacked in outcome.own.items()}
            for name, leaves in kept.items():
                if not tree.is_sound(leaves, place.task.trainable):
                    who = f"Round {ask.round}, client '{place.federation.name(one.client)}'"
                    raise TrainingError(f"{who}: the {name} it keeps is not finite. A smaller lr or a clip may help.")
            write(lambda: self.versions.save(_cell(ask), one.client, ticket, kept))
        return self._told(ask, one, outcome, ticket, place.task)

    def _told(self, ask: Ask, one: Asked, outcome: Outcome, ticket: Ticket | None, task: Task) -> Outgoing:
        """What leaves of an outcome."""
        (report,) = outcome.reports
        means = _means(task)
        history = tuple(
            {name: value for name, value in epoch.items() if self._may_be_told(bare(name, means), means)}
            for epoch in report.history
        )
        outgoing = Outgoing(ask.id)
        outgoing.add(
            one.client,
            update=Update(outcome.stack, outcome.weights, outcome.public),
            ticket=ticket,
            history=history,
            measured=self._may_leave(report.post_fit, task),
        )
        return outgoing

    def _may_be_told(self, metric: str, means: Mapping[str, bool]) -> bool:
        return self.policy.may_leave(metric, means.get(metric, True))

    def _may_leave(self, measured: Mapping[str, Measured], task: Task) -> dict[str, Measured]:
        """Measurements without what the policy keeps here."""
        allowed = {name for name, is_mean in _means(task).items() if self.policy.may_leave(name, is_mean)}
        told = {}
        for where, found in measured.items():
            sums = {name: value if name in allowed else float("nan") for name, value in found.sums.items()}
            scores = {name: value for name, value in found.scores.items() if name in allowed}
            told[where] = Measured(found.count, sums, scores, found.targets if scores else None)
        return told


def _cell(ask: Ask) -> str:
    return f"{ask.label}-{ask.seed}"


def _means(task: Task) -> dict[str, bool]:
    """Metrics by name, and whether each is a mean over examples."""
    return {"loss": True, **{metric.name: metric.is_mean for metric in task.measures}}


def _method(algorithm: Algorithm, name: str) -> str:
    """A method that clients may be asked to run: one of the algorithm's own, by a public name."""
    if name.startswith("_") or name in dir(Algorithm) or not callable(getattr(type(algorithm), name, None)):
        raise Refusal(f"{type(algorithm).__name__} has no method '{name}' for clients")
    return name
