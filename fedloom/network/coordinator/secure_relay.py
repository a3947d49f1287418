"""The coordinator's part in one secure sum: it carries messages between agents, stage by stage, and learns the sum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from fedloom import faults
from fedloom.network.coordinator.agent_pool import Call, Check
from fedloom.network.protocol.expected_update import ExpectedUpdate
from fedloom.network.protocol.messages import Assignment, ClientAnswer, SecurePeer, SecureResult, SecureStage, Ticket
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.secure import MASKED, advertisement, from_hex, masked_vector, to_hex
from fedloom.network.protocol.tensors import Parcel
from fedloom.privacy.secure import shamir
from fedloom.privacy.secure.aggregation import SecureCall
from fedloom.privacy.secure.client import CIPHERTEXT
from fedloom.privacy.secure.masks import Vector, is_usable
from fedloom.privacy.secure.ring import Ring
from fedloom.privacy.secure.server import SecureServer
from fedloom.privacy.secure.session import confirmation_text, is_signed, survivors_digest, without_repeated_keys
from fedloom.tree import Groups

StageOf = Callable[[Collection[int]], SecureStage]  # what the agent of some clients receives


class Ask(Protocol):
    """Asks some clients for their part in a stage, and waits."""

    def __call__(self, stage: str, clients: Collection[int], content: StageOf, check: Check) -> Call: ...


@dataclass
class LearntSum:
    """What the coordinator learns from a secure sum, and stores: the sum itself, and whose it is."""

    total: Vector
    clients: list[int]
    tickets: list[Ticket]
    up: list[int]  # bytes, by client
    down: list[int]

    def parcel(self) -> Parcel:
        header = {name: getattr(self, name) for name in ("clients", "tickets", "up", "down")}
        return Parcel(header, {MASKED: torch.from_numpy(self.total.view(f"<i{self.total.itemsize}"))})

    @staticmethod
    def of(header: Mapping[str, list[int]], tensors: Mapping[str, torch.Tensor]) -> LearntSum:
        signed = tensors[MASKED].numpy()
        tickets = [(one[0], one[1], one[2]) for one in header["tickets"]]  # type: ignore[index]
        total = signed.view(f"<u{signed.itemsize}")
        return LearntSum(total, header["clients"], tickets, header["up"], header["down"])


@dataclass
class SecureRelay:
    """One secure sum. `keys` has the agent of each client, and the agent's public key."""

    call: SecureCall
    expected: ExpectedUpdate
    question: bytes
    clip: float | None  # with differential privacy of clients
    ticket: Ticket | None
    keys: Mapping[int, tuple[str, str]]
    ask: Ask
    name: Callable[[int], str] = str  # of a client, for messages
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = SecureServer(self.call.session, self.name)
        self.ring = Ring(self.call.config, like(self.expected))

    def run(self, clients: tuple[int, ...]) -> LearntSum:
        """Ask the clients of a round for all stages; raise `RoundAbandoned` when too few are left."""
        server = self.server
        faults.point("secure.advertise")
        self._stage("advertise", clients, lambda some: SecureStage(), self._check_keys)
        server.close_advertise(without_repeated_keys(advertisement(self._peer(one)) for one in self.calls[-1].answers))
        peers = tuple(self._peer(client) for client in sorted(server.advertised))
        faults.point("secure.share")
        self._stage("share", server.advertised, lambda some: SecureStage(peers=peers), self._check_shares)
        server.close_share({client: from_hex(self._result(client).shares) for client in self.calls[-1].answers})
        left = tuple(sorted(server.sharers))
        faults.point("secure.mask")
        self._stage(
            "mask",
            left,
            lambda some: SecureStage(
                clients=left,
                ciphertexts={str(one): to_hex(server.ciphertexts_for(one)) for one in some},
                clip=self.clip,
            ),
            self._check_masked,
        )
        masked = self.calls[-1]
        for client, answer in masked.answers.items():
            server.add_masked(client, masked_vector(answer.update))
        server.close_mask()
        survivors = tuple(sorted(server.survivors))
        faults.point("secure.confirm")
        self._stage("confirm", survivors, lambda some: SecureStage(clients=survivors), self._check_confirmed)
        server.close_confirm({one: bytes.fromhex(self._result(one).signature) for one in self.calls[-1].answers})
        signatures = to_hex(server.signatures)
        faults.point("secure.unmask")
        self._stage("unmask", server.signatures, lambda some: SecureStage(signatures=signatures), self._check_given)
        total = server.total({client: from_hex(self._result(client).shares) for client in self.calls[-1].answers})
        faults.point("secure.unmasked")
        tickets = [answer.ticket for one in survivors if (answer := masked.answers[one]).ticket is not None]
        up = [sum(call.received.get(client, 0) for call in self.calls) for client in survivors]
        return LearntSum(total, list(survivors), tickets, up, [self._received(client) for client in survivors])

    def _stage(self, stage: str, clients: Collection[int], content: StageOf, check: Check) -> None:
        self.calls.append(self.ask(stage, clients, content, check))

    def _result(self, client: int) -> SecureResult:
        found = self.calls[-1].answers[client].secure
        assert found is not None
        return found

    def _received(self, client: int) -> int:
        """Return how many bytes a client received in all stages: its share of what its agent did."""
        agent = self.keys[client][0]
        calls = [call for call in self.calls if agent in call.assignments]
        return sum(call.sent.get(agent, 0) // len(call.assignments[agent].clients) for call in calls)

    def _peer(self, client: int) -> SecurePeer:
        result, (agent, key) = self.calls[0].answers[client].secure, self.keys[client]
        assert result is not None
        keys = {"mask_key": result.mask_key, "channel_key": result.channel_key, "signature": result.signature}
        return SecurePeer(client=client, agent=agent, agent_key=key, **keys)

    # --- checks: an answer that would make honest clients refuse costs its own client the round

    def _check_keys(self, assignment: Assignment, answer: ClientAnswer) -> None:
        result = _only_secure(answer)
        try:
            agent, key = self.keys[answer.client]
            keys = {"mask_key": result.mask_key, "channel_key": result.channel_key, "signature": result.signature}
            mine = advertisement(SecurePeer(client=answer.client, agent=agent, agent_key=key, **keys))
        except ValueError:
            raise Rejected("secure", "the keys are malformed") from None
        if not is_signed(bytes.fromhex(key), mine.text(self.call.session), mine.signature):
            raise Rejected("secure", "the keys are not signed by the agent for this session")
        if not (is_usable(mine.mask_key) and is_usable(mine.channel_key)):
            raise Rejected("secure", "a key is not a valid X25519 key")

    def _check_shares(self, assignment: Assignment, answer: ClientAnswer) -> None:
        sent = from_hex(_only_secure(answer).shares)
        if set(sent) != set(self.server.graph.holders(answer.client)) - {answer.client}:
            raise Rejected("secure", "there must be a share for every holder")
        if any(len(text) != CIPHERTEXT for text in sent.values()):
            raise Rejected("secure", f"an encrypted share must have {CIPHERTEXT} bytes")

    def _check_masked(self, assignment: Assignment, answer: ClientAnswer) -> None:
        update, kind = answer.update, torch.int32 if self.ring.bits == 32 else torch.int64
        leaf = update.groups.get(MASKED, {}).get(MASKED)
        if leaf is None or len(update.groups) > 1 or len(update.groups[MASKED]) > 1 or update.public:
            raise Rejected("keys", "the update must be a masked vector and nothing else")
        if tuple(leaf.shape) != (1, self.ring.size) or leaf.dtype != kind:
            raise Rejected("shape", f"the masked vector must have {self.ring.size} numbers of {kind}")
        if answer.measured or answer.history or answer.sha256:
            raise Rejected("metrics", "nothing may be sent besides a masked update")
        if answer.ticket != self.ticket:
            raise Rejected("ticket", f"the client's state should have the version {self.ticket}, not {answer.ticket}")

    def _check_confirmed(self, assignment: Assignment, answer: ClientAnswer) -> None:
        signature = bytes.fromhex(_only_secure(answer).signature)
        digest = survivors_digest(self.server.sid, self.server.survivors, self.question)
        text = confirmation_text(answer.client, digest)
        if not is_signed(bytes.fromhex(self.keys[answer.client][1]), text, signature):
            raise Rejected("secure", "the signature is not under the set of clients in the sum")

    def _check_given(self, assignment: Assignment, answer: ClientAnswer) -> None:
        given = from_hex(_only_secure(answer).shares)
        if set(given) - self.server.sharers or any(len(share) != shamir.SHARE_BYTES for share in given.values()):
            raise Rejected("secure", "the shares are malformed")


def _only_secure(answer: ClientAnswer) -> SecureResult:
    if answer.secure is None or answer.update.groups or answer.measured or answer.history or answer.ticket:
        raise Rejected("malformed", "the answer to this stage has other parts than it needs")
    return answer.secure


def like(expected: ExpectedUpdate) -> Groups:
    """Return an update of one client with the expected form."""
    return {
        group: {name: torch.empty(shape, dtype=kind) for name, (shape, kind) in leaves.items()}
        for group, leaves in expected.groups.items()
    }
