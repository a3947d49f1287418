"""The two halves of a protection around `Cohort.reduce`: what a client does before it sends, and what the server does.

client:  update → guarded update       (clip, add noise, encode for the ring)
between: sum over clients              (a plain sum, or a masked one)
server:  sum → means                   (decode, add noise, divide)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.errors import InputError
from fedloom.privacy.dp import at_client, client_level, distributed, example_level
from fedloom.privacy.dp.client_level import ClientLevel
from fedloom.privacy.dp.distributed import NoiseShare
from fedloom.privacy.dp.noise import derive
from fedloom.privacy.secure import aggregation
from fedloom.privacy.secure.aggregation import SecureCall, SecureSum, simulate
from fedloom.privacy.secure.ring import Ring, RingConfig, dtypes_of
from fedloom.privacy.table import PrivacyTable
from fedloom.tree import Groups, Tree, row, select, sha256_of_groups

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
    clip: float | None = None  # the largest norm of a change, with differential privacy of clients
    full_weight: float = 1.0  # the weight with which a change counts in full there
    noise: NoiseShare | None = None  # what clients add to their sum together

    def bases(self, positions: Mapping[str, str], groups: Groups, shared: Groups) -> Groups:
        """Return where the groups of a guarded update start: with differential privacy they are changes already."""
        if self.clip is not None:
            return {}
        return {group: select(shared[base], groups[group]) for group, base in positions.items()}

    def apply(self, update: Update, shared: Groups, task: Task) -> Update:
        """Return what clients may send instead of an update. Everything is stacked over clients."""
        if self.table.dp is not None and self.clip is not None:
            adaptive = self.table.dp.clip == "adaptive"
            clip = self.clip - self.rounding({group: row(leaves, 0) for group, leaves in update.groups.items()})
            update = client_level.bounded(update, shared, task, clip, self.full_weight, adaptive, self._unit)
        return update

    @property
    def ring(self) -> RingConfig:
        """How guarded updates become whole numbers under secure aggregation."""
        return aggregation.ring_config(self.table, self.cohort, self.weight_bound, self.noise)

    @property
    def _unit(self) -> float:
        """What a change is divided by."""
        return 1.0 if self.noise is None or self.clip is None else distributed.unit(self.clip)

    def rounding(self, like: Groups) -> float:
        """Return how much longer rounding to the numbers of the ring can make a change: it counts towards the clip."""
        if self.table.secure_aggregation is None or not any(like.values()):
            return 0.0
        longer = Ring(self.ring, like).rounding * self._unit
        if self.clip is not None and longer >= self.clip / 2:
            advice = "a smaller range" if self.noise is None else "less noise"
            raise InputError(
                f"[privacy] secure_aggregation rounds changes by up to {longer:.2g}, and dp clips them to "
                f"{self.clip:.2g}: use bits = 64 or {advice}."
            )
        return longer


def check_plan(table: PrivacyTable, sampling: Sampling, algorithms: Mapping[str, Algorithm]) -> None:
    """Raise `InputError` if a protection does not fit cohorts or an algorithm, before anything is loaded."""
    with_noisy_sums = table.dp is not None and not table.has_local_noise
    if with_noisy_sums:
        client_level.check_sampling(sampling)
    if table.has_distributed_noise:
        distributed.check_sampling(sampling)
    for label, algorithm in algorithms.items():
        if table.secure_aggregation is not None:
            aggregation.check(table.secure_aggregation, algorithm, sampling, label=label)
        if with_noisy_sums:
            aggregation.check_sums(algorithm, "dp", label)
            client_level.weight_bound(algorithm, sampling, label)
        if table.has_local_noise:
            at_client.check_local(algorithm, label)
        if table.example_dp is not None:
            example_level.check_algorithm(algorithm, label)


@dataclass(frozen=True)
class RoundOfClients:
    """What the server's half knows about one call of one round."""

    round: int
    call: int
    ids: tuple[int, ...]
    seed: int = 0
    name: Callable[[int], str] = str  # of a client


@dataclass
class Protection:
    """The server's half in one cell: an algorithm with a seed."""

    table: PrivacyTable
    sampling: Sampling
    population: int
    rounds: int
    folder: Path | None = None  # of the cell; None keeps secrets in memory only
    remote: bool = False  # whether clients are on other machines

    def __post_init__(self) -> None:
        dp = self.table.dp
        self.dp = None
        if dp is not None and not self.table.has_local_noise:
            # agents see in which rounds they take part, and the clients of a secure sum see each other
            sampled = not self.remote and self.table.secure_aggregation is None
            self.dp = ClientLevel(dp, self.sampling, self.population, self.rounds, self.folder, sampled=sampled)
            at_agents = distributed.multiplier(dp, self.rounds) if self.remote and self.dp.distributed else None
            if at_agents not in (None, self.dp.noise_multiplier):
                raise InputError(
                    f"The noise of this run is for {self.dp.planned} rounds, and agents would add noise for "
                    f"{self.rounds}. Set rounds = {self.dp.planned}, or start again with --fresh."
                )

    def check(self, algorithm: Algorithm, initial: Tree | None = None) -> None:
        """Raise `InputError` if an algorithm cannot keep what the table promises; `initial` is its task's model."""
        aggregation.check_sums(algorithm, "dp" if self.table.secure_aggregation is None else "secure_aggregation")
        if self.table.secure_aggregation is not None:
            aggregation.check(self.table.secure_aggregation, algorithm, self.sampling, self.population)
            self._check_room(self.guard(algorithm, self.sampling.size(self.population)).ring)
        if self.dp is not None:
            client_level.weight_bound(algorithm, self.sampling)
            if initial is not None:
                self.guard(algorithm, self.sampling.size(self.population)).rounding({"model": initial})

    @staticmethod
    def _check_room(ring: RingConfig) -> None:
        """Raise if whole numbers have no room for a sum of clients. With noise, that depends on the model."""
        if ring.noise is None:
            groups = ring.range if isinstance(ring.range, dict) else ["model"]
            _ = Ring(ring, {group: {} for group in groups}).scales

    def draw(self, round: int, seed: int) -> tuple[int, ...]:
        """Draw the clients of a round."""
        if self.dp is not None:
            return self.dp.draw(round)
        return self.sampling.draw(self.population, round, seed)

    @property
    def state(self) -> Tree:
        """What decides later rounds, as part of the checkpoint."""
        return {} if self.dp is None else self.dp.state

    def restore(self, state: Tree) -> None:
        """Continue with the state of a checkpoint."""
        if self.dp is not None:
            self.dp.restore(state)

    @property
    def is_spent(self) -> bool:
        """Whether another round would cost more ε than was given."""
        return self.dp is not None and self.dp.is_spent

    @property
    def releases_noise_alone(self) -> bool:
        """Whether a round without clients must look like any other."""
        return self.dp is not None and self.table.secure_aggregation is None

    def fewest(self, clients: int) -> int:
        """Return how many of a round's clients must answer for the round to count."""
        if self.table.secure_aggregation is not None:
            return self.table.secure_aggregation.needed(clients)
        return 0 if self.releases_noise_alone else 1

    def guard(self, algorithm: Algorithm, cohort: int) -> ClientGuard:
        """Return the client's half for a round of this many clients."""
        secure = self.table.secure_aggregation is not None
        bound = aggregation.weight_bound(algorithm, self.sampling) if secure and self.dp is None else 1
        if self.dp is None:
            return ClientGuard(self.table, cohort, bound)
        full_weight = client_level.weight_bound(algorithm, self.sampling)
        return ClientGuard(self.table, cohort, bound, self.dp.clip, full_weight, self._noise_share(cohort))

    def _noise_share(self, cohort: int) -> NoiseShare | None:
        if self.dp is None or not self.table.has_distributed_noise:
            return None
        return NoiseShare.of(self.table, self.dp.noise_multiplier, cohort)

    def secure_sum(
        self, where: RoundOfClients, outcome: Outcome, shared: Groups, guard: ClientGuard
    ) -> tuple[Outcome, SecureSum]:
        """Simulate the masked sum of guarded updates."""
        table = self.table.secure_aggregation
        assert table is not None
        call = SecureCall.of(table, guard.ring, "simulation", where.round, where.call)
        secret = b""
        if self.dp is not None and guard.noise is not None:  # other changes or clients never share noise
            about = (where.round, where.call, repr(where.ids), repr(guard.clip), sha256_of_groups(outcome.stack))
            secret = derive(self.dp.ledger.secret, "clients", *about)
        bases = guard.bases(outcome.positions or {}, outcome.stack, shared)
        answered = [report.client for report in outcome.reports]
        found = simulate(
            table, call, where.ids, answered, outcome.stack, outcome.weights, bases, where.seed, secret, where.name
        )
        dtypes = dtypes_of(outcome.stack)
        return replace(outcome, total=found.sums, weights=found.weights, dtypes=dtypes), found

    def release(
        self, where: RoundOfClients, total: Groups, positions: Mapping[str, str], shared: Groups, task: Task
    ) -> tuple[Groups, dict[str, Tensor]]:
        """Return what the algorithm sees of a sum of guarded updates: means of the groups and sums of their weights."""
        assert self.dp is not None, "only noisy sums are released"
        if not any(total.values()):  # clients sent nothing
            return total, {}
        groups = self.dp.release(where.round, where.call, total, positions, shared, task)
        return groups, dict.fromkeys(groups, torch.tensor(self.dp.expected, dtype=torch.float64))

    def notes(self) -> dict[str, float]:
        """Return numbers for the record of the round, such as the ε spent so far."""
        return {} if self.dp is None else self.dp.notes()

    def lines(self) -> list[str]:
        """Say what holds in this cell, before its first round."""
        if self.dp is None:
            return []
        cohort = self.sampling.size(self.population)
        share = self._noise_share(cohort)
        if share is None:
            return self.dp.lines()
        return [
            *self.dp.lines(),
            f"The noise of {share.honest} honest clients is enough. If all {cohort} stay, its deviation is "
            f"{share.excess:.3g} times as large.",
        ]
