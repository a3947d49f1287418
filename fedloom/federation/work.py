"""The work that a verb asks of clients: every client runs one method of the algorithm, where its data lives.

All a backend does (a loop, processes, a cluster, a network) is to cut work into ranges of clients, perform the parts
and merge the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fedloom import tree
from fedloom.aggregation import means
from fedloom.aggregation.means import Node, PairwiseSum
from fedloom.aggregation.outliers import with_lengths
from fedloom.compression.method import Method
from fedloom.compression.uplink import MEMORY, Sent, Uplink
from fedloom.data.federation import Federation
from fedloom.data.split import SplitName
from fedloom.errors import TrainingError
from fedloom.federation.blame import client_half, perform_named
from fedloom.privacy.protection import ClientGuard
from fedloom.task import Task
from fedloom.training import evaluation, generators
from fedloom.training.clients import Clients, Setup, always
from fedloom.training.evaluation import Measured
from fedloom.tree import Groups, Tree

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm, Update
    from fedloom.privacy.dp.at_client import ClientPrivacy


Keep = Literal["sum", "stack", "secure"]  # what the server sees; "secure": a sum, through masks


@dataclass(frozen=True)
class Place:
    """Where data lives: a process with (a view of) the examples, the task and how to compute."""

    federation: Federation
    task: Task
    setup: Setup
    go_on: Callable[[], None] = always

    def __post_init__(self) -> None:
        if self.setup.device != "cpu":
            self.task.move(self.setup.device)


class Work(Protocol):
    """What the server asks of some clients."""

    common: ClassVar[tuple[str, ...]]  # fields that all parts share, so that a process needs them only once

    def costs(self, place: Place) -> Sequence[int]:
        """Return how much there is to do for each unit, in order; a backend cuts between units."""

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
    finite: bool = True  # whether all numbers in its answer are finite
    lengths: dict[str, float] = field(default_factory=dict)  # of its change, by group where it has weight
    pull: float = 0.0  # the largest weight × length of its groups
    examples: int = 0  # how many it trains on


@dataclass(frozen=True)
class Outcome:
    """The answers of some clients, as sums or stacked."""

    sums: dict[Node, Tree] = field(default_factory=dict)
    stack: Groups = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    public: dict[str, Tensor] = field(default_factory=dict)
    own: Groups = field(default_factory=dict)
    reports: tuple[Report, ...] = ()
    dtypes: dict[str, dict[str, torch.dtype]] = field(default_factory=dict)  # of leaves whose sums have another dtype
    positions: dict[str, str] | None = field(default_factory=dict)  # as in `Update`; None if they are not known
    parts: Groups = field(default_factory=dict)  # of one client's compressed leaves, if the stack lacks them
    total: Groups | None = None  # the sum of guarded answers, if the backend's clients computed it with masks
    outliers: tuple[int, ...] = ()  # clients that the backend left out, because their changes were far too long
    left_out: tuple[int, ...] = ()  # clients that the backend left out, because they made the result not finite


@dataclass(frozen=True)
class Inbox:
    """The trees that the clients of a cohort sent to each other, and which of them each client may see."""

    trees: Groups
    neighbours: Tensor  # clients × cohort, true where a client receives

    def senders(self, position: int) -> list[int]:
        return [int(sender) for sender in self.neighbours[position].nonzero().flatten()]


@dataclass(frozen=True)
class ClientWork:
    """Every client of the cohort runs one method of the algorithm."""

    common: ClassVar[tuple[str, ...]] = ("algorithm", "shared", "peers")

    algorithm: Algorithm
    method: str
    shared: Groups
    ids: tuple[int, ...]
    own: Groups
    seed: int
    round: int
    call: int
    keep: Keep  # what the verb lets the server see
    each: Groups | None = None  # one message per client, stacked
    peers: Groups | None = None  # what the clients sent to each other, stacked over the whole cohort
    graph: Tensor | None = None  # which clients receive from which: one row per client of `ids`
    measure: tuple[SplitName, ...] = ()  # splits that a client evaluates its trained model on
    universal: bool = False  # also evaluate on the union of all clients' test splits
    watch_epochs: bool = False  # also evaluate the validation split after every local epoch
    report_lengths: bool = False  # report how long each client's change is
    guard: ClientGuard | None = None  # what clients do to their answers before they send them
    max_examples: int | None = None  # a client with more training examples weighs as much as one with this many
    client_privacy: ClientPrivacy | None = None  # what clients do by themselves, with differential privacy
    first: int = 0  # the cohort position of ids[0]
    seats: tuple[int, ...] | None = None  # the clients' places in `peers`; by default, their positions in the cohort
    compress: Method | None = None  # how clients compress their answers
    as_parts: bool = False  # answer with the parts of compressed leaves, as one client sends them
    shared_bytes: int | None = None  # what `shared` takes on its way to a client, if it is compressed

    def costs(self, place: Place) -> Sequence[int]:
        return [int(count) + 1 for count in place.federation.counts(self.ids, "train")]

    def part(self, begin: int, end: int) -> ClientWork:
        seats = None if self.seats is None else self.seats[begin:end]
        return replace(self._rows(slice(begin, end)), ids=self.ids[begin:end], first=self.first + begin, seats=seats)

    def only(self, positions: Sequence[int]) -> ClientWork:
        """Return the same work for a smaller cohort, whose clients have these positions in this one."""
        seats = self.seats or range(self.first, self.first + len(self.ids))
        ids, at = (tuple(of[position] for position in positions) for of in (self.ids, seats))
        return replace(self._rows(torch.tensor(positions, dtype=torch.int64)), ids=ids, seats=at)

    def _rows(self, index: slice | Tensor) -> ClientWork:
        return replace(
            self,
            own=cut(self.own, index),
            each=None if self.each is None else cut(self.each, index),
            graph=None if self.graph is None else self.graph[index],
        )

    def perform(self, place: Place) -> Outcome:
        """Perform a bounded number of clients at a time, because a stack costs clients × model in memory."""
        own = sum(tree.size(group) for group in self.own.values()) // max(len(self.ids), 1)
        model = sum(tree.size(group) for group in self.shared.values()) + own + 1
        together = max(place.setup.group, min(64, 256_000_000 // model))
        pieces = (self.part(begin, begin + together) for begin in range(0, len(self.ids), together))
        with generators.lent():
            return self.merge([perform_named(piece, place) for piece in pieces])

    def clients(self, place: Place) -> Clients:
        return Clients(
            place.federation,
            self.ids,
            self.seed,
            self.round,
            self.call,
            place.setup,
            self.watch_epochs,
            self.client_privacy.examples if self.client_privacy is not None else None,
            place.go_on,
        )

    def perform_together(self, place: Place) -> Outcome:
        data, device = self.clients(place), place.setup.device
        extra: list[Any] = []
        if self.peers is not None and self.graph is not None:
            extra.append(Inbox(on_device(device, self.peers), self.graph))
        if self.each is not None:
            extra.append(on_device(device, self.each))
        kept = on_device(device, {group: leaves for group, leaves in self.own.items() if group != MEMORY})
        update, own = client_half(self, place.task, on_device(device, self.shared), kept, data, *extra)
        update, own = self._capped(replace(update, groups=on_device("cpu", update.groups))), on_device("cpu", own)
        finite = _finite(update, place.task, len(data))
        if self.client_privacy is not None and self.client_privacy.local is not None:
            names = [data.name(position) for position in range(len(data))]
            where = f"round {self.round}, call {self.call}"
            update = self.client_privacy.local.apply(update, self.shared, place.task, where, names)
        trained, shared, sent = update, self.shared, None
        if self.compress is not None:
            update, shared, own, sent = self._compressed(self.uplink(self.compress, place.task), update, own)
            arrived = _finite(update, place.task, len(data))  # a number may be too large for half precision
            finite = [before and after for before, after in zip(finite, arrived, strict=True)]
        sizes = sent.bytes if sent else [_bytes_of_one(update.groups)] * len(data)
        reports = tuple(
            self._report(place, data, trained, position, finite[position], sizes[position])
            for position in range(len(data))
        )
        if self.guard is not None:
            update = self.guard.apply(update, shared, place.task)
        if self.report_lengths:
            examples = [min(count, self.max_examples or count) for count in data.examples.tolist()]
            reports = with_lengths(reports, update, self.shared, place.task, examples)
        if sent is None or not self.as_parts:
            return self.outcome([update], own, reports)
        if not all(finite):
            where = f"Round {self.round}, client '{data.name(0)}'"
            raise TrainingError(f"{where}: its update is not finite. A smaller lr or a clip may help.")
        return replace(self.outcome([replace(update, groups=sent.rest)], own, reports), parts=sent.parts[0])

    def uplink(self, method: Method, task: Task) -> Uplink:
        """Return how the answers to this call are compressed."""
        return Uplink(method, task.learnt, self.seed, self.round, self.call, self.method)

    def _compressed(self, uplink: Uplink, update: Update, own: Groups) -> tuple[Update, Groups, Groups, Sent | None]:
        """Return the update as the server reads it, what it compares it with, what clients keep, and what they send."""
        memory = self.own.get(MEMORY, {})
        sent = None
        if self.guard is not None and self.guard.table.secure_aggregation is not None:
            update, memory = uplink.project(update, self.shared, self.ids, memory)
            shared = uplink.projected(self.shared, update.positions)
        else:
            sent = uplink.send(update, self.shared, self.ids, memory)
            update, memory, shared = sent.update, sent.memory, self.shared
        return update, shared, own | ({MEMORY: memory} if MEMORY in self.own else {}), sent

    def _capped(self, update: Update) -> Update:
        """Return an update in which no client weighs more than one with `max_examples`."""
        if self.max_examples is None:
            return update
        largest = self.algorithm.largest_weight(self.max_examples)
        return replace(update, weight={group: update.weights(group).clamp(max=largest) for group in update.groups})

    def _report(self, place: Place, data: Clients, update: Update, position: int, finite: bool, size: int) -> Report:
        """Report on one client, whose leaves take `size` bytes."""
        post_fit: dict[str, Measured] = {}
        history: tuple[dict[str, float], ...] = ()
        if update.trained is not None:
            model = tree.row(update.trained.model, position)
            history = update.trained.history[position] if update.trained.history else ()
            try:
                for split in self.measure:
                    post_fit[split] = evaluation.evaluate(place.task, model, data, position, split)
                if self.universal:
                    everyone = place.federation.indices(place.federation.everyone, "test")
                    post_fit["universal"] = evaluation.evaluate_rows(place.task, model, data, everyone)
            except Exception as error:
                raise data.blame(error, "evaluation after training", position) from error
        sent = size + _bytes_of_one({"": update.public}) + 8 * len(update.groups)
        return Report(self.ids[position], sent, self.received(position), history, post_fit, finite)

    def received(self, position: int) -> int:
        """Return how many bytes one client receives for this work."""
        shared = self.shared_bytes
        if shared is None:
            shared = sum(tree.size(group) for group in self.shared.values())
        down = shared + _bytes_of_one(self.each or {})
        if self.peers is not None and self.graph is not None:
            others = self.graph[position].clone()
            seat = self.first + position if self.seats is None else self.seats[position]
            others[seat] = False  # a client does not receive what it sent itself
            down += _bytes_of_one(self.peers) * int(others.sum())
        return down

    # --- from updates to sums or stacks

    def outcome(self, updates: Sequence[Update], own: Groups, reports: tuple[Report, ...]) -> Outcome:
        """Return what clients answered in the form that the verb allows: as sums, or stacked.

        There is one update of all clients, or one of each client, in the cohort's order; sums need no copy of those.
        """
        first = updates[0]
        weights = {group: torch.cat([update.weights(group) for update in updates]) for group in first.groups}
        public = tree.concat([update.public for update in updates])
        dtypes = {group: means.other_dtypes(stacked) for group, stacked in first.groups.items()}
        found = Outcome({}, {}, {}, public, own, reports, dtypes, first.positions)
        if self.keep != "sum":
            return replace(found, stack=_join([update.groups for update in updates]), weights=weights)
        return replace(found, sums=self._sums([update.groups for update in updates], weights))

    def _sums(self, answers: Sequence[Groups], weights: dict[str, Tensor]) -> dict[Node, Tree]:
        """Add up the weighted leaves of all groups, and the weights themselves, as one tree per partial sum."""
        sums: dict[Node, Tree] = {}
        for group, stacked in answers[0].items():
            rows: dict[str, means.Rows] = {_path("", group): torch.ones(len(weights[group]), dtype=torch.float64)}
            for name, leaf in stacked.items():
                rows[_path(group, name)] = leaf if len(answers) == 1 else [each[group][name][0] for each in answers]
            for node, part in means.partial_sums(rows, weights[group].cpu(), self.first).items():
                sums.setdefault(node, {}).update(part)
        return sums

    def merge(self, results: Iterable[Outcome]) -> Outcome:
        results = list(results)
        if not results:
            return Outcome()
        total = PairwiseSum()
        for outcome in results:
            total.extend(outcome.sums)
        return replace(
            results[0],
            sums=total.nodes,
            stack=_join([outcome.stack for outcome in results]),
            weights=tree.concat([outcome.weights for outcome in results]),
            public=tree.concat([outcome.public for outcome in results]),
            own=_join([outcome.own for outcome in results]),
            reports=tuple(report for outcome in results for report in outcome.reports),
        )


def _finite(update: Update, task: Task, clients: int) -> list[bool]:
    """Return whether each client's answer is finite. One look at the whole stack is enough if all of it is."""
    sent = [*update.groups.values(), {group: update.weights(group) for group in update.groups}]
    if all(tree.is_sound(stacked, task.trainable) for stacked in sent):
        return [True] * clients
    return [all(tree.is_sound(tree.row(part, n), task.trainable) for part in sent) for n in range(clients)]


def _bytes_of_one(groups: Groups) -> int:
    """Return how many bytes one client's rows of stacked groups have."""
    return sum(leaf[0].numel() * leaf.element_size() for stacked in groups.values() for leaf in stacked.values())


def cut(groups: Groups, index: slice | Tensor) -> Groups:
    """Return some clients of stacked groups: of a range, as views."""
    return {group: tree.rows(stacked, index) for group, stacked in groups.items()}


def on_device(device: str, groups: Groups) -> Groups:
    """Return groups on a device; on the CPU this copies nothing."""
    return {name: tree.to(group, device) for name, group in groups.items()}


def _join(stacks: list[Groups]) -> Groups:
    return {group: tree.concat([stack[group] for stack in stacks]) for group in stacks[0]}


SEPARATOR = "\0"  # no name contains it


def _path(group: str, name: str) -> str:
    """Name a leaf in a sum over all groups; the weights are in the group without a name."""
    return f"{group}{SEPARATOR}{name}"


def means_of(outcome: Outcome) -> tuple[Groups, dict[str, Tensor]]:
    """Return the weighted means of all groups, and the sums of their weights."""
    groups, weights = sums_of(outcome)
    return {g: means.finalise(groups[g], w, outcome.dtypes[g]) for g, w in weights.items()}, weights


def sums_of(outcome: Outcome) -> tuple[Groups, dict[str, Tensor]]:
    """Return the weighted sums of all groups, and the sums of their weights."""
    total = PairwiseSum()
    total.extend(outcome.sums)
    summed = total.total() if total.nodes else {}  # clients may send nothing at all
    groups: Groups = {}
    for path, leaf in summed.items():
        group, _, name = path.partition(SEPARATOR)
        groups.setdefault(group, {})[name] = leaf
    weights = groups.pop("", {})
    return {group: groups.get(group, {}) for group in weights}, weights
