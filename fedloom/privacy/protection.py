"""The two halves of a protection around `Cohort.reduce`: what a client does before it sends, and what the server does.

client:  update → guarded update       (clip, add noise, encode for the ring)
between: sum over clients              (a plain sum, or a masked one)
server:  sum → means                   (decode, add noise, divide)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fedloom.errors import InputError
from fedloom.privacy.table import PrivacyTable
from fedloom.tree import Groups, Tree

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm, Update
    from fedloom.federation.sampling import Sampling
    from fedloom.task import Task

GROUP = "privacy"  # of what is shared and of the state: what the protection itself sends and remembers


@dataclass(frozen=True)
class ClientGuard:
    """The client's half, a value that workers and agents have."""

    table: PrivacyTable
    cohort: int  # the number of clients in the round
    weight_bound: int  # the largest weight of a client

    def apply(self, update: Update, shared: Groups, task: Task) -> Update:
        """Return what clients may send instead of an update. Everything is stacked over clients."""
        return update


@dataclass(frozen=True)
class RoundOfClients:
    """What the server's half knows about one call of one round."""

    round: int
    call: int
    ids: tuple[int, ...]
    population: int


@dataclass
class Protection:
    """The server's half in one cell: an algorithm with a seed."""

    table: PrivacyTable
    sampling: Sampling
    population: int
    rounds: int
    folder: Path | None = None  # of the cell; None keeps secrets in memory only

    def check(self, algorithm: Algorithm) -> None:
        """Raise `InputError` if an algorithm cannot keep what the table promises."""
        if not algorithm.linear:
            raise InputError(
                f"[privacy] needs an algorithm whose server sees only sums of the clients' updates, and "
                f"{type(algorithm).__name__} shows the server each of them."
            )

    def draw(self, round: int, seed: int) -> tuple[int, ...]:
        """Draw the clients of a round."""
        return self.sampling.draw(self.population, round, seed)

    @property
    def state(self) -> Tree:
        """What decides later rounds, as part of the checkpoint."""
        return {}

    def restore(self, state: Tree) -> None:
        """Continue with the state of a checkpoint."""

    def shared(self) -> Groups:
        """Return what clients must know beside what the algorithm shares."""
        return {GROUP: self.state} if self.state else {}

    def guard(self, algorithm: Algorithm, cohort: int) -> ClientGuard:
        """Return the client's half for a round of this many clients."""
        bound = int(algorithm.largest_weight(self.sampling.max_examples or 1))
        return ClientGuard(self.table, cohort, bound)

    def secure_sum(self, where: RoundOfClients, stack: Groups) -> tuple[Groups, tuple[int, ...]]:
        """Simulate the masked sum of guarded updates; return it and the clients whose updates are in it."""
        raise NotImplementedError

    def release(
        self, where: RoundOfClients, means: Groups, weights: dict[str, Tensor], shared: Groups
    ) -> tuple[Groups, dict[str, Tensor]]:
        """Return what the algorithm sees: means of the groups and sums of their weights."""
        return means, weights

    def notes(self) -> dict[str, float]:
        """Return numbers for the record of the round, such as the ε spent so far."""
        return {}
