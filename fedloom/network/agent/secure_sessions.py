"""An agent's part in secure sums: the sessions of its clients, and the keys of other agents that it has seen.

Everything secret is in memory only. A process that ends has left its sessions.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedloom import faults
from fedloom.algorithm import Algorithm, Update
from fedloom.errors import StoreError
from fedloom.experiment.plan import Plan
from fedloom.federation.work import Outcome
from fedloom.files import write_atomically
from fedloom.network.agent.policy import Policy, Refused
from fedloom.network.protocol.messages import AssignedClient, Assignment, ClientAnswer, SecurePeer, SecureResult
from fedloom.network.protocol.secure import advertisement, from_hex, masked_update, question, to_hex
from fedloom.network.protocol.signatures import Signer
from fedloom.privacy.dp import client_level, distributed
from fedloom.privacy.dp.distributed import NoiseShare
from fedloom.privacy.protection import ClientGuard
from fedloom.privacy.secure.aggregation import SecureCall, weight_bound
from fedloom.privacy.secure.client import SecureClient
from fedloom.privacy.secure.ring import Ring
from fedloom.privacy.secure.session import Floors, Refusal
from fedloom.tree import Groups, row

Unmasked = tuple[str, int, int, int, int, str]  # label, seed, round, call, local number, question


def fingerprint(public_key: str) -> str:
    """Return the fingerprint of an agent's key, as [policy] peers lists it."""
    return hashlib.sha256(bytes.fromhex(public_key)).hexdigest()


class PinnedKeys:
    """The public keys of other agents, as they were first seen. They are not secret."""

    def __init__(self, path: Path, allowed: tuple[str, ...]) -> None:
        self.path, self.allowed = path, allowed
        try:
            self.known: dict[str, str] = json.loads(path.read_text())
        except FileNotFoundError:
            self.known = {}
        except (OSError, ValueError) as error:
            raise StoreError(f"The keys of other agents in {path} cannot be read: {error}.") from error

    def check(self, peers: Iterable[SecurePeer]) -> None:
        """Raise `Refused` if an agent has another key than before, or one that the policy does not list."""
        found = {peer.agent: peer.agent_key for peer in peers}
        for agent, key in found.items():
            if self.known.get(agent, key) != key:
                raise Refused(
                    f"the key of agent {agent} is not the one that was seen first. If its site was replaced or has a "
                    f"new key, remove its line from {self.path.name} in the state folder, and start this agent again"
                )
            if self.allowed and fingerprint(key) not in self.allowed:
                raise Refused(f"[policy] peers does not list the fingerprint of agent {agent}: {fingerprint(key)}")
        if new := found.keys() - self.known.keys():
            self.known |= {agent: found[agent] for agent in new}
            write_atomically(self.path, json.dumps(self.known, indent=1, sort_keys=True).encode())


@dataclass
class OpenSession:
    """The newest secure sum of one client."""

    key: tuple[Any, ...]  # label, seed, round, call, attempt and cohort
    call: SecureCall
    client: SecureClient
    roster: dict[int, bytes]  # filled when the others' keys arrive
    question: str = ""


@dataclass
class SecureSessions:
    """The secure sums of one run in which this agent's clients take part."""

    run: str
    plan: Plan  # its [privacy] says whether sums must be secure
    policy: Policy
    signer: Signer
    pins: PinnedKeys
    open: dict[int, OpenSession] = field(default_factory=dict)  # by client
    unmasked: set[Unmasked] = field(default_factory=set)  # sums that this agent helped to unmask
    numbers: dict[int, int] = field(default_factory=dict)  # local number → number in the run, as first seen

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Learn from the audit log which sums were unmasked, and which numbers clients have in the run."""
        for line in lines:
            if line.get("event") == "answered" and line.get("run") == self.run:
                self.unmasked.update((*one[:5], str(one[5])) for one in line.get("unmasked", ()))
                for local, number in zip(line.get("local", ()), line.get("clients", ()), strict=True):
                    self.numbers.setdefault(local, number)

    def check_numbers(self, clients: Iterable[AssignedClient]) -> None:
        """Raise `Refused` if a client here has another number than before: with several, a sum could be its own."""
        known = dict(self.numbers)
        for one in clients:
            if known.setdefault(one.local, one.client) != one.client:
                raise Refused(f"client {one.client} of the run is a client of this site that has another number in it")
        if len({*known.values()}) < len(known):
            raise Refused("two clients of this site have one number in the run")
        self.numbers = known

    # --- the stages

    def answer(self, assignment: Assignment, algorithm: Algorithm) -> list[ClientAnswer]:
        """Answer one stage for all clients of an assignment."""
        if self.plan.privacy.secure_aggregation is None or assignment.secure is None:
            raise Refused("the run announced no secure aggregation")
        self.policy.check_assignment(assignment.kind, assignment.verb, assignment.cohort, ())
        self.policy.check_privacy(self.plan.privacy, assignment.cohort)
        if not 1 <= assignment.round <= self.plan.rounds or assignment.seed not in self.plan.seeds:
            raise Refused(f"the run announced {self.plan.rounds} rounds and the seeds {list(self.plan.seeds)}")
        self.check_numbers(assignment.clients)
        stage = getattr(self, f"_{assignment.kind}")
        if assignment.kind == "share":
            own = self.signer.public  # it may have changed since an earlier run
            self.pins.check(peer for peer in assignment.secure.peers if peer.agent_key != own)
        faults.point("secure.answer")
        with _as_refused():
            return [ClientAnswer(one.client, secure=stage(assignment, one, algorithm)) for one in assignment.clients]

    def _advertise(self, assignment: Assignment, one: AssignedClient, algorithm: Algorithm) -> SecureResult:
        table = self.plan.privacy.secure_aggregation
        assert table is not None
        ring = self._guard(assignment, algorithm).ring
        run = f"{self.run}/{assignment.label}/{assignment.seed}"
        call = SecureCall.of(table, ring, run, assignment.round, assignment.call, assignment.attempt)
        fewest = max(Floors().clients, table.min_clients, self.policy.min_cohort)
        floors = Floors(fewest, max(table.threshold, self.policy.min_threshold))
        roster: dict[int, bytes] = {}
        if before := self.open.pop(one.client, None):
            before.client.erase()
        client = SecureClient(call.session, one.client, self._sign, roster, floors)
        self.open[one.client] = OpenSession(_key(assignment), call, client, roster)
        mine = client.advertise()
        keys = {"mask_key": mine.mask_key.hex(), "channel_key": mine.channel_key.hex()}
        return SecureResult(**keys, signature=mine.signature.hex())

    def guard(self, assignment: Assignment, algorithm: Algorithm) -> ClientGuard | None:
        """Return what a client does to its answer before it is masked."""
        if self.plan.privacy.secure_aggregation is None:
            return None
        self.check_numbers(assignment.clients)
        guard = self._guard(assignment, algorithm)
        if not self._must_clip:
            return guard
        clip = assignment.secure.clip if assignment.secure is not None else None
        if clip is None or not 0 < clip < math.inf:
            raise Refused(
                "the run announced differential privacy, and the coordinator asks for a change with the clip "
                f"{clip}: it must be a positive number"
            )
        return replace(guard, clip=clip, full_weight=client_level.weight_bound(algorithm, self.plan.cohort))

    def _guard(self, assignment: Assignment, algorithm: Algorithm) -> ClientGuard:
        """Return what decides the ring. Noise follows from what the run announced: the coordinator has no say in it."""
        privacy, noise = self.plan.privacy, None
        if privacy.dp is not None and privacy.has_distributed_noise:
            z = distributed.multiplier(privacy.dp, self.plan.rounds)
            noise = NoiseShare.of(privacy, z, assignment.cohort)
        bound = 1 if self._must_clip else weight_bound(algorithm, self.plan.cohort)
        return ClientGuard(privacy, assignment.cohort, bound, noise=noise)

    @property
    def _must_clip(self) -> bool:
        """Whether the sum gets noise, so that clients must bound their changes."""
        return self.plan.privacy.dp is not None and not self.plan.privacy.has_local_noise

    def _sign(self, text: bytes) -> bytes:
        return bytes.fromhex(self.signer.sign(text))

    def _share(self, assignment: Assignment, one: AssignedClient, algorithm: Algorithm) -> SecureResult:
        session, secure = self._session(assignment, one), assignment.secure
        assert secure is not None
        session.roster.update({peer.client: bytes.fromhex(peer.agent_key) for peer in secure.peers})
        if session.roster.get(one.client) != bytes.fromhex(self.signer.public):
            raise Refusal("our own key is not in the roster, or was changed")
        sent = session.client.share([advertisement(peer) for peer in secure.peers])
        return SecureResult(shares=to_hex(sent))

    def _confirm(self, assignment: Assignment, one: AssignedClient, algorithm: Algorithm) -> SecureResult:
        assert assignment.secure is not None
        signature = self._session(assignment, one).client.confirm(assignment.secure.clients)
        return SecureResult(signature=signature.hex())

    def _unmask(self, assignment: Assignment, one: AssignedClient, algorithm: Algorithm) -> SecureResult:
        assert assignment.secure is not None
        session = self._session(assignment, one)
        given = session.client.unmask(from_hex(assignment.secure.signatures))
        self.unmasked.add(self._unmasked(assignment, one, session.question))
        return SecureResult(shares=to_hex(given))

    def mask(
        self, assignment: Assignment, one: AssignedClient, guard: ClientGuard, outcome: Outcome, shared: Groups
    ) -> Update:
        """Return a trained and guarded client's update as a masked vector, or an empty one if it has no groups."""
        if outcome.public:
            raise Refused("the algorithm makes numbers of single clients public, besides a masked update")
        if not outcome.stack:  # a method that sends nothing
            return Update({}, {})
        if assignment.secure is None:
            raise Refused("the run announced secure aggregation, and the coordinator asks for an update without a mask")
        if {part.role for part in assignment.parts} != {"shared"}:
            raise Refused("a client gets other tensors than the rest, so its part in the sum could be found")
        (model,) = (part.sha256 for part in assignment.parts)
        with _as_refused():
            session = self._session(assignment, one)
            session.question = model
            if self._unmasked(assignment, one, model) in self.unmasked:
                raise Refusal(
                    f"the sum of round {assignment.round} about this model was unmasked before, and a second one over "
                    "other clients could show one of them"
                )
            groups = {group: row(stacked, 0) for group, stacked in outcome.stack.items()}
            ring = Ring(session.call.config, groups)
            weights = {group: float(weight[0]) for group, weight in outcome.weights.items()}
            bases = guard.bases(outcome.positions or {}, groups, shared)
            vector = ring.encode(groups, weights, bases, secrets.token_bytes(32))
            ciphertexts = from_hex(assignment.secure.ciphertexts.get(str(one.client), {}))
            about = question(assignment.method, model, guard.clip)
            return masked_update(session.client.mask(vector, assignment.secure.clients, ciphertexts, about))

    def session_id(self, assignment: Assignment, one: AssignedClient) -> str:
        """Return the number of a client's session, in which it masks one answer."""
        with _as_refused():
            return self._session(assignment, one).client.sid.hex()

    def _session(self, assignment: Assignment, one: AssignedClient) -> OpenSession:
        found = self.open.get(one.client)
        if found is None or found.key != _key(assignment):
            raise Refusal("this agent has no keys of the session: it was restarted, or another session began")
        return found

    def _unmasked(self, assignment: Assignment, one: AssignedClient, model: str) -> Unmasked:
        return assignment.label, assignment.seed, assignment.round, assignment.call, one.local, model

    def facts(self, assignment: Assignment) -> dict[str, Any]:
        """Return what the audit log must remember of an answer."""
        if assignment.kind != "unmask":
            return {}
        sessions = [(one, self.open[one.client].question) for one in assignment.clients if one.client in self.open]
        return {"unmasked": [self._unmasked(assignment, one, model) for one, model in sessions]}


@contextmanager
def _as_refused() -> Iterator[None]:
    """Tell the coordinator why a client leaves a session."""
    try:
        yield
    except Refusal as why:
        raise Refused(f"secure aggregation: {why}") from None


def _key(assignment: Assignment) -> tuple[Any, ...]:
    # `cohort` decides the ring and the noise, which must not change after the others agreed on it
    return assignment.label, assignment.seed, assignment.round, assignment.call, assignment.attempt, assignment.cohort
