"""Carries out assignments: runs a method on a client's data, or evaluates a model, within the site's policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fedloom import faults, tree
from fedloom.algorithm import Algorithm, Update
from fedloom.errors import TrainingError
from fedloom.federation.evaluation import EvaluationWork
from fedloom.federation.work import ClientWork, Place
from fedloom.network.agent.loaded_experiment import LoadedExperiment
from fedloom.network.agent.parcel_cache import ParcelCache
from fedloom.network.agent.policy import Policy, Refused
from fedloom.network.agent.privacy_ledger import SitePrivacy
from fedloom.network.agent.questions import Questions, is_given
from fedloom.network.agent.secure_sessions import SecureSessions
from fedloom.network.agent.state_versions import StateVersions
from fedloom.network.protocol.messages import AssignedClient, Assignment, ClientAnswer, Ticket
from fedloom.task import Task
from fedloom.training.clients import always
from fedloom.tree import Groups


@dataclass(frozen=True)
class AssignmentRunner:
    """A loaded experiment, with everything that its assignments need."""

    experiment: LoadedExperiment
    policy: Policy
    parcels: ParcelCache
    states: StateVersions
    questions: Questions
    sessions: SecureSessions
    privacy: SitePrivacy | None = None  # what clients here have spent
    go_on: Callable[[], None] = always  # raises Unwanted when the coordinator has closed the round

    def evaluate(self, assignment: Assignment) -> list[ClientAnswer]:
        """Evaluate for all clients of an assignment, or fingerprint their models."""
        shared, answers = self.parcels.groups(assignment, "shared"), []
        place, algorithm = self._place(assignment, shared), self.experiment.algorithm(assignment.label)
        for one in assignment.clients:
            own = self._own(assignment, one, place.task)
            if assignment.kind == "fingerprint":
                answers.append(ClientAnswer(one.client, sha256=tree.sha256(algorithm.model(place.task, shared, own))))
            else:
                given = shared["model"] if is_given(assignment) else None
                clients, splits, round = (one.client,), assignment.splits, assignment.round
                work = EvaluationWork(algorithm, shared, _stack_of_one(own), clients, splits, round, given)
                measured = work.perform(place).get(one.client, {})
                answer = ClientAnswer(one.client, measured=measured)
                answers.append(self._withhold(answer, place.task))
        return answers

    def train(
        self, assignment: Assignment, one: AssignedClient, write: Callable[[Callable[[], None]], None]
    ) -> list[ClientAnswer]:
        """Run one method of the algorithm for one client and store its new state; `write` retries on a full disk."""
        cell, shared = _cell(assignment), self.parcels.groups(assignment, "shared")
        place = replace(self._place(assignment, shared, one), go_on=self.go_on)
        algorithm = self.experiment.algorithm(assignment.label)
        if one.ticket is not None:
            self.states.prune(cell, one.client, one.ticket, assignment.durable)
        own = self._own(assignment, one, place.task)
        peers, graph = self.parcels.peers(assignment, one)
        guard = self.sessions.guard(assignment, algorithm)
        if self.privacy is not None and guard is not None and guard.noise is not None:
            model = ", ".join(part.sha256 for part in assignment.parts)
            question = f"round {assignment.round}, call {assignment.call}, clip {guard.clip!r}, model {model}"
            name = place.federation.name(one.client)
            self.privacy.charge_share(name, cell, guard.noise, question, assignment.attempt)
        work = ClientWork(
            algorithm=algorithm,
            method=_method(algorithm, assignment.method),
            shared=shared,
            ids=(one.client,),
            own=_stack_of_one(own),
            seed=assignment.seed,
            round=assignment.round,
            call=assignment.call,
            keep="stack",
            each=self.parcels.private(assignment, one),
            peers=peers,
            graph=graph,
            measure=assignment.splits,
            watch_epochs=assignment.watch_epochs,
            max_examples=self.experiment.plan.cohort.max_examples,
            client_privacy=self.privacy.of_client(place.federation.name(one.client), cell) if self.privacy else None,
            guard=guard,
        )
        outcome = work.perform(place)
        (report,) = outcome.reports
        if report.post_fit or (assignment.watch_epochs and report.history):
            self.questions.check_measured_once(assignment, one)
        faults.point("agent.trained")
        ticket: Ticket | None = None
        if one.ticket is not None:
            ticket = (assignment.round, assignment.attempt, assignment.call)
            kept = {group: tree.row(stacked, 0) for group, stacked in outcome.own.items()}
            for name, leaves in kept.items():
                if not tree.is_sound(leaves, place.task.trainable):
                    where = f"Round {assignment.round}, client '{place.federation.name(one.client)}'"
                    raise TrainingError(
                        f"{where}: the {name} that it keeps is not finite. A smaller lr or a clip may help."
                    )
            write(lambda: self.states.save(cell, one.client, ticket, kept))
        if guard is not None and outcome.stack:
            masked = self.sessions.mask(assignment, one, guard, outcome, shared)
            return [ClientAnswer(one.client, masked, ticket)]  # nothing else leaves beside it
        update = Update(outcome.stack, outcome.weights, outcome.public)
        answer = ClientAnswer(one.client, update, ticket, report.history, report.post_fit)
        return [self._withhold(answer, place.task)]

    def _withhold(self, answer: ClientAnswer, task: Task) -> ClientAnswer:
        """Return an answer without the metrics that may not leave: none, if noise protects the rest of what leaves."""
        private = self.privacy is not None and self.privacy.is_on
        policy = self.policy.replace(metrics=()) if private else self.policy
        return policy.withhold(answer, _is_mean(task))

    def secure(self, assignment: Assignment) -> list[ClientAnswer]:
        """Answer a stage of a secure sum for all clients of an assignment."""
        return self.sessions.answer(assignment, self.experiment.algorithm(assignment.label))

    def _place(self, assignment: Assignment, shared: Groups, one: AssignedClient | None = None) -> Place:
        """Return where the assignment runs, if the policy allows it for all of its clients or for one of them."""
        roles = {part.role for part in assignment.parts}
        self.policy.check_assignment(assignment.kind, assignment.verb, assignment.cohort, roles)
        self.questions.check(assignment.model_copy(update={"clients": (one,)}) if one else assignment, shared)
        return self.experiment.place(assignment.seed, assignment.clients, assignment.population)

    def _own(self, assignment: Assignment, one: AssignedClient, task: Task) -> Groups:
        """Return a client's own state, in the version that counts."""
        if one.ticket is None:
            return {}
        initial = self.experiment.initial_own(assignment.label, assignment.seed, task)
        return self.states.load(_cell(assignment), one.client, one.ticket, initial)


def _cell(assignment: Assignment) -> str:
    return f"{assignment.label}-{assignment.seed}"


def _stack_of_one(groups: Groups) -> Groups:
    return {group: {name: leaf[None] for name, leaf in leaves.items()} for group, leaves in groups.items()}


def _is_mean(task: Task) -> dict[str, bool]:
    """Return the metrics by name, and whether each is a mean over examples."""
    return {"loss": True, **{metric.name: metric.is_mean for metric in task.measures}}


def _method(algorithm: Algorithm, name: str) -> str:
    """Check that clients may run a method: it must be one of the algorithm's own, with a public name."""
    if name.startswith("_") or name in dir(Algorithm) or not callable(getattr(type(algorithm), name, None)):
        raise Refused(f"{type(algorithm).__name__} has no method '{name}' for clients")
    return name
