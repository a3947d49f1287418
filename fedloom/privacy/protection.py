"""The two halves of a protection around `Cohort.reduce`: what a client does before it sends, and what the server does.

client:  update → guarded update       (clip, add noise, encode for the ring)
between: sum over clients              (a plain sum, or a masked one)
server:  sum → means                   (decode, add noise, divide)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fedloom.errors import InputError
from fedloom.privacy.secure import aggregation
from fedloom.privacy.secure.aggregation import SecureCall, SecureSum, simulate
from fedloom.privacy.secure.ring import dtypes_of
from fedloom.privacy.table import PrivacyTable
from fedloom.tree import Groups, Tree, select

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm, Update
    from fedloom.federation.sampling import Sampling
    from fedloom.federation.work import Outcome
    from fedloom.task import Task

GROUP = "privacy"  # of what is shared and of the state: what the protection itself sends and remembers


@dataclass(frozen=True)
class ClientGuard:
    """The client's half, a value that workers and agents have."""

    table: PrivacyTable
    cohort: int  # the number of clients in the round
    weight_bound: int  # the largest weight of a client

    def bases(self, positions: Mapping[str, str], groups: Groups, shared: Groups) -> Groups:
        """Return where the groups of a guarded update start: with differential privacy they are changes already."""
        if self.table.dp is not None:
            return {}
        return {group: select(shared[base], groups[group]) for group, base in positions.items()}

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
    seed: int = 0


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
        if self.table.secure_aggregation is not None:
            aggregation.check(self.table.secure_aggregation, algorithm, self.sampling, self.population)

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
        secure = self.table.secure_aggregation is not None
        return ClientGuard(self.table, cohort, aggregation.weight_bound(algorithm, self.sampling) if secure else 1)

    def secure_sum(
        self, where: RoundOfClients, outcome: Outcome, shared: Groups, guard: ClientGuard
    ) -> tuple[Outcome, SecureSum]:
        """Simulate the masked sum of guarded updates."""
        table = self.table.secure_aggregation
        assert table is not None
        call = SecureCall.of(table, "simulation", where.round, where.call, len(where.ids), guard.weight_bound)
        bases = guard.bases(outcome.positions or {}, outcome.stack, shared)
        found = simulate(table, call, where.ids, outcome.stack, outcome.weights, bases, where.seed)
        dtypes = dtypes_of(outcome.stack)
        return replace(outcome, total=found.sums, weights=found.weights, dtypes=dtypes), found

    def release(
        self, where: RoundOfClients, means: Groups, weights: dict[str, Tensor], shared: Groups
    ) -> tuple[Groups, dict[str, Tensor]]:
        """Return what the algorithm sees: means of the groups and sums of their weights."""
        return means, weights

    def notes(self) -> dict[str, float]:
        """Return numbers for the record of the round, such as the ε spent so far."""
        return {}
