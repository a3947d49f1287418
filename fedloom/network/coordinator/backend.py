"""The backend whose clients are on other machines: work goes out as assignments, answers come back and are summed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from fedloom import faults, tree
from fedloom.algorithm import Algorithm, Update
from fedloom.backends.protocol import Absences, Arrivals, Backend
from fedloom.compression.downlink import Downlink
from fedloom.compression.table import NO_COMPRESSION, CompressTable
from fedloom.data.federation import Federation
from fedloom.errors import FedloomError, QuorumError, RoundAbandoned
from fedloom.experiment.checkpoint import kept
from fedloom.federation.evaluation import EvaluationWork, ServerEvaluation
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import ClientWork, Outcome, Place, Report, Work
from fedloom.machine import computing
from fedloom.network.coordinator.agent_pool import AgentPool, Call, Check
from fedloom.network.coordinator.agents_in_flight import AgentsInFlight, Flight
from fedloom.network.coordinator.failures import nobody_could_work, reasons_of
from fedloom.network.coordinator.ledger import NOT_FINITE, OUTLIER, REVOKED, AcceptedUpdate
from fedloom.network.coordinator.roster import Roster
from fedloom.network.coordinator.secure_rounds import SecureRounds
from fedloom.network.coordinator.update_checks import Judge
from fedloom.network.protocol.expected_update import ExpectedUpdate
from fedloom.network.protocol.messages import (
    NEW,
    TICKET,
    AssignedClient,
    Assignment,
    ClientAnswer,
    Failure,
    ParcelInfo,
    read_answer,
    ticket_group,
    ticket_of,
    verb_of,
)
from fedloom.network.protocol.packed_parcel import pack
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.tensors import Parcel, flatten, open_parcel
from fedloom.record import seconds
from fedloom.task import Task
from fedloom.training.evaluation import Measured
from fedloom.tree import Groups

AT_A_TIME = 16  # compressed updates that are added up together


@dataclass
class CellProgress:
    """The algorithm and seed that are running, and their current round."""

    label: str
    seed: int
    checkpoints: Path
    round: int = 0
    durable: int = 0  # the round of the oldest checkpoint

    @property
    def name(self) -> str:
        return f"{self.label}-{self.seed}"


class NetworkBackend(Backend):
    """Sends work to agents, checks what comes back, and sums it in the order of the cohort.

    `same_sizes` says whether every seed splits the data in the same way; `roster_of` finds the first clients of the
    run, which may have become more.
    """

    remote = True

    def __init__(
        self,
        pool: AgentPool,
        roster: Roster,
        task: Task,
        sampling: Sampling,
        attempt: int,
        same_sizes: bool,
        roster_of: Callable[[int], Roster],
        compress: CompressTable = NO_COMPRESSION,
        hides_metrics: bool = False,
    ) -> None:
        self.pool, self.roster, self.task, self.sampling = pool, roster, task, sampling
        self.hides_metrics = hides_metrics  # whether [privacy] lets no metric leave a client
        self.attempt, self._calls, self.roster_of, self.compress = attempt, 0, roster_of, compress
        self.judge = Judge(roster, task, sampling, same_sizes)
        self.cell = CellProgress("", 0, Path())
        self.flights: AgentsInFlight | None = None  # clients at work across asynchronous rounds
        self.failing: set[int] = set()  # clients that could not do what they were asked last
        self.secure = SecureRounds(self)
        self.absent: dict[int, str] = {}  # clients that did not train in this round, and why

    # --- what the engine and the run call

    def begin(self, label: str, seed: int, checkpoints: Path) -> None:
        if self.cell.label:  # the cell before is done
            self.pool.ledger.forget_closed(self.cell.label, self.cell.seed, self.cell.checkpoints)
        self.cell, self.flights = CellProgress(label, seed, checkpoints), None
        self.judge.expected.clear()
        self.task.release()

    def begin_round(self, round: int, federation: Federation) -> tuple[Federation, Arrivals]:
        """Let agents that have joined since the last round take part from this one on."""
        self.absent = {}
        clients, before, replaced = self.pool.ledger.begin_round(self.cell.name, round)
        if clients != self.roster.clients:
            self.roster = self.judge.roster = self.roster_of(clients)
        new = [client for client, (agent, _) in self.roster.hosts.items() if agent in replaced]
        return self.roster, {"joined": range(before, clients), "replaced": new}

    def absences(self) -> Absences:
        return self.absent

    def in_flight(self, seed: int) -> AgentsInFlight:
        self.flights = AgentsInFlight(self, seed)
        return self.flights

    def rest(self) -> None:
        if self.flights is not None:
            self.flights.rest()

    def keep(self, own: Groups) -> Groups:
        """Return a version number in place of a client's state, which stays with the client."""
        self.judge.initial_own = own
        return {TICKET: {"version": torch.tensor(NEW, dtype=torch.int64)}} if own else {}

    def run(self, work: Work) -> Any:
        if isinstance(work, ClientWork):
            return self._train(work)
        if isinstance(work, EvaluationWork):
            return self._evaluate(work)
        if isinstance(work, ServerEvaluation):
            with computing():
                return work.merge([work.perform(Place(self.roster, self.task, self.roster.setup))])
        raise FedloomError(f"{type(work).__name__} cannot run over a network.")

    def model_sha256(
        self, algorithm: Algorithm, task: Task, state: Groups, own: Mapping[int, Groups]
    ) -> Mapping[int, str]:
        """Let the clients' agents fingerprint the clients' models."""
        ids = tuple(sorted(own))
        tickets: Groups = {TICKET: tree.stack([own[client][TICKET] for client in ids])} if ids else {}

        def check(assignment: Assignment, answer: ClientAnswer) -> None:
            if answer.sha256 is None or len(answer.sha256) != 64:
                raise Rejected("malformed", "the answer has no fingerprint")

        title = f"{self.cell.label}: fingerprints of the clients' models"
        call = self._evaluation(title, ids, tickets, state, check, kind="fingerprint", round=self.cell.round)
        return {client: answer.sha256 for client, answer in call.answers.items() if answer.sha256}

    # --- training: the verbs

    def _train(self, work: ClientWork) -> Outcome:
        if self.flights is not None:
            return self._add_up_arrived(work, self.flights)
        cell = self.cell
        self.begin_attempt(work.round, len(work.ids))
        shared = self.shared_parcel(work)
        parcels = {shared.sha256: shared}
        digest = self._digest(work, shared)
        if work.keep == "secure" and (expected := self.judge.expected_update(work)).groups:
            return self.secure.train(work, expected, shared, digest)
        left_out = self._left_out(work)
        accepted = self.pool.ledger.accepted(cell.name, work.round, work.call, digest)
        known = [one for one in accepted if left_out.get(one.client, OUTLIER) == OUTLIER]
        expected = self.expected_update(work)
        call = Call(
            f"{cell.label}: round {work.round}",
            self.training_assignments(work, shared, parcels, skip={*left_out, *(one.client for one in known)}),
            parcels,
            partial(self.judge.check_trained, work, expected),
            self.deadline(),
            ledger_key=(cell.name, work.round, work.call, digest),
            enough=self.sampling.enough(self.roster.clients, work.round),
            hides_metrics=self.hides_metrics,
        )
        for update in known:
            self.reopen(call, update)
        faults.point("coordinator.ask")
        needed = max(self.sampling.needed(self.roster.clients), 1)
        self.ask(call, max(needed, self.fewest(work.ids)))
        self.failing = (self.failing | call.failures.keys()) - call.answers.keys()
        counted = set(list(call.answers)[: call.enough])  # with over-selection, only the first answers count
        left_out = self._left_out(work)  # again: an agent may have been revoked while it worked
        revoked = {client: why for client, why in left_out.items() if why == REVOKED}
        self.absent |= self.pool.absences(call) | revoked
        answered = [one for one in work.ids if one in counted and left_out.get(one, OUTLIER) == OUTLIER]
        judged = self.judge.lengths(work, expected, [call.answers[client] for client in answered])
        outliers = dict.fromkeys(self.judge.outliers(work, judged), OUTLIER)
        self.pool.ledger.leave_out(cell.name, work.round, work.call, outliers)
        left_out |= outliers
        counting = [report for report in judged if report.client not in left_out]
        # without over-selection, the cohort checks whether outliers leave enough clients
        enough = len(counting if self.sampling.over_select else answered) >= needed
        needed_by_sites = self.fewest(report.client for report in counting)
        if not enough or len(counting) < needed_by_sites:
            needed = max(needed, needed_by_sites)
            self.abandon(work.round, call.failures, len(work.ids), len(counting), needed)
        self.end_attempt(work.round, len(counting), "accepted" if len(counting) >= needed else "abandoned")
        outcome = self._aggregate(work, dict.fromkeys(call.answers, call), expected, counting)
        return replace(
            outcome,
            outliers=tuple(client for client, why in left_out.items() if why == OUTLIER),
            left_out=tuple(client for client, why in left_out.items() if why == NOT_FINITE),
        )

    def _add_up_arrived(self, work: ClientWork, flights: AgentsInFlight) -> Outcome:
        """Add up answers that have arrived and started from one version. The cohort judges those of all versions."""
        left_out = self.pool.ledger.left_out(self.cell.name, self.cell.round, 0)
        calls = {client: flights.calls[Flight(work.round, client)] for client in work.ids if client not in left_out}
        expected = self.judge.expected_update(work)
        judged = self.judge.lengths(work, expected, [call.answers[client] for client, call in calls.items()])
        left = tuple(client for client in work.ids if client in left_out)
        return replace(self._aggregate(work, calls, expected, judged), left_out=left)

    def fewest(self, clients: Iterable[int]) -> int:
        return self.pool.min_cohort({self.roster.hosts[client][0] for client in clients})

    def _left_out(self, work: ClientWork) -> dict[int, str]:
        """Return the clients that this call leaves out, and why."""
        revoked, known = self.pool.ledger.revoked(), self.pool.ledger.left_out(self.cell.name, work.round, work.call)
        gone = {client: REVOKED for client in work.ids if self.roster.hosts[client][0] in revoked}
        return {client: why for client, why in known.items() if client in work.ids} | gone

    def leave_out(self, round: int, client: int) -> bool:
        """Leave a client out of a round that begins again; the answers of the others still count."""
        name = self.roster.name(client)
        why = f"its result was not finite, and the update of '{name}' is the largest"
        self.pool.log("left-out", f"{self.cell.label}: round {round} begins again without '{name}': {why}")
        self.pool.ledger.leave_out(self.cell.name, round, 0, {client: NOT_FINITE})
        if self.flights is None:  # agents answer a question about another model only in another attempt
            self.attempt = self.pool.ledger.next_attempt()
        self.cell.round, self.absent = 0, {}
        return True

    def begin_attempt(self, round: int, asked: int) -> None:
        """Begin a round, unless this is one of its later calls; delete updates of rounds that are checkpointed."""
        cell = self.cell
        if round == cell.round:
            return
        cell.round = round
        cell.durable, newest = kept(cell.checkpoints)
        if newest:
            self.pool.ledger.forget(cell.name, newest)
        self.pool.ledger.begin(cell.name, round, self.attempt, asked)

    def end_attempt(self, round: int, accepted: int, status: str) -> None:
        self.pool.ledger.end(self.cell.name, round, self.attempt, accepted, status)

    def shared_parcel(self, work: ClientWork) -> Parcel:
        """Return what all clients of a work receive, as it travels."""
        return pack(work.shared, Downlink.of(self.compress, work.algorithm, self.task), self.task.frozen_sha256)

    def expected_update(self, work: ClientWork) -> ExpectedUpdate:
        """Return what an honest answer looks like, and make room for answers of its size."""
        expected = self.judge.expected_update(work)
        self.pool.largest = max(self.pool.largest, 2 * expected.bytes + (16 << 20))
        self.pool.most_tensors = max(self.pool.most_tensors, 2 * expected.tensors)
        return expected

    def training_assignments(
        self, work: ClientWork, shared: Parcel, parcels: dict[str, Parcel], skip: Collection[int] = ()
    ) -> dict[str, Assignment]:
        """Return the assignments of a training call, and add the parcels that they need besides the shared one."""
        assignments = self.assignments(
            work.ids,
            work.own,
            shared,
            skip,
            kind="train",
            verb=verb_of(work),
            round=work.round,
            call=work.call,
            method=work.method,
            splits=work.measure,
            watch_epochs=work.watch_epochs,
            compressed=work.compress is not None,
        )
        if work.each is None and work.peers is None:
            return assignments
        position = {client: number for number, client in enumerate(work.ids)}
        sent: dict[tuple[int, ...], Parcel] = {}  # peers' trees by senders: agents with the same ones share a parcel
        for agent, assignment in assignments.items():
            mine = [position[one.client] for one in assignment.clients]
            receives: list[list[int]] = [[] for _ in mine]
            extra: dict[str, Parcel] = {}
            if work.each is not None:
                extra["private"] = Parcel({}, flatten(_rows(work.each, mine)))
            if work.peers is not None and work.graph is not None:
                receives = [work.graph[number].nonzero().flatten().tolist() for number in mine]
                senders = tuple(sorted({sender for found in receives for sender in found}))
                if senders not in sent:
                    trees = flatten(_rows(work.peers, senders))
                    sent[senders] = Parcel({"senders": list(senders), "width": len(work.ids)}, trees)
                extra["peers"] = sent[senders]
            parcels.update({parcel.sha256: parcel for parcel in extra.values()})
            clients = tuple(
                one.model_copy(update={"row": row, "receives": tuple(receives[row])})
                for row, one in enumerate(assignment.clients)
            )
            parts = (*assignment.parts, *(_parcel_info(role, parcel) for role, parcel in extra.items()))
            assignments[agent] = assignment.model_copy(update={"parts": parts, "clients": clients})
        return assignments

    def _aggregate(
        self, work: ClientWork, calls: Mapping[int, Call], expected: ExpectedUpdate, counting: Sequence[Report]
    ) -> Outcome:
        """Sum the answers in the order of the cohort: clients that do not count change no bit."""
        if not counting:
            return Outcome(positions=expected.positions)
        self.pool.stage = f"{self.cell.label}: aggregating round {self.cell.round}"
        faults.point("coordinator.aggregate")
        answers = [calls[report.client].answers[report.client] for report in counting]
        tickets = [answer.ticket for answer in answers if answer.ticket is not None]
        # an asynchronous client measures if the round in which it starts does
        measured: list[dict[str, Measured]] = [
            {split: found for split, found in one.measured.items() if split in work.measure} for one in answers
        ]
        reports = tuple(
            self._report(calls[answer.client], answer, found, judged)
            for answer, found, judged in zip(answers, measured, counting, strict=True)
        )
        own = ticket_group(tickets) if tickets else {}
        if work.compress is None or work.keep != "sum":
            outcome = work.outcome([self._whole(work, answer) for answer in answers], own, reports)
        else:
            parts = []  # whole updates take more memory than what arrived: a few at a time
            for first in range(0, len(answers), AT_A_TIME):
                some = [self._whole(work, answer) for answer in answers[first : first + AT_A_TIME]]
                parts.append(replace(work, first=first).outcome(some, {}, reports[first : first + AT_A_TIME]))
            outcome = replace(work.merge(parts), own=own)
        faults.point("coordinator.aggregated")
        return replace(outcome, positions=expected.positions)

    def _whole(self, work: ClientWork, answer: ClientAnswer) -> Update:
        """Return a client's update, decompressed and guarded."""
        expected = self.judge.expected_update(work)
        update = self.judge.decompressed(work, expected, answer).update
        if work.guard is None or work.keep != "sum":
            return update
        # the agents sent their updates without a bound
        return work.guard.apply(replace(update, positions=expected.positions), work.shared, self.task)

    def _report(self, call: Call, answer: ClientAnswer, measured: dict[str, Measured], judged: Report) -> Report:
        agent, _ = self.roster.hosts[answer.client]
        down, assignment = 0, call.assignments.get(agent)
        if assignment is not None:  # a parcel that the agent received for an evaluation counts where it trains with it
            size = sum(part.bytes for part in assignment.parts)
            down = max(call.sent.get(agent, 0), size) // len(assignment.clients)
        lengths = judged.lengths if self.flights is not None else {}  # otherwise they are judged here
        up, history = call.received[answer.client], answer.history
        return replace(judged, bytes_up=up, bytes_down=down, history=history, post_fit=measured, lengths=lengths)

    def abandon(self, round: int, failures: Mapping[int, Failure], asked: int, answered: int, needed: int) -> NoReturn:
        """Raise an error that ends the run if no client is left that could work; otherwise one that skips the round."""
        self.end_attempt(round, answered, "abandoned")
        revoked = self.pool.ledger.revoked()
        able = {client for client, (agent, _) in self.roster.hosts.items() if agent not in revoked}
        reasons = reasons_of(failures, self.roster.name)
        if reasons and able <= self.failing:
            raise nobody_could_work(round, failures, self.roster.name)
        if not self.pool.ready():
            raise QuorumError(
                f"Round {round}: all agents are gone, and none came back within {self.sampling.deadline}. Nothing is "
                "lost: start the agents again, and serve the same file to continue."
            )
        advice = f". {reasons}" if reasons else ""
        self.pool.log(
            "abandoned",
            f"{self.cell.label}: round {round} is abandoned, because {answered} of {asked} clients answered and "
            f"{needed} are needed{advice}",
        )
        raise RoundAbandoned(f"Round {round} had {answered} valid updates of {needed} that are needed.")

    # --- evaluation

    def _evaluate(self, work: EvaluationWork) -> dict[int, dict[str, Measured]]:
        if self.hides_metrics:
            return {}
        groups = {"model": work.model} if work.model is not None else work.shared
        title = f"{self.cell.label}: evaluation in round {work.round}"
        fields = {"kind": "evaluate", "round": work.round, "splits": work.splits}
        fields["method"] = "given" if work.model is not None else ""
        link = Downlink.of(self.compress, work.algorithm, self.task) if work.model is None else None
        call = self._evaluation(title, work.ids, work.own, groups, self.judge.check_evaluated, link, **fields)
        return {client: call.answers[client].measured for client in work.ids if client in call.answers}

    def _evaluation(
        self,
        title: str,
        ids: tuple[int, ...],
        own: Groups,
        groups: Groups,
        check: Check,
        link: Downlink | None = None,
        **fields: Any,
    ) -> Call:
        """Make a call whose answers are not stored, and wait for it. Agents with clients at work are not asked."""
        shared = pack(groups, link, self.task.frozen_sha256)
        busy = self.flights.busy_agents() if self.flights is not None else ()
        skip = [client for client in ids if self.roster.hosts[client][0] in busy]
        assignments = self.assignments(ids, own, shared, skip, verb="evaluate", **fields)
        return self.ask(Call(title, assignments, {shared.sha256: shared}, check, self.deadline()), needed=0)

    # --- common to all calls

    def deadline(self) -> float:
        return time.monotonic() + seconds(self.sampling.deadline)

    def ask(self, call: Call, needed: int) -> Call:
        """Wait for the answers to a call."""
        self.pool.stage = call.title
        self.pool.open(call)
        self.pool.wait(call, needed)
        return call

    def assignments(
        self, ids: tuple[int, ...], own: Groups, shared: Parcel | None, skip: Iterable[int] = (), **fields: Any
    ) -> dict[str, Assignment]:
        """Return an assignment for every agent that hosts some of the clients."""
        self._calls += 1
        cell, call, revoked = self.cell, fields.get("call", 0), self.pool.ledger.revoked()
        id = f"{cell.name}/{fields['round']}/{self.attempt}/{call}/{fields['kind']}-{self._calls}"
        clients: dict[str, list[AssignedClient]] = {}
        for position, client in enumerate(ids):
            agent, local = self.roster.hosts[client]
            if client not in skip and agent not in revoked:
                one = AssignedClient(client=client, local=local, ticket=ticket_of(own, position))
                clients.setdefault(agent, []).append(one)
        common = {
            "id": id,
            "label": cell.label,
            "seed": cell.seed,
            "attempt": self.attempt,
            "cohort": len(ids),
            "population": self.roster.clients,
            "durable": cell.durable,
            "parts": (_parcel_info("shared", shared),) if shared is not None else (),
        }
        return {agent: Assignment(**common, **fields, clients=tuple(some)) for agent, some in clients.items()}

    def _digest(self, work: ClientWork, shared: Parcel) -> str:
        """Return a hash of the question: an answer to the same one, made before a restart, counts as a new one does."""
        tickets = [ticket_of(work.own, position) for position in range(len(work.ids))]
        extra = {name: groups for name, groups in (("each", work.each), ("peers", work.peers)) if groups is not None}
        leaves = {path: leaf for name, groups in extra.items() for path, leaf in flatten(groups, f"{name}/").items()}
        if work.graph is not None:
            leaves["graph"] = work.graph
        question = [work.method, work.keep, work.ids, tickets, work.measure, work.watch_epochs, shared.sha256]
        return hashlib.sha256(json.dumps([*question, Parcel({}, leaves).sha256]).encode()).hexdigest()

    def reopen(self, call: Call, update: AcceptedUpdate) -> None:
        """Count an update that an earlier process accepted."""
        path = self.pool.ledger.updates / update.file
        _, found = read_answer(*open_parcel(path))
        answer = found[update.client]
        answer = answer.without_metrics() if self.hides_metrics else answer  # an earlier version stored them
        call.accept(answer, update.sha256, path.stat().st_size)


def _parcel_info(role: Any, parcel: Parcel) -> ParcelInfo:
    return ParcelInfo(role=role, sha256=parcel.sha256, bytes=parcel.size)


def _rows(groups: Groups, positions: Sequence[int]) -> Groups:
    index = torch.tensor(positions, dtype=torch.int64)
    return {group: tree.rows(leaves, index) for group, leaves in groups.items()}
