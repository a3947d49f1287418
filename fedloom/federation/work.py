"""Pieces of work that a backend carries out where the data lives. Each can be cut into ranges of clients and merged.

Whatever a backend is (a loop, processes, a cluster, a network), it does no more than perform parts and merge results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fedloom import tree
from fedloom.aggregation import means
from fedloom.aggregation.means import Node, PairwiseSum
from fedloom.algorithm import Algorithm, Update
from fedloom.data.federation import Federation
from fedloom.data.split import SplitName
from fedloom.task import Task
from fedloom.training import evaluation, generators
from fedloom.training.clients import Clients, Setup
from fedloom.training.evaluation import Measured
from fedloom.training.local import Groups
from fedloom.tree import Tree


@dataclass(frozen=True)
class Place:
    """Where data lives: a process with (a view of) the examples, the task and how to compute."""

    federation: Federation
    task: Task
    setup: Setup

    def __post_init__(self) -> None:
        if self.setup.device != "cpu":
            self.task.move(self.setup.device)


class Work(Protocol):
    """What the server asks of some clients."""

    common: ClassVar[tuple[str, ...]]  # fields that are the same for every part, so that a process needs them once

    def costs(self, place: Place) -> Sequence[int]:
        """How much there is to do for each unit, in order; a backend cuts at unit borders."""

    def part(self, begin: int, end: int) -> Work: ...
    def perform(self, place: Place) -> Any: ...
    def merge(self, results: Iterable[Any]) -> Any: ...


@dataclass(frozen=True)
class Report:
    """What is known about one client after a call, for the record of the round."""

    client: int
    bytes_up: int = 0
    bytes_down: int = 0
    history: tuple[dict[str, float], ...] = ()
    post_fit: dict[str, Measured] = field(default_factory=dict)  # per split, and "universal"
    finite: bool = True  # whether all that it answered is


@dataclass(frozen=True)
class Outcome:
    """The answers of some clients, as sums or stacked."""

    sums: dict[Node, Tree] = field(default_factory=dict)
    stack: Groups = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    public: dict[str, Tensor] = field(default_factory=dict)
    own: Groups = field(default_factory=dict)
    reports: tuple[Report, ...] = ()
    whole: dict[str, dict[str, torch.dtype]] = field(
        default_factory=dict
    )  # per group, the leaves that hold whole numbers


@dataclass(frozen=True)
class Inbox:
    """The trees that peers sent: all of the cohort's, and which of them each client may see."""

    trees: Groups
    neighbours: Tensor  # clients × cohort, true where a client receives

    def senders(self, position: int) -> list[int]:
        return [int(sender) for sender in self.neighbours[position].nonzero().flatten()]


@dataclass(frozen=True)
class ClientWork:
    """One verb: every client of the cohort runs one method of the algorithm."""

    common: ClassVar[tuple[str, ...]] = ("algorithm", "shared", "peers")

    algorithm: Algorithm
    method: str
    shared: Groups
    ids: tuple[int, ...]
    own: Groups
    seed: int
    round: int
    call: int
    keep: Literal["sum", "stack"]
    each: Groups | None = None  # a message per client, stacked
    peers: Groups | None = None  # what the cohort's clients sent to each other, stacked over the whole cohort
    graph: Tensor | None = None  # who receives from whom: one row per client of `ids`
    measure: tuple[SplitName, ...] = ()  # splits that a client evaluates its trained model on
    universal: bool = False  # and the union of all clients' test splits
    watch_epochs: bool = False  # also evaluate the validation split after every local epoch
    first: int = 0  # the cohort position of ids[0]

    def costs(self, place: Place) -> Sequence[int]:
        return [int(count) + 1 for count in place.federation.counts(self.ids, "train")]

    def part(self, begin: int, end: int) -> ClientWork:
        def cut(groups: Groups) -> Groups:
            return {group: {name: leaf[begin:end] for name, leaf in t.items()} for group, t in groups.items()}

        return replace(
            self,
            ids=self.ids[begin:end],
            own=cut(self.own),
            each=None if self.each is None else cut(self.each),
            graph=None if self.graph is None else self.graph[begin:end],
            first=self.first + begin,
        )

    def perform(self, place: Place) -> Outcome:
        """All clients of this part, a bounded number at a time: a stack costs clients × model in memory."""
        own = sum(tree.size(group) for group in self.own.values()) // max(len(self.ids), 1)
        model = sum(tree.size(group) for group in self.shared.values()) + own + 1
        together = max(place.setup.group, min(64, 256_000_000 // model))
        pieces = (self.part(begin, begin + together) for begin in range(0, len(self.ids), together))
        with generators.lent():
            return self.merge([piece._perform(place) for piece in pieces])

    def _perform(self, place: Place) -> Outcome:
        data = Clients(place.federation, self.ids, self.seed, self.round, self.call, place.setup, self.watch_epochs)
        method = getattr(self.algorithm, self.method)
        device = place.setup.device
        extra: list[Any] = []
        if self.peers is not None and self.graph is not None:
            extra.append(Inbox(on_device(device, self.peers), self.graph))
        if self.each is not None:
            extra.append(on_device(device, self.each))
        update, own = method(place.task, on_device(device, self.shared), on_device(device, self.own), data, *extra)
        own = on_device("cpu", own)
        update = replace(update, groups=on_device("cpu", update.groups))
        sound = _sound(update, place.task, len(data))
        reports = tuple(self._report(place, data, update, position, sound[position]) for position in range(len(data)))
        return self.outcome(update, own, reports)

    def outcome(self, update: Update, own: Groups, reports: tuple[Report, ...]) -> Outcome:
        """What clients answered, as the verb asks for it: as sums, or stacked."""
        sums, stack = {}, {}
        weights = {group: update.weights(group) for group in update.groups}
        whole = {group: means.whole_leaves(stacked) for group, stacked in update.groups.items()}
        if self.keep == "sum":
            sums = self._sums(update.groups, weights, len(self.ids))
        else:
            stack = update.groups
        return Outcome(sums, stack, weights if self.keep == "stack" else {}, update.public, own, reports, whole)

    def outcome_of(self, updates: Sequence[Update], own: Groups, reports: tuple[Report, ...]) -> Outcome:
        """The same for answers that came one by one, in the cohort's order; sums need no copy of them."""
        if self.keep == "stack":
            parts = [self.outcome(update, {}, ()) for update in updates]
            return replace(self.merge(parts), own=own, reports=reports)
        one = updates[0]
        weights = {group: torch.cat([update.weights(group) for update in updates]) for group in one.groups}
        rows = {
            group: {name: [update.groups[group][name][0] for update in updates] for name in leaves}
            for group, leaves in one.groups.items()
        }
        public = {name: torch.cat([update.public[name] for update in updates]) for name in one.public}
        whole = {group: means.whole_leaves(leaves) for group, leaves in one.groups.items()}
        return Outcome(self._sums(rows, weights, len(updates)), {}, {}, public, own, reports, whole)

    def _sums(
        self, groups: Mapping[str, Mapping[str, means.Rows]], weights: dict[str, Tensor], count: int
    ) -> dict[Node, Tree]:
        """Partial sums of the weighted leaves of all groups, and of the weights themselves, as one tree each."""
        sums: dict[Node, Tree] = {}
        for group, stacked in groups.items():
            ones = torch.ones(count, dtype=torch.float64)
            leaves = {_path(group, name): leaf for name, leaf in stacked.items()}
            found = means.partial_sums({_path("", group): ones, **leaves}, weights[group].cpu(), self.first)
            for node, part in found.items():
                sums.setdefault(node, {}).update(part)
        return sums

    def _report(self, place: Place, data: Clients, update: Update, position: int, sound: bool) -> Report:
        post: dict[str, Measured] = {}
        history: tuple[dict[str, float], ...] = ()
        if update.trained is not None:
            fitted = tree.row(update.trained.model, position)
            history = update.trained.history[position] if update.trained.history else ()
            for split in self.measure:
                post[split] = evaluation.evaluate(place.task, fitted, data, position, split)
            if self.universal:
                everyone = place.federation.indices(place.federation.everyone, "test")
                post["universal"] = evaluation.evaluate_rows(place.task, fitted, data, everyone)
        leaves = [leaf for group in update.groups.values() for leaf in group.values()] + list(update.public.values())
        up = sum(leaf[0].numel() * leaf.element_size() for leaf in leaves) + 8 * len(update.groups)
        return Report(self.ids[position], up, self.received(position), history, post, sound)

    def received(self, position: int) -> int:
        """Bytes that one client is sent for this work."""
        down = sum(tree.size(group) for group in self.shared.values())
        if self.each is not None:
            down += sum(leaf[0].numel() * leaf.element_size() for t in self.each.values() for leaf in t.values())
        if self.peers is not None and self.graph is not None:
            one = sum(leaf[0].numel() * leaf.element_size() for t in self.peers.values() for leaf in t.values())
            others = self.graph[position].clone()
            others[self.first + position] = False  # what a client sent it need not be sent back
            down += one * int(others.sum())
        return down

    def merge(self, results: Iterable[Outcome]) -> Outcome:
        results = list(results)
        total = PairwiseSum()
        for outcome in results:
            total.extend(outcome.sums)
        return Outcome(
            total.nodes,
            _join([outcome.stack for outcome in results]),
            {g: torch.cat([o.weights[g] for o in results]) for g in results[0].weights} if results else {},
            {name: torch.cat([o.public[name] for o in results]) for name in results[0].public} if results else {},
            _join([outcome.own for outcome in results]),
            tuple(report for outcome in results for report in outcome.reports),
            results[0].whole if results else {},
        )


def _sound(update: Update, task: Task, clients: int) -> list[bool]:
    """Whether each client's answer is made of finite numbers; one look at the stack, if there is nothing to find."""
    sent = [*update.groups.values(), {group: update.weights(group) for group in update.groups}]
    if all(tree.is_sound(stacked, task.trainable) for stacked in sent):
        return [True] * clients
    return [all(tree.is_sound(tree.row(part, n), task.trainable) for part in sent) for n in range(clients)]


def on_device(device: str, groups: Groups) -> Groups:
    """Groups on a device; on the CPU this copies nothing."""
    return {name: tree.to(group, device) for name, group in groups.items()}


def _join(stacks: list[Groups]) -> Groups:
    return {group: tree.concat([stack[group] for stack in stacks]) for group in stacks[0]} if stacks else {}


SEPARATOR = "\0"  # stands in no name


def _path(group: str, name: str) -> str:
    """A leaf's name in a sum over all groups; the weights are in a group without a name."""
    return f"{group}{SEPARATOR}{name}"


def aggregate(outcome: Outcome) -> tuple[Groups, dict[str, Tensor]]:
    """Means of all groups, and the sums of their weights."""
    total = PairwiseSum()
    total.extend(outcome.sums)
    summed = total.total() if total.nodes else {}  # clients may send nothing at all
    groups: Groups = {}
    for path, leaf in summed.items():
        group, _, name = path.partition(SEPARATOR)
        groups.setdefault(group, {})[name] = leaf
    weights = groups.pop("", {})
    averages = {
        group: means.finalise(groups.get(group, {}), weight, outcome.whole[group]) for group, weight in weights.items()
    }
    return averages, weights
