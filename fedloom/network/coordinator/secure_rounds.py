"""Rounds whose updates are added up under masks: the coordinator asks for a sum, and stores nothing else."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from fedloom import faults
from fedloom.errors import QuorumError, RoundAbandoned
from fedloom.federation.work import ClientWork, Outcome, Report
from fedloom.files import write_atomically
from fedloom.network.coordinator.agent_pool import Call, Check
from fedloom.network.coordinator.failures import nobody_could_work, reasons_of
from fedloom.network.coordinator.ledger import AcceptedUpdate
from fedloom.network.coordinator.secure_relay import LearntSum, SecureRelay, StageOf
from fedloom.network.protocol.expected_update import ExpectedUpdate
from fedloom.network.protocol.messages import ticket_group
from fedloom.network.protocol.secure import question
from fedloom.network.protocol.tensors import Parcel, open_parcel
from fedloom.privacy.secure.aggregation import SecureCall
from fedloom.privacy.secure.ring import dtypes_of

if TYPE_CHECKING:
    from fedloom.network.coordinator.backend import NetworkBackend

SUM = -1  # stands for all clients of a secure sum in the ledger


class SecureRounds:
    """Trains clients whose updates nobody sees alone."""

    def __init__(self, backend: NetworkBackend) -> None:
        self.backend, self.pool, self.ledger = backend, backend.pool, backend.pool.ledger
        self._abandoned_in_a_row = 0

    def train(self, work: ClientWork, expected: ExpectedUpdate, shared: Parcel, digest: str) -> Outcome:
        """Let the clients compute their sum under masks. It is stored; what single clients send is not."""
        backend, cell, guard, ledger = self.backend, self.backend.cell, work.guard, self.ledger
        assert guard is not None
        table = guard.table.secure_aggregation
        assert table is not None
        public = {row["agent"]: row["key"] for row in ledger.agents()}
        hosts = {client: backend.roster.hosts[client][0] for client in work.ids}
        run = f"{self.pool.run_plan['run']}/{cell.label}/{cell.seed}"
        relay = SecureRelay(
            SecureCall.of(table, guard.ring, run, work.round, work.call, backend.attempt),
            expected,
            question(work.method, shared.sha256, guard.clip),
            guard.clip,
            (work.round, backend.attempt, work.call) if work.own else None,
            {client: (agent, public[agent]) for client, agent in hosts.items()},
            partial(self._ask, work, shared, table.needed(len(work.ids))),
            backend.roster.name,
        )
        self.pool.largest = max(self.pool.largest, 2 * relay.ring.size * 8 + (16 << 20))
        known = [one for one in ledger.accepted(cell.name, work.round, work.call, digest) if one.client == SUM]
        faults.point("coordinator.ask")
        try:
            found = LearntSum.of(*open_parcel(ledger.updates / known[0].file)) if known else relay.run(work.ids)
            for client in sorted(relay.server.wrong):
                name = backend.roster.name(client)
                words = f"{cell.label}: round {work.round}: '{name}' gave wrong shares. The sum was found without them."
                self.pool.log("rejected", words, hosts[client])
            revoked = ledger.revoked()  # perhaps while the clients worked, or before a restart
            if gone := [client for client in found.clients if hosts[client] in revoked]:
                name = backend.roster.name(gone[0])
                raise RoundAbandoned(
                    f"Round {work.round}: its sum has the update of '{name}', whose agent was revoked, and a sum under "
                    "masks cannot be taken apart."
                )
            sums, weights = relay.ring.sums(found.total.copy(), len(found.clients))
        except RoundAbandoned as error:
            self._abandon(work, relay, error)
        self._abandoned_in_a_row = 0
        if not known:
            parcel = found.parcel()
            file = f"{cell.name}-{work.round}-{work.call}-sum-{parcel.sha256[:12]}.safetensors"
            write_atomically(ledger.updates / file, parcel.whole)
            ledger.accept([AcceptedUpdate(cell.name, work.round, work.call, SUM, digest, file, parcel.sha256)])
        backend.end_attempt(work.round, len(found.clients), "accepted")
        faults.point("coordinator.aggregated")
        return Outcome(
            total=sums,
            weights=weights,
            dtypes=dtypes_of(relay.ring.like),
            positions=expected.positions,
            own=ticket_group(found.tickets) if found.tickets else {},
            reports=tuple(Report(*one) for one in zip(found.clients, found.up, found.down, strict=True)),
        )

    def _ask(
        self,
        work: ClientWork,
        shared: Parcel,
        needed: int,
        stage: str,
        clients: Collection[int],
        content: StageOf,
        check: Check,
    ) -> Call:
        """Ask some clients for their part in a stage of a secure sum."""
        backend, skip, parcels = self.backend, {*work.ids} - {*clients}, {shared.sha256: shared}
        if stage == "mask":
            assignments = backend.training_assignments(work, shared, parcels, skip)
        else:
            fields = {"kind": stage, "verb": "reduce", "round": work.round, "call": work.call}
            assignments = backend.assignments(work.ids, {}, None, skip, **fields)
        assignments = {
            agent: one.model_copy(update={"secure": content([asked.client for asked in one.clients])})
            for agent, one in assignments.items()
        }
        title = f"{backend.cell.label}: round {work.round}, {stage}"
        call = backend.ask(Call(title, assignments, parcels, check, backend.deadline()), needed)
        backend.absent |= self.pool.absences(call)
        return call

    def _abandon(self, work: ClientWork, relay: SecureRelay, error: RoundAbandoned) -> NoReturn:
        """Skip a round; end the run if all agents are gone, or if it happens again because every client fails."""
        self.backend.end_attempt(work.round, 0, "abandoned")
        self._abandoned_in_a_row += 1
        last = relay.calls[-1] if relay.calls else None  # none if the sum was stored before a restart
        reasons = reasons_of(last.failures, self.backend.roster.name) if last is not None else ""
        if reasons and last is not None and not last.answers and self._abandoned_in_a_row > 1:
            raise nobody_could_work(work.round, last.failures, self.backend.roster.name)
        if not self.pool.ready():
            raise QuorumError(f"{error} No agent is left: start the agents again, and serve the same file to continue.")
        self.pool.log("abandoned", f"{self.backend.cell.label}: round {work.round} is abandoned. {error} {reasons}")
        raise error
