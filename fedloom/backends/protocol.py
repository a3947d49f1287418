"""The protocol that every backend declares: how the server's work reaches the clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedloom import tree
from fedloom.data.federation import Federation
from fedloom.federation.work import Work
from fedloom.task import Task
from fedloom.tree import Groups

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm
    from fedloom.clock.in_flight import InFlight

Arrivals = Mapping[str, Sequence[int]]  # "joined" and "replaced": clients for which that is so since the last round
Absences = Mapping[
    int, str
]  # client → why it did not answer: "late", "gone", "refused", "failed", "revoked", "surplus"


class Backend:
    """Carries out work where the data lives. Only `run` has to be written; the rest has sensible defaults.

    A backend that is spread over machines may lose clients. Then `run` returns the results of the clients that
    answered, in their order, and raises `RoundAbandoned` when they are too few.
    """

    remote: ClassVar[bool] = False  # whether clients are on other machines, which see in which rounds they take part

    def run(self, work: Work) -> Any:
        """Perform a piece of work and return its merged result."""
        raise NotImplementedError(f"{type(self).__name__} does not define run")

    def begin(self, label: str, seed: int, checkpoints: Path) -> None:
        """Prepare for the rounds of one algorithm and seed, whose checkpoints are in this folder."""

    def begin_round(self, round: int, federation: Federation) -> tuple[Federation, Arrivals]:
        """Return the clients that a round begins with: on a network, others may have joined or been replaced."""
        return federation, {}

    def absences(self) -> Absences:
        """Return the clients of the current round that did not answer when they were asked to train, and why."""
        return {}

    def keep(self, own: Groups) -> Groups:
        """Return what represents a client's own state here: the state itself, unless clients store it themselves."""
        return own

    def model_sha256(
        self, algorithm: Algorithm, task: Task, state: Groups, own: Mapping[int, Groups]
    ) -> Mapping[int, str]:
        """Fingerprint the model of every client that has an own state."""
        return {client: tree.sha256(task.whole(algorithm.model(task, state, own[client]))) for client in own}

    def leave_out(self, round: int, client: int) -> bool:
        """Leave a client out of a round that begins again, because its result was not finite; false if it cannot."""
        return False

    def fewest(self, clients: Iterable[int]) -> int:
        """Return how many updates there must be so that those of all these clients may be summed."""
        return 1

    def in_flight(self, seed: int) -> InFlight | None:
        """Return who is at work across asynchronous rounds, if clients themselves decide when they answer."""
        return None

    def rest(self) -> None:
        """Stop clients that are at work across rounds, because no round follows."""

    def close(self) -> None:
        """Release what the backend holds. Most hold nothing."""
