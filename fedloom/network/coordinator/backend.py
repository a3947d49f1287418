"""The cohort's verbs over the network: work goes out as asks, answers come back, are checked and added up."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedloom import faults, tree
from fedloom.algorithm import Algorithm
from fedloom.backends.protocol import Backend
from fedloom.errors import FedloomError, QuorumError, RoundAbandoned, TrainingError
from fedloom.experiment.checkpoint import kept
from fedloom.federation.evaluation import EvaluationWork, ServerEvaluation
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import ClientWork, Outcome, Place, Report, Work
from fedloom.machine import computing
from fedloom.network.coordinator.calls import Call, Hub
from fedloom.network.coordinator.expected_update import Made, Template, template
from fedloom.network.coordinator.ledger import Accepted
from fedloom.network.coordinator.update_checks import Limits, Rejected, check_measured, check_update
from fedloom.network.protocol.hosted_data import Roster
from fedloom.network.protocol.messages import (
    NEW,
    TICKET,
    Ask,
    Asked,
    ClientAnswer,
    Part,
    Ticket,
    read_answer,
    ticket_group,
    ticket_of,
    verb_of,
)
from fedloom.network.protocol.tensors import Parcel, flatten, open_parcel
from fedloom.record import seconds
from fedloom.task import Task
from fedloom.training.clients import Setup
from fedloom.training.evaluation import Measured
from fedloom.training.local import Groups


@dataclass
class Cell:
    """The algorithm and seed that are being run, and the round that is going on."""

    label: str
    seed: int
    checkpoints: Path
    round: int = 0
    durable: int = 0

    @property
    def name(self) -> str:
        return f"{self.label}-{self.seed}"


class Network(Backend):
    """A backend whose clients are on other machines."""

    def __init__(
        self,
        hub: Hub,
        roster: Roster,
        holders: Mapping[int, tuple[str, int]],  # client → its agent, and its number there
        task: Task,
        sampling: Sampling,
        setup: Setup,
        made: Made,
        attempt: int,
        same_sizes: bool = True,  # whether every seed splits the data in the same way
    ) -> None:
        self.hub, self.roster, self.holders, self.task = hub, roster, dict(holders), task
        self.sampling, self.setup, self.made, self.attempt = sampling, setup, made, attempt
        self.same_sizes = same_sizes
        self.place = Place(roster, task, setup)
        self.cell = Cell("", 0, Path())
        self.questions = 0
        self._templates: dict[tuple[str, str, int], Template | None] = {}
        self._kept: Groups = {}  # what a client keeps before it first takes part

    # --- what the engine and the run call

    def begin(self, label: str, seed: int, checkpoints: Path) -> None:
        """From now on, work belongs to this cell."""
        self.cell = Cell(label, seed, checkpoints)
        self._templates.clear()
        self.task.release()

    def keep(self, own: Groups) -> Groups:
        """What stands for the clients' own states here: they stay with the clients, under a version."""
        self._kept = own
        return {TICKET: {"version": torch.tensor(NEW, dtype=torch.int64)}} if own else {}

    def run(self, work: Work) -> Any:
        if isinstance(work, ClientWork):
            return self._train(work)
        if isinstance(work, EvaluationWork):
            return self._examine(work)
        if isinstance(work, ServerEvaluation):
            with computing():
                return work.merge([work.perform(self.place)])
        raise FedloomError(f"{type(work).__name__} cannot be carried out over a network.")

    def model_sha256(
        self, algorithm: Algorithm, task: Task, state: Groups, own: Mapping[int, Groups]
    ) -> Mapping[int, str]:
        """Fingerprints of the clients' own models, made where they are."""
        ids = tuple(sorted(own))
        tickets: Groups = {TICKET: tree.stack([own[client][TICKET] for client in ids])} if ids else {}
        parts, shared = self._shared(state)
        title = f"{self.cell.label}: fingerprints of the clients' models"
        asks = self._asks("fingerprint", ids, tickets, parts, verb="evaluate", round=self.cell.round)
        call = Call(title, asks, shared, self._check_sha256, time.monotonic() + seconds(self.sampling.deadline))
        self._put(call, needed=0)
        return {client: answer.sha256 for client, answer in call.answers.items() if answer.sha256}

    # --- training: the verbs

    def _train(self, work: ClientWork) -> Outcome:
        cell = self.cell
        if work.round != cell.round:
            self._begin_round(work)
        parts, parcels = self._shared(work.shared)
        digest = self._digest(work, parts)
        known = self.hub.ledger.accepted(cell.name, work.round, work.call, digest)
        call = Call(
            f"{cell.label}: round {work.round}",
            self._training_asks(work, parts, parcels, skip={one.client for one in known}),
            parcels,
            lambda ask, answer: None,
            time.monotonic() + seconds(self.sampling.deadline),
            keep=(cell.name, work.round, work.call, digest),
            enough=self._enough(work.round),
        )
        form = self._template(work)
        limits = Limits(self.sampling.norm_bound, self.sampling.weight_cap)

        def check(ask: Ask, answer: ClientAnswer) -> None:
            check_update(answer, ask, form, work.shared, limits, bool(work.own))
            self._check_measured(ask, answer)

        call.check = check
        for update in known:
            call.answers[update.client] = self._reopen(update)
        faults.point("coordinator.ask")
        needed = max(self.sampling.needed(self.roster.clients), 1)
        self._put(call, needed)
        answered = [client for client in work.ids if client in call.answers]
        if call.enough is not None:  # the first to answer count
            first = set(list(call.answers)[: call.enough])
            answered = [client for client in answered if client in first]
        status = "accepted" if len(answered) >= needed else "abandoned"
        self.hub.ledger.end(cell.name, work.round, self.attempt, len(answered), status)
        if len(answered) < needed:
            self._abandon(work, call, len(answered), needed)
        self.hub.stage = f"{cell.label}: adding up round {work.round}"
        faults.point("coordinator.aggregate")
        outcome = replace(self._add_up(work, call, answered), positions=form.positions if form else None)
        faults.point("coordinator.aggregated")
        return outcome

    def _enough(self, round: int) -> int | None:
        """How many answers will do, if more clients than that were asked."""
        more = self.sampling.over_select and not self.sampling.is_for_everyone(round)
        return self.sampling.size(self.roster.clients) if more else None

    def _begin_round(self, work: ClientWork) -> None:
        """A new round: updates of rounds that are checkpointed are forgotten."""
        cell = self.cell
        cell.round = work.round
        cell.durable, newest = kept(cell.checkpoints)
        if newest:
            self.hub.ledger.forget(cell.name, newest)
        self.hub.ledger.begin(cell.name, work.round, self.attempt, len(work.ids))

    def _training_asks(
        self, work: ClientWork, parts: tuple[Part, ...], parcels: dict[str, Parcel], skip: set[int]
    ) -> dict[str, Ask]:
        asks = self._asks(
            "train",
            work.ids,
            work.own,
            parts,
            verb=verb_of(work),
            round=work.round,
            call=work.call,
            method=work.method,
            splits=work.measure,
            watch_epochs=work.watch_epochs,
            skip=skip,
        )
        if work.each is None and work.peers is None:
            return asks
        position = {client: number for number, client in enumerate(work.ids)}
        packed: dict[tuple[int, ...], Parcel] = {}
        for agent, ask in asks.items():
            extra: list[tuple[Any, Parcel]] = []
            mine = torch.tensor([position[one.client] for one in ask.clients])
            if work.each is not None:
                rows = {group: {name: leaf[mine] for name, leaf in t.items()} for group, t in work.each.items()}
                extra.append(("private", Parcel({}, flatten(rows))))
            clients = tuple(one.model_copy(update={"row": row}) for row, one in enumerate(ask.clients))
            if work.peers is not None and work.graph is not None:
                heard = {int(p): work.graph[int(p)].nonzero().flatten().tolist() for p in mine}
                senders = tuple(sorted({sender for heard_by in heard.values() for sender in heard_by}))
                if senders not in packed:
                    chosen = torch.tensor(senders, dtype=torch.int64)
                    rows = {group: {n: leaf[chosen] for n, leaf in t.items()} for group, t in work.peers.items()}
                    packed[senders] = Parcel({"senders": list(senders), "width": len(work.ids)}, flatten(rows))
                extra.append(("peers", packed[senders]))
                clients = tuple(
                    one.model_copy(update={"receives": tuple(heard[position[one.client]])}) for one in clients
                )
            parcels.update({parcel.sha256: parcel for _, parcel in extra})
            more = tuple(Part(role=role, sha256=parcel.sha256, bytes=parcel.size) for role, parcel in extra)
            asks[agent] = ask.model_copy(update={"parts": (*ask.parts, *more), "clients": clients})
        return asks

    def _add_up(self, work: ClientWork, call: Call, answered: list[int]) -> Outcome:
        """The answers in the cohort's order, as if nobody else had been asked: late ones change no bit."""
        answers = [call.answers[client] for client in answered]
        scored = _scored(answer.measured for answer in answers)
        tickets = [answer.ticket for answer in answers if answer.ticket is not None]
        reports = tuple(self._report(call, answer, scored) for answer in answers)
        own = ticket_group(tickets) if tickets else {}
        return work.outcome_of([answer.update for answer in answers], own, reports)

    def _report(self, call: Call, answer: ClientAnswer, scored: bool) -> Report:
        agent, _ = self.holders[answer.client]
        down, ask = 0, call.asks.get(agent)
        if ask is not None:  # what an agent has already, it was sent for a measurement: it counts where it is used
            down = max(call.sent.get(agent, 0), sum(part.bytes for part in ask.parts)) // len(ask.clients)
        up = call.received.get(answer.client, answer.bytes)
        measured = answer.measured if scored else _unscored(answer.measured)
        return Report(answer.client, up, down, answer.history, measured)

    def _abandon(self, work: ClientWork, call: Call, answered: int, needed: int) -> None:
        """Too few: either nobody can be expected any more, or the run goes on with the next round."""
        errors = [failure for failure in call.failures.values() if failure.kind == "error"]
        if call.failures and not answered and not call.waiting:
            first = (errors or list(call.failures.values()))[0]
            raise TrainingError(f"Round {work.round}: no client could do what it was asked. {first.message}")
        if not self.hub.ready():
            raise QuorumError(
                f"Round {work.round}: all agents are gone, and none came back within {self.sampling.deadline}. Nothing "
                "is lost: start the agents again, and serve the same file to go on."
            )
        self.hub.log(
            "abandoned",
            f"{self.cell.label}: round {work.round} is abandoned, because {answered} of {len(work.ids)} clients "
            f"answered and {needed} are needed",
        )
        raise RoundAbandoned(f"Round {work.round} had {answered} valid updates of {needed} that are needed.")

    # --- evaluation

    def _examine(self, work: EvaluationWork) -> dict[int, dict[str, Measured]]:
        sent = {"model": work.model} if work.model is not None else work.shared
        parts, parcels = self._shared(sent)
        method = "given" if work.model is not None else ""
        asks = self._asks(
            "evaluate",
            work.ids,
            work.own,
            parts,
            verb="evaluate",
            round=work.round,
            method=method,
            splits=work.splits,
        )
        title = f"{self.cell.label}: evaluation in round {work.round}"
        deadline = time.monotonic() + seconds(self.sampling.deadline)
        call = Call(title, asks, parcels, self._check_measured, deadline)
        self._put(call, needed=0)
        found = {client: call.answers[client].measured for client in work.ids if client in call.answers}
        scored = _scored(found.values())
        return {client: measured if scored else _unscored(measured) for client, measured in found.items()}

    # --- common to all

    def _put(self, call: Call, needed: int) -> None:
        self.hub.stage = call.title
        self.hub.ask(call)
        self.hub.wait(call, needed)

    def _shared(self, groups: Groups) -> tuple[tuple[Part, ...], dict[str, Parcel]]:
        parcel = Parcel({}, flatten(groups))
        return (Part(role="shared", sha256=parcel.sha256, bytes=parcel.size),), {parcel.sha256: parcel}

    def _asks(
        self,
        kind: Any,
        ids: tuple[int, ...],
        own: Groups,
        parts: tuple[Part, ...],
        *,
        verb: Any,
        round: int,
        call: int = 0,
        skip: set[int] | None = None,
        **more: Any,
    ) -> dict[str, Ask]:
        """One ask for every agent that hosts some of the clients."""
        self.questions += 1
        name = f"{self.cell.name}/{round}/{self.attempt}/{call}/{kind}-{self.questions}"
        clients: dict[str, list[Asked]] = {}
        for position, client in enumerate(ids):
            if not skip or client not in skip:
                agent, local = self.holders[client]
                asked = Asked(client=client, local=local, ticket=ticket_of(own, position))
                clients.setdefault(agent, []).append(asked)
        return {
            agent: Ask(
                id=name,
                kind=kind,
                verb=verb,
                label=self.cell.label,
                seed=self.cell.seed,
                round=round,
                attempt=self.attempt,
                call=call,
                cohort=len(ids),
                population=self.roster.clients,
                clients=tuple(asked),
                durable=self.cell.durable,
                parts=parts,
                **more,
            )
            for agent, asked in clients.items()
        }

    def _digest(self, work: ClientWork, parts: tuple[Part, ...]) -> str:
        """What a question is about: an answer to the same question, made before a restart, is as good as a new one."""
        tickets: list[Ticket | None] = [ticket_of(work.own, position) for position in range(len(work.ids))]
        extra = {name: groups for name, groups in (("each", work.each), ("peers", work.peers)) if groups is not None}
        leaves = {path: leaf for name, groups in extra.items() for path, leaf in flatten(groups, f"{name}/").items()}
        if work.graph is not None:
            leaves["graph"] = work.graph
        about = [work.method, work.keep, work.ids, tickets, work.measure, work.watch_epochs, parts[0].sha256]
        return hashlib.sha256(json.dumps([*about, Parcel({}, leaves).sha256]).encode()).hexdigest()

    def _reopen(self, update: Accepted) -> ClientAnswer:
        """An update that was accepted before this process began."""
        path = self.hub.ledger.updates / update.file
        _, found = read_answer(*open_parcel(path))
        return replace(found[update.client], bytes=path.stat().st_size)

    def _template(self, work: ClientWork) -> Template | None:
        width = len(work.ids) if work.graph is not None else 0
        about = (work.method, ",".join(work.shared), width)
        if about not in self._templates:
            try:
                made = template(work, self._kept, self.made.place(replace(self.task), self.setup))
            except Exception as error:  # made-up examples need not suit every model: then the first checks do
                why = f"{type(error).__name__}: {error}"
                if self.sampling.norm_bound is not None:
                    raise TrainingError(
                        "cohort.norm_bound needs to know what clients send, and their method could not be tried on "
                        f"made-up examples: {why}. Leave norm_bound out."
                    ) from error
                self.hub.log("note", f"answers are not compared with a template: {why}")
                made = None
            self._templates[about] = made
            if made is not None:
                self.hub.largest = max(self.hub.largest, 2 * made.bytes + (16 << 20))
        return self._templates[about]

    def _check_measured(self, ask: Ask, answer: ClientAnswer) -> None:
        sizes: dict[str, int] = {split: int(self.roster.held[split][answer.client]) for split in ask.splits}
        if not self.same_sizes:
            sizes = {split: answer.measured[split].count for split in answer.measured}
        means = ("loss", *(metric.name for metric in self.task.measures if metric.is_mean))
        # a call in which nothing is trained has nothing to measure
        splits = ask.splits if ask.kind == "evaluate" or answer.measured else ()
        check_measured(answer.measured, splits, sizes, means, self._summaries())

    def _summaries(self) -> tuple[str, ...]:
        """Metrics that are made of the scores of single examples."""
        return tuple(metric.name for metric in self.task.measures if metric.summary is not None)

    def _check_sha256(self, ask: Ask, answer: ClientAnswer) -> None:
        if answer.sha256 is None or len(answer.sha256) != 64:
            raise Rejected("malformed", "there is no fingerprint in the answer")


def _scored(answers: Iterable[Mapping[str, Measured]]) -> bool:
    """Whether everybody sent the scores of single examples: some are worth nothing without the others."""
    return all(found.targets is not None for measured in answers for found in measured.values() if found.count)


def _unscored(measured: Mapping[str, Measured]) -> dict[str, Measured]:
    """Measurements without the scores of single examples."""
    return {where: Measured(found.count, found.sums) for where, found in measured.items()}
