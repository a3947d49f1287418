"""Evaluation as work for a backend: clients' models on their own data, and the global model on the server's data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from fedloom import tree
from fedloom.compression.downlink import Downlink
from fedloom.compression.table import NO_COMPRESSION, CompressTable
from fedloom.compression.uplink import MEMORY
from fedloom.data.federation import Federation
from fedloom.data.split import SPLITS, SplitName
from fedloom.errors import FedloomError, TrainingError
from fedloom.federation.client_state import ClientStates
from fedloom.federation.work import Place, cut, on_device
from fedloom.record import Count, Record
from fedloom.task import Task
from fedloom.training import evaluation, generators
from fedloom.training.clients import Clients
from fedloom.training.evaluation import Measured
from fedloom.tree import Groups, Tree
from fedloom.user_code import said

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm
    from fedloom.backends.protocol import Backend

ByClient = dict[int, dict[str, Measured]]  # client → split
MANY, TOGETHER = 32, 4  # with at least MANY clients, TOGETHER of them are evaluated in one pass


class Evaluation(Record):
    """What is measured, on which data and how often."""

    every: Count = 1
    """Evaluate in every round that is a multiple of this, in the first one and in the last one."""
    splits: tuple[SplitName, ...] = ("test",)
    """The splits of each client to evaluate on, before and after local training."""
    clients: Literal["all", "cohort"] = "all"
    """Evaluate at all clients before local training, or only at those of the cohort."""
    universal: bool = False
    """In the last round, evaluate every client's model after local training on the union of all test splits."""
    epochs: bool = False
    """Also evaluate on the validation split after every local epoch."""
    server: tuple[Literal["train", "validation", "test"], ...] | None = None
    """The splits to evaluate the global model on: the server's own data, or else the union of the clients'. By
    default, whatever the server holds.
    """

    def is_due(self, round: int, rounds: int) -> bool:
        """Return whether a round of a run with this many rounds is measured."""
        return round % self.every == 0 or round in (1, rounds)

    def before(self, round: int, rounds: int, pooled: bool, resumed: int) -> tuple[SplitName, ...]:
        """Return the splits to evaluate on before the local training of a round.

        With the pooled model, what a client has before a round is what it has after the one before. That one may have
        been the last of a shorter run, if the run was `resumed` after it.
        """
        after = pooled and (self.is_due(round - 1, rounds) or round - 1 == resumed)
        return self.splits if after or self.is_due(round, rounds) else ()


@dataclass(frozen=True)
class EvaluationWork:
    """Every client evaluates its own model (`algorithm.model`) on its own splits."""

    common: ClassVar[tuple[str, ...]] = ("algorithm", "shared", "model")

    algorithm: Algorithm
    shared: Groups
    own: Groups
    ids: tuple[int, ...]
    splits: tuple[SplitName, ...]
    round: int = 0
    model: Tree | None = None  # evaluate this model instead of the clients' own
    together: int = 1  # clients in one unit of work

    def costs(self, place: Place) -> Sequence[int]:
        counts = sum(place.federation.counts(self.ids, split) for split in self.splits)
        each = np.broadcast_to(counts, len(self.ids)) + 1
        return [int(each[begin : begin + self.together].sum()) for begin in range(0, len(each), self.together)]

    def part(self, begin: int, end: int) -> EvaluationWork:
        begin, end = begin * self.together, end * self.together
        return replace(self, ids=self.ids[begin:end], own=cut(self.own, slice(begin, end)))

    @generators.lent()
    def perform(self, place: Place) -> ByClient:
        data = Clients(place.federation, self.ids, setup=place.setup, round=self.round)
        graded: ByClient = {}
        for begin in range(0, len(self.ids), self.together):
            positions = range(begin, min(begin + self.together, len(self.ids)))
            own = {group: tree.row(stacked, begin) for group, stacked in self.own.items()}
            try:
                if self.model is None:
                    shared = on_device(place.setup.device, self.shared)
                    own = chosen(self.algorithm, place.task, shared, own, replace(data, ids=(self.ids[begin],)))
                model = self.algorithm.model(place.task, self.shared, own) if self.model is None else self.model
                model = tree.to(model, place.setup.device)
                for split in self.splits:
                    found = evaluation.evaluate_each(place.task, model, data, positions, split)
                    for position, measured in zip(positions, found, strict=True):
                        graded.setdefault(self.ids[position], {})[split] = measured
            except Exception as error:
                raise data.blame(error, "evaluation", begin) from error
        return graded

    def merge(self, results: Iterable[ByClient]) -> ByClient:
        return {client: graded for part in results for client, graded in part.items()}


@dataclass(frozen=True)
class ServerEvaluation:
    """Evaluate the global model on data that the server holds, in pieces of a fixed size."""

    common: ClassVar[tuple[str, ...]] = ("weights",)

    weights: Tree
    split: str
    pieces: range
    piece: int = 1000

    def costs(self, place: Place) -> Sequence[int]:
        return [1] * len(self.pieces)

    def part(self, begin: int, end: int) -> ServerEvaluation:
        return replace(self, pieces=self.pieces[begin:end])

    def perform(self, place: Place) -> list[Measured]:
        try:
            return [self._measure(place, number) for number in self.pieces]
        except FedloomError:
            raise
        except Exception as error:
            raise TrainingError(
                f"Evaluation of the global model on the server's {self.split} data: {said(error)}"
            ) from error

    def _measure(self, place: Place, number: int) -> Measured:
        x, y = place.federation.server[self.split]
        rows = slice(number * self.piece, (number + 1) * self.piece)
        # copies, because a model may change its input
        part = x[rows].clone(), y[rows].clone()
        example = evaluation.prepare(*part, place.federation.scale, place.task, place.setup.device)
        return evaluation.measure(place.task, tree.to(self.weights, place.setup.device), *example, place.setup)

    def merge(self, results: Iterable[list[Measured]]) -> list[Measured]:
        return [measured for part in results for measured in part]


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the models of one run, where the data lives."""

    backend: Backend
    federation: Federation
    algorithm: Algorithm
    task: Task
    compress: CompressTable = NO_COMPRESSION

    def clients(
        self, state: Groups, own: ClientStates, ids: tuple[int, ...], splits: tuple[SplitName, ...], round: int
    ) -> ByClient:
        """Evaluate the models that clients use, as they receive them, on their own splits."""
        if not splits or not ids:
            return {}
        link = Downlink.of(self.compress, self.algorithm, self.task)
        state = state if link is None else link.received(state)[0]
        return self._own(EvaluationWork(self.algorithm, state, own.gather(ids, hidden=(MEMORY,)), ids, splits, round))

    def server(self, state: Groups, splits: tuple[SplitName, ...] | None, round: int = 0) -> dict[str, Measured]:
        """Evaluate the global model, if there is one: on whatever the server holds, or on these splits.

        A split that the server does not hold is the union of the clients' splits.
        """
        model = self.algorithm.server_model(self.task, state)
        if model is None:
            return {}
        measured: dict[str, Measured] = {}
        for split in SPLITS if splits is None else splits:
            if split in self.federation.server:
                measured[split] = self._held(model, split)
            elif splits is not None:
                everyone = tuple(range(self.federation.clients))
                found = self._own(EvaluationWork(self.algorithm, {}, {}, everyone, (split,), round, model))
                answered = [found[client] for client in everyone if client in found]  # a network may lose some
                measured[split] = evaluation.pool([one[split] for one in answered if split in one])
        return measured

    def validate(self, model: Tree) -> float | None:
        """Return the accuracy (or else the loss) on the server's own validation data; None if it holds none."""
        if "validation" not in self.federation.server or not len(self.federation.server["validation"][1]):
            return None
        values = self._held(model, "validation").values(self.task)
        return values.get("accuracy", values["loss"])

    def _own(self, work: EvaluationWork) -> ByClient:
        """Evaluate on clients' data. Many clients that use one model are evaluated in groups."""
        # depends only on how many clients there are: which ones are computed together must not depend on the backend
        many = len(work.ids) >= MANY and not work.own and not work.algorithm.chooses
        found: ByClient = self.backend.run(replace(work, together=TOGETHER) if many else work)
        return found

    def _held(self, model: Tree, split: str) -> Measured:
        """Evaluate a model on one split that the server holds."""
        examples = len(self.federation.server[split][1])
        work = ServerEvaluation(model, split, range(-(-examples // ServerEvaluation.piece)))
        return evaluation.pool(self.backend.run(work))


def chosen(algorithm: Algorithm, task: Task, shared: Groups, own: Groups, data: Clients) -> Groups:
    """Return what one client keeps, after it chose among several models if its algorithm lets it choose."""
    if not algorithm.chooses:
        return own
    stacked = {group: {name: leaf[None] for name, leaf in leaves.items()} for group, leaves in own.items()}
    return {group: tree.row(leaves, 0) for group, leaves in algorithm.choose(task, shared, stacked, data).items()}
