"""One question to some clients, open until the engine closes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fedloom.network.protocol.messages import Assignment, ClientAnswer, Failure
from fedloom.network.protocol.tensors import Parcel


@dataclass
class Call:
    """Assignments to agents, and the answers that have arrived."""

    title: str  # for people: what is being done
    assignments: dict[str, Assignment]  # by agent
    parcels: dict[str, Parcel]  # by SHA-256
    check: Callable[[Assignment, ClientAnswer], None]  # raises Rejected
    deadline: float
    ledger_key: tuple[str, int, int, str] | None = None  # cell, round, call, digest of what is stored in the ledger
    waiting: dict[int, str] = field(default_factory=dict)  # client → agent
    answers: dict[int, ClientAnswer] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)  # bytes, by agent
    received: dict[int, int] = field(default_factory=dict)  # bytes, by client
    hashes: dict[int, str] = field(default_factory=dict)  # of bodies: the same body again is not a second answer
    claimed: set[int] = field(default_factory=set)  # clients whose answers are being stored
    in_memory: int = 0  # bytes of answers that are not mapped from files
    enough: int | None = None  # how many answers suffice, if more clients were asked
    open: bool = True

    def __post_init__(self) -> None:
        for agent, assignment in self.assignments.items():
            self.waiting.update({one.client: agent for one in assignment.clients})

    @property
    def complete(self) -> bool:
        """Whether enough clients have answered."""
        return not self.waiting or (self.enough is not None and len(self.answers) >= self.enough)

    def assignment(self, agent: str, id: str) -> Assignment | None:
        """Return an agent's assignment if it has this id."""
        found = self.assignments.get(agent)
        return found if found is not None and found.id == id else None

    def accept(self, client: int, answer: ClientAnswer, sha256: str, size: int) -> None:
        """Count an answer."""
        self.waiting.pop(client)
        self.answers[client], self.hashes[client], self.received[client] = answer, sha256, size
