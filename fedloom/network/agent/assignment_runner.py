"""Carries out assignments: runs a method on a client's data, or evaluates a model, within the site's policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fedloom import faults, tree
from fedloom.algorithm import Algorithm, Update
from fedloom.compression.downlink import Downlink
from fedloom.compression.method import Method
from fedloom.compression.uplink import MEMORY
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
        self._check_unprotected(assignment)
        shared, answers = self._shared(assignment), []
        place, algorithm = self._place(assignment, shared), self.experiment.algorithm(assignment.label)
        for one in assignment.clients:
            kept = self._own(assignment, one, place.task)
            own = {group: leaves for group, leaves in kept.items() if group != MEMORY}
            if assignment.kind == "fingerprint":
                model = place.task.whole(algorithm.model(place.task, shared, own))
                answers.append(ClientAnswer(one.client, sha256=tree.sha256(model)))
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
        cell, shared = _cell(assignment), self._shared(assignment)
        place = replace(self._place(assignment, shared, one), go_on=self.go_on)
        algorithm = self.experiment.algorithm(assignment.label)
        if one.ticket is not None:
            self.states.prune(cell, one.client, one.ticket, assignment.durable)
        own = self._own(assignment, one, place.task)
        peers, graph = self.parcels.peers(assignment, one)
        guard = self.sessions.guard(assignment, algorithm)
        compress = self._compression(assignment)
        name, data = place.federation.name(one.client), self.experiment.prepared(assignment.seed).federation.fingerprint
        client_privacy = self.privacy.of_client(name, cell, data) if self.privacy else None
        if self.privacy is not None and guard is not None and guard.noise is not None:
            self.privacy.charge_share(name, cell, guard.noise, self.sessions.session_id(assignment, one))
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
            client_privacy=client_privacy,
            guard=guard,
            compress=compress,
            as_parts=guard is None,
        )
        outcome = work.perform(place)
        if self.privacy is not None and (outcome.stack or outcome.public):
            self.privacy.check_charged(name)
        if outcome.public and self.experiment.plan.privacy.hides_metrics:
            numbers = ", ".join(outcome.public)
            raise Refused(f"the run has [privacy], and nothing covers what its clients make public: {numbers}")
        (report,) = outcome.reports
        if report.post_fit or (assignment.watch_epochs and report.history):
            self.questions.check_measured_once(assignment, one)
        faults.point("agent.trained")
        ticket: Ticket | None = None
        if one.ticket is not None:
            ticket = (assignment.round, assignment.attempt, assignment.call)
            kept = {group: tree.row(stacked, 0) for group, stacked in outcome.own.items()}
            for group, leaves in kept.items():
                if not tree.is_sound(leaves, place.task.trainable):
                    where = f"Round {assignment.round}, client '{name}'"
                    raise TrainingError(
                        f"{where}: the {group} that it keeps is not finite. A smaller lr or a clip may help."
                    )
            write(lambda: self.states.save(cell, one.client, ticket, kept))
        if guard is not None:  # nothing leaves besides a masked update
            if compress is not None:
                shared = work.uplink(compress, place.task).projected(shared, outcome.positions or {})
            masked = self.sessions.mask(assignment, one, guard, outcome, shared)
            return [ClientAnswer(one.client, masked, ticket)]
        update = Update(outcome.stack, outcome.weights, outcome.public)
        answer = ClientAnswer(one.client, update, ticket, report.history, report.post_fit, parts=outcome.parts)
        return [self._withhold(answer, place.task)]

    def _shared(self, assignment: Assignment) -> Groups:
        """Return what the coordinator shared, decompressed as the run announced."""
        self.questions.check_announced(assignment)
        task, algorithm = self.experiment.prepared(assignment.seed).task, self.experiment.algorithm(assignment.label)
        link = Downlink.of(self.experiment.plan.compress, algorithm, task)
        return self.parcels.shared(assignment, link, task.frozen_sha256)

    def _compression(self, assignment: Assignment) -> Method | None:
        """Return how the answer is compressed."""
        up = self.experiment.plan.compress.up
        if assignment.compressed and up is None:
            raise Refused("the coordinator asks for a compressed answer, and the run announced no [compress] up")
        return up if assignment.compressed else None

    def _check_unprotected(self, assignment: Assignment) -> None:
        """Raise `Refused` if an answer that no mask and no noise covers must not leave."""
        what = "fingerprints of models" if assignment.kind == "fingerprint" else "metrics"
        if self.experiment.plan.privacy.secure_aggregation is not None:
            raise Refused(f"the run announced secure aggregation, so no {what} of single clients leave this site")
        if assignment.kind == "fingerprint" and self._has_noise:
            raise Refused(f"the run announced differential privacy, and no noise covers {what}")

    @property
    def _has_noise(self) -> bool:
        """Whether noise protects what leaves."""
        return self.privacy is not None and self.privacy.is_on

    def _withhold(self, answer: ClientAnswer, task: Task) -> ClientAnswer:
        """Return an answer without the metrics that may not leave: all of them, if the run has [privacy]."""
        policy = self.policy.replace(metrics=()) if self.experiment.plan.privacy.hides_metrics else self.policy
        return policy.withhold(answer, task)

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
        return task.without_frozen(self.states.load(_cell(assignment), one.client, one.ticket, initial))


def _cell(assignment: Assignment) -> str:
    return f"{assignment.label}-{assignment.seed}"


def _stack_of_one(groups: Groups) -> Groups:
    return {group: {name: leaf[None] for name, leaf in leaves.items()} for group, leaves in groups.items()}


def _method(algorithm: Algorithm, name: str) -> str:
    """Check that clients may run a method: it must be one of the algorithm's own, with a public name."""
    if name.startswith("_") or name in dir(Algorithm) or not callable(getattr(type(algorithm), name, None)):
        raise Refused(f"{type(algorithm).__name__} has no method '{name}' for clients")
    return name
