"""Evaluation as work for a backend: clients' models on their own data, and the global model on the server's data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedloom import tree
from fedloom.data.federation import Federation
from fedloom.data.split import SPLITS, SplitName
from fedloom.federation.client_state import ClientStates
from fedloom.federation.work import Place, on_device
from fedloom.task import Task
from fedloom.training import evaluation, generators
from fedloom.training.clients import Clients
from fedloom.training.evaluation import Measured
from fedloom.tree import Groups, Tree

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm
    from fedloom.backends.protocol import Backend

ByClient = dict[int, dict[str, Measured]]  # client → split
MANY, TOGETHER = 32, 4  # with at least MANY clients, TOGETHER of them are evaluated in one pass


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

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        shared: Groups,
        own: Groups,
        ids: tuple[int, ...],
        splits: tuple[SplitName, ...],
        round: int = 0,
        model: Tree | None = None,
    ) -> EvaluationWork:
        """Return the work for these clients; many clients that use one model are evaluated in groups."""
        # depends only on how many clients there are: which ones are computed together must not depend on the backend
        together = TOGETHER if len(ids) >= MANY and not own and not algorithm.chooses else 1
        return cls(algorithm, shared, own, ids, splits, round, model, together)

    def costs(self, place: Place) -> Sequence[int]:
        counts = sum(place.federation.counts(self.ids, split) for split in self.splits)
        each = np.broadcast_to(counts, len(self.ids)) + 1
        return [int(each[begin : begin + self.together].sum()) for begin in range(0, len(each), self.together)]

    def part(self, begin: int, end: int) -> EvaluationWork:
        begin, end = begin * self.together, end * self.together
        own = {group: {name: leaf[begin:end] for name, leaf in t.items()} for group, t in self.own.items()}
        return replace(self, ids=self.ids[begin:end], own=own)

    def perform(self, place: Place) -> ByClient:
        with generators.lent():
            return self._perform(place)

    def _perform(self, place: Place) -> ByClient:
        data = Clients(place.federation, self.ids, setup=place.setup, round=self.round)
        graded: ByClient = {}
        for begin in range(0, len(self.ids), self.together):
            positions = range(begin, min(begin + self.together, len(self.ids)))
            own = {group: tree.row(stacked, begin) for group, stacked in self.own.items()}
            try:
                if self.model is None:
                    shared = on_device(place.setup.device, self.shared)
                    own = chosen(self.algorithm, place.task, shared, own, replace(data, ids=(self.ids[begin],)))
                model = self.model or self.algorithm.model(place.task, self.shared, own)
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
        x, y = place.federation.server[self.split]
        measured = []
        for number in self.pieces:
            rows = slice(number * self.piece, (number + 1) * self.piece)
            # copies, because a model may change its input
            part = x[rows].clone(), y[rows].clone()
            example = evaluation.prepare(*part, place.federation.scale, place.task, place.setup.device)
            weights = tree.to(self.weights, place.setup.device)
            measured.append(evaluation.measure(place.task, weights, *example, place.setup))
        return measured

    def merge(self, results: Iterable[list[Measured]]) -> list[Measured]:
        return [measured for part in results for measured in part]


def evaluate_clients(
    backend: Backend,
    algorithm: Algorithm,
    state: Groups,
    own: ClientStates,
    ids: tuple[int, ...],
    splits: tuple[SplitName, ...],
    round: int,
) -> ByClient:
    """Evaluate the models that clients use on their own splits."""
    if not splits or not ids:
        return {}
    found: ByClient = backend.run(EvaluationWork.of(algorithm, state, own.gather(ids), ids, splits, round))
    return found


def evaluate_server(
    backend: Backend,
    federation: Federation,
    algorithm: Algorithm,
    task: Task,
    state: Groups,
    splits: tuple[SplitName, ...] | None,
) -> dict[str, Measured]:
    """Evaluate the global model, if there is one: on whatever the server holds, or on these splits.

    A split that the server does not hold is the union of the clients' splits.
    """
    model = algorithm.server_model(task, state)
    if model is None:
        return {}
    measured: dict[str, Measured] = {}
    for split in SPLITS if splits is None else splits:
        if split in federation.server:
            measured[split] = _evaluate_held(backend, federation, model, split)
        elif splits is not None:
            everyone = tuple(range(federation.clients))
            found: ByClient = backend.run(EvaluationWork.of(algorithm, {}, {}, everyone, (split,), model=model))
            answered = [found[client] for client in everyone if client in found]  # a network may lose some
            measured[split] = sum((one[split] for one in answered if split in one), Measured())
    return measured


def validate(backend: Backend, federation: Federation, task: Task, model: Tree) -> float | None:
    """Return the accuracy (or else the loss) on the server's own validation data; None if it holds none."""
    if "validation" not in federation.server or not len(federation.server["validation"][1]):
        return None
    values = _evaluate_held(backend, federation, model, "validation").values(task)
    return values.get("accuracy", values["loss"])


def _evaluate_held(backend: Backend, federation: Federation, model: Tree, split: str) -> Measured:
    """Evaluate a model on one split that the server holds."""
    examples = len(federation.server[split][1])
    work = ServerEvaluation(model, split, range(-(-examples // ServerEvaluation.piece)))
    return sum(backend.run(work), Measured())


def chosen(algorithm: Algorithm, task: Task, shared: Groups, own: Groups, data: Clients) -> Groups:
    """Return what one client keeps, after it chose among several models if its algorithm lets it choose."""
    if not algorithm.chooses:
        return own
    stacked = {group: {name: leaf[None] for name, leaf in leaves.items()} for group, leaves in own.items()}
    return {group: tree.row(leaves, 0) for group, leaves in algorithm.choose(task, shared, stacked, data).items()}
