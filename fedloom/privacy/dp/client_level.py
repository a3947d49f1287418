"""Differential privacy of clients: each one's change is bounded, and the server learns a noisy sum of them.

The mean that an algorithm sees is base + (Σ clipped changes + noise) / (q · N), with the *expected* number of clients:
the number of those who took part is a secret. Every client counts the same, or by at most its share of a bound. The
noise's deviation follows from the clip and the noise multiplier, so no setting can make it too small.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom import tree
from fedloom.aggregation.positions import refuse_undeclared
from fedloom.errors import FRESH, InputError, PrivacySpent, StoreError
from fedloom.privacy.dp import accounting, clipping, distributed, noise
from fedloom.privacy.dp.accounting import Mechanism
from fedloom.privacy.dp.clipping import COUNT
from fedloom.privacy.dp.ledger import Ledger
from fedloom.privacy.words import BOUND_WEIGHTS, called, one_place
from fedloom.tree import Groups, Tree

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm, Update
    from fedloom.federation.sampling import Sampling
    from fedloom.privacy.table import DpTable
    from fedloom.task import Task


def bounded(
    update: Update, shared: Groups, task: Task, clip: float, weight_bound: float, count: bool, unit: float = 1.0
) -> Update:
    """Return what clients contribute to the sum: clipped changes / `unit`, scaled by weight / `weight_bound`.

    Leaves that nobody trains keep their base: their change is zero. `count` adds whether each change was short enough.
    `positions` still says where a group's changes started.
    """
    if not any(update.groups.values()):
        return update  # clients send nothing, so there is nothing to bound
    refuse_undeclared("[privacy] dp", update.groups, update.positions, shared)
    changes: Groups = {}
    shares = {group: (update.weights(group) / weight_bound).clamp(0, 1).cpu() for group in update.groups}
    for group, leaves in update.groups.items():
        base = shared[update.positions[group]] if group in update.positions else None
        moved = leaves if base is None else tree.change(leaves, tree.select(base, leaves))
        _check_leaves(group, moved, base is not None, task.trainable)
        noised = [name for name, leaf in moved.items() if is_noised(name, leaf, base is not None, task.trainable)]
        kept = {**tree.zeros_like(moved), **tree.select(moved, noised)}
        changes[group] = tree.scale(kept, (shares[group] > 0).double())
    clipped, within = clipping.clip_jointly(changes, clip)
    sent = {group: tree.scale(leaves, shares[group] / unit) for group, leaves in clipped.items()}
    if count:
        sent[COUNT] = {COUNT: within.to(torch.float64) - 0.5}
    return replace(update, groups=sent, weight=torch.ones(len(within), dtype=torch.float64))


def is_noised(name: str, leaf: Tensor, position: bool, trainable: Collection[str]) -> bool:
    """Whether a leaf is part of the sum: all that is trained, and every number of a group that is not a model."""
    return leaf.is_floating_point() and (not position or name in trainable)


def with_noise(
    changes: Tree, drawn: Tree, base: Tree | None, like: Tree, task: Task, unit: float = 1.0, clients: float = 1.0
) -> Tree:
    """Return base + (change · unit + noise) / clients in the dtypes of `like`; a leaf without noise keeps its base."""
    found = {}
    for name, leaf in changes.items():
        found[name] = leaf if base is None else base[name]
        if is_noised(name, leaf, base is not None, task.trainable):
            moved = (leaf.to(torch.float64) * unit + drawn[name]) / clients
            found[name] = (moved if base is None else base[name].to(torch.float64) + moved).to(like[name].dtype)
    return found


def _check_leaves(group: str, moved: Tree, position: bool, trainable: Collection[str]) -> None:
    for name, leaf in moved.items():
        if leaf.is_complex():
            raise InputError(
                f"[privacy] dp bounds real numbers, and '{name}' is complex. Use a model with real parameters."
            )
        if is_noised(name, leaf, position, trainable):
            continue
        if not position:
            raise InputError(f"[privacy] dp bounds floating-point numbers, and '{group}' has {name} of {leaf.dtype}.")
        if leaf.is_floating_point() and bool((leaf != 0).any()):
            raise InputError(
                f"[privacy] dp cannot average '{name}', which training changes but does not learn, such as the running "
                "statistics of batch normalisation: noise would ruin them. Use nn.GroupNorm or nn.LayerNorm, or fedbn."
            )


class ClientLevel:
    """The server's half in one cell: draws cohorts, charges the ledger and adds noise."""

    def __init__(
        self,
        table: DpTable,
        sampling: Sampling,
        population: int,
        rounds: int,
        folder: Path | None = None,
        *,
        sampled: bool = True,
    ) -> None:
        """Open the cell's ledger. `sampled`: whether nobody sees who takes part, which agents on a network do."""
        check_sampling(sampling)
        self.table, self.population = table, population
        self.distributed = table.noise == "distributed"
        if self.distributed:
            distributed.check_sampling(sampling)
            sampled = False  # the clients of a secure sum see each other
        self.size = None if sampling.sampling == "poisson" else sampling.size(population)
        drawn = sampling.fraction if self.size is None else self.size / population
        self.q = drawn if sampled else 1.0
        self.expected = drawn * population
        of = population if sampled and self.size is not None else None
        if table.correlated:
            if self.size is None:
                raise InputError(
                    "[privacy] dp correlated = true lets clients take turns: give [cohort] count or fraction, without "
                    'sampling = "poisson".'
                )
            self.q, of = 1.0, None
        self.turns = -(-population // self.size) if self.size is not None else 1

        def begin() -> dict[str, float]:
            z = distributed.multiplier(table, rounds) if self.distributed else table.noise_multiplier
            if z is None and table.epsilon is not None:
                releases = 1 if table.correlated else rounds  # all correlated rounds are one release of a tree
                z = accounting.noise_multiplier(table.epsilon, table.delta, releases, self.q, of)
                z *= self._tree_sensitivity(rounds) if table.correlated else 1.0
            return {"noise_multiplier": z or 0.0, "planned_rounds": rounds}

        self.ledger = Ledger(folder, table.delta, begin)
        z = float(self.ledger.header["noise_multiplier"])
        self.planned = int(self.ledger.header["planned_rounds"])
        self.noise_multiplier = z
        of_release = z / self._tree_sensitivity(self.planned) if table.correlated else z
        self.mechanism = Mechanism(of_release, self.q, of, self.distributed)
        self.adaptive = table.clip == "adaptive"
        self.clip = clipping.START if table.clip == "adaptive" else float(table.clip)
        self.change_multiplier = clipping.change_multiplier(z, self.expected) if self.adaptive else z

    def _tree_sensitivity(self, rounds: int) -> float:
        """Return what a client changes in a tree over the rounds, if it takes its turn in every `turns`-th round."""
        return noise.tree_sensitivity(rounds, self.turns, -(-rounds // self.turns))

    @property
    def adjacency(self) -> str:
        """What two neighbouring federations differ in: an ε means nothing without it."""
        return f"{self.mechanism.adjacency} client"

    @property
    def share(self) -> float:
        """The expected share of clients in a round."""
        return self.expected / self.population

    def draw(self, round: int) -> tuple[int, ...]:
        """Draw a round's clients from the secret."""
        if self.table.correlated and self.size is not None:
            order = noise.order(self.ledger.secret, self.population)
            turn = (round - 1) % self.turns
            return tuple(sorted(order[turn * self.size : (turn + 1) * self.size]))
        if self.size == self.population:
            return tuple(range(self.population))
        return noise.cohort(self.ledger.secret, round, self.population, self.share, self.size)

    def release(
        self, round: int, call: int, total: Groups, positions: Mapping[str, str], shared: Groups, task: Task
    ) -> Groups:
        """Charge a sum of bounded changes, add noise, and return the means; an adaptive clip moves on.

        A sum with the noise of its clients gets no more.
        """
        deviation = self.change_multiplier * self.clip
        digest = tree.sha256_of_groups(total)
        name = f"round {round}, call {call}, sum {digest}, deviation {deviation!r}"
        if self.q < 1 or self.table.correlated:
            self._check_one_sum(round, name)
        if self.table.correlated:
            self._charge_tree(round, name)
        elif self.distributed:
            self._charge_sum(self._question(round, call, shared), digest)
        else:
            self.charge(name)
        key = noise.derive(self.ledger.secret, "noise", name)
        counted = total.get(COUNT)
        sums = {group: leaves for group, leaves in total.items() if group != COUNT}
        if self.table.correlated:
            drawn = noise.tree_increment(self.ledger.secret, sums, round, deviation)
        elif self.distributed:
            drawn = {group: tree.zeros_like(leaves) for group, leaves in sums.items()}
        else:
            drawn = noise.noise_like(sums, deviation, key)
        found, unit = {}, distributed.unit(self.clip) if self.distributed else 1.0
        for group, leaves in sums.items():
            base = shared[positions[group]] if group in positions else None
            found[group] = with_noise(leaves, drawn[group], base, base or leaves, task, unit, self.expected)
        if counted is not None:
            of_count = 0.0 if self.distributed else clipping.indicator_deviation(self.expected)
            noisy = float(counted[COUNT]) + of_count * float(noise.gaussian(noise.derive(key, COUNT), 1)[0])
            self.clip = clipping.next_clip(self.clip, noisy, self.expected)
        return found

    def charge(self, name: str) -> None:
        """Charge a release before it is made, or raise `PrivacySpent` if that would cost more than planned."""
        if name not in self.ledger.charged and self.is_spent:
            raise PrivacySpent(
                f"Nothing more was released: another round would cost more than ε = {self.table.epsilon:g} at δ = "
                f"{self.table.delta:g} ({self.adjacency}). Spent so far: {self.epsilon:.4g}. Releases that were rolled "
                "back stay spent."
            )
        self.ledger.charge(name, self.mechanism)

    def charge_question(self, round: int, call: int, shared: Groups) -> None:
        """Charge a sum with the noise of its clients before they are asked: the server sees it before `release`."""
        self.charge(self._question(round, call, shared))

    def _question(self, round: int, call: int, shared: Groups) -> str:
        return f"round {round}, call {call}, shared {tree.sha256_of_groups(shared)}, clip {self.clip!r}"

    def _charge_sum(self, question: str, digest: str) -> None:
        """Charge the answer to a question once. Another answer to it, after a rollback, is charged too."""
        self.charge(question)
        name, start = f"{question}, sum {digest}", f"{question}, sum "
        if name in self.ledger.charged or not any(known.startswith(start) for known in self.ledger.charged):
            self.ledger.charge(name, self.mechanism, 0)
        else:
            self.charge(name)

    def _check_one_sum(self, round: int, name: str) -> None:
        """Raise `PrivacySpent` for a second sum of a round: it has the same clients, or takes back the same noise."""
        if any(known.startswith(f"round {round}, ") and known != name for known in self.ledger.charged):
            raise PrivacySpent(
                f"Round {round} was released with another sum before, and no ε covers two sums of the same drawn "
                f"clients. Start again with {FRESH}."
            )

    def _charge_tree(self, round: int, name: str) -> None:
        """Charge a tree as a whole in its first round."""
        if round > self.planned:
            raise PrivacySpent(f"The tree of [privacy] dp correlated = true is for {self.planned} rounds, and no more.")
        self.ledger.charge("tree", self.mechanism)
        self.ledger.charge(name, self.mechanism, 0)

    @property
    def epsilon(self) -> float:
        """The ε spent so far."""
        return self.ledger.epsilon().value

    @property
    def is_spent(self) -> bool:
        """Whether one more release would cost more than the ε that was given."""
        if self.table.correlated:
            return self.ledger.releases > self.planned  # the tree, and each of its rounds
        return self.table.epsilon is not None and self.ledger.epsilon({self.mechanism: 1}).value > self.table.epsilon

    @property
    def state(self) -> Tree:
        """What decides later rounds, as part of the checkpoint."""
        releases = torch.tensor(self.ledger.releases)
        return {"clip": torch.tensor(self.clip, dtype=torch.float64), "releases": releases}

    def restore(self, state: Tree) -> None:
        """Continue with the state of a checkpoint, if the ledger knows of all its releases."""
        if self.ledger.releases < int(state["releases"]):
            raise StoreError(
                f"The checkpoint knows of {int(state['releases'])} releases, and the privacy ledger in "
                f"{self.ledger.folder} of {self.ledger.releases}: it was changed, so nobody knows what was spent. "
                f"Start again with {FRESH}."
            )
        self.clip = float(state["clip"])

    def lines(self) -> list[str]:
        """Say what ε means in this cell."""
        chance = "every client in every round" if self.q == 1 else f"each client with probability {self.q:.4g}"
        said = [
            f"ε at δ = {self.table.delta:g} is about neighbours that {self.adjacency}. Noise multiplier "
            f"{self.mechanism.noise_multiplier:.4g}, {chance}."
        ]
        if self.table.delta * self.population >= 1:
            said.append(f"δ should be smaller than 1 / {self.population}, the share of a single client.")
        return said

    def notes(self) -> dict[str, float]:
        """Return numbers for the record of the round."""
        return {**self.ledger.notes(self.kind), f"{self.kind}_rdp": self.ledger.epsilon().rdp, "clip": self.clip}

    @property
    def kind(self) -> str:
        """Which ε it spends."""
        if self.distributed:
            return "distributed_epsilon"
        return "replace_epsilon" if self.mechanism.fixed else "epsilon"


def check_sampling(sampling: Sampling) -> None:
    """Raise `InputError` if a cohort cannot be accounted for."""
    defaults = type(sampling).model_fields
    reasons = {
        "redraw_every": "a cohort that stays is not drawn at random in each round",
        "everyone_every": "rounds with everyone are not drawn at random",
        "quorum": "whether a round counts would show how many clients took part",
        "over_select": "the first to answer are not drawn at random",
    }
    for key, why in reasons.items():
        if getattr(sampling, key) != defaults[key].default:
            found = getattr(sampling, key)
            raise InputError(f"[privacy] dp cannot be used with [cohort] {key} = {found}: {why}. Leave {key} out.")
    if sampling.sampling == "window":
        raise InputError(
            '[privacy] dp cannot be used with [cohort] sampling = "window": everybody knows the cohort. Use sampling = '
            '"poisson" with a fraction, or leave sampling out.'
        )


def weight_bound(algorithm: Algorithm, sampling: Sampling, label: str = "") -> float:
    """Return the largest weight of a client, or raise `InputError` if noisy sums are not enough for the algorithm."""
    who = called(algorithm, label)
    if algorithm.pooled:
        raise InputError(one_place("dp", who))
    if not algorithm.takes_noise:
        raise InputError(
            f"[privacy] dp gives the server clipped and noisy sums, and the formulas of {who} need exact ones. Use an "
            f"algorithm that takes noise, such as fedavg, or move {who} into a file of its own without dp."
        )
    if algorithm.largest_weight(2**40) == 1:
        return 1.0
    bound = algorithm.largest_weight(sampling.max_examples) if sampling.max_examples else math.inf
    if math.isinf(bound):
        raise InputError(
            f"[privacy] dp needs a bound on how much one client counts, and {who} weighs clients without one. "
            f"{BOUND_WEIGHTS}"
        )
    return bound
