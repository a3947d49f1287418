"""Compute one task in every way that fedloom has, and compare each with the plain loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedloom import tree
from fedloom.algorithms.fedavg import FedAvg
from fedloom.backends.protocol import Backend
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Vector, Workers
from fedloom.data.federation import Federation
from fedloom.data.split import SplitName
from fedloom.federation.engine import Evaluation, Phase, RoundRecord, fit
from fedloom.federation.work import Place
from fedloom.machine import computing
from fedloom.task import Task
from fedloom.testing.backends import InAgents, InProcess
from fedloom.testing.plain_loop import PlainRound, Values, evaluate, plain_fedavg
from fedloom.training.clients import Setup
from fedloom.training.probe import Probe, probe
from fedloom.training.schedule import Training
from fedloom.tree import Tree

TOLERANCE = {"float64": 1e-9, "float32": 1e-3}  # the largest difference allowed between two ways to compute
ONE = "one client after another"
PAIRS = "pairs of clients side by side"


@dataclass(frozen=True)
class Found:
    """The result for one way: how far it is from the plain loop and where, or what went wrong."""

    way: str
    far: float = 0.0  # the largest difference, relative to the largest value of a leaf (at least 1)
    where: str = ""
    wrong: str = ""  # a sentence about a broken promise other than this distance
    error: Exception | None = None
    allowed: float = TOLERANCE["float64"]

    @property
    def sentence(self) -> str:
        """The problem as a sentence; empty if there is none."""
        if self.error is not None:
            return f"{self.way}: {type(self.error).__name__}: {self.error}"
        said = [self.wrong] if self.wrong else []
        if self.far > self.allowed:
            said.append(f"{self.where} differs by {self.far:.1e} from the plain torch loop.")
        return f"{self.way}: {' '.join(said)}" if said else ""


@dataclass(frozen=True)
class Way:
    """A way to compute a run. `like` names another way that must give the same bits."""

    name: str
    backend: Callable[[Task], Backend]
    like: str = ""


@dataclass
class Comparison:
    """A task on a federation in which all clients take part in every round of FedAvg."""

    task: Task
    federation: Federation
    training: Training
    rounds: int = 2
    seed: int = 1
    evaluation_batch: int = 1000
    crews: Sequence[Workers] = ()  # worker processes to try it on
    reference_task: Task | None = None  # the same mathematics, where the plain loop needs another module
    records: dict[str, list[RoundRecord]] = field(default_factory=dict)  # the results of each way

    @cached_property
    def reference(self) -> list[PlainRound]:
        with computing():
            return list(
                plain_fedavg(
                    self.reference_task or self.task,
                    self.federation,
                    self.training,
                    self.rounds,
                    seed=self.seed,
                    evaluation_batch=self.evaluation_batch,
                )
            )

    @cached_property
    def found(self) -> Probe:
        """The facts that fedloom finds about the task before the first round."""
        return probe(self.federation, replace(self.task))

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.task.dtype]

    def setup(self, group: int) -> Setup:
        return self.found.setup(group=group, evaluation_batch=self.evaluation_batch)

    def ways(self) -> Iterator[Way]:
        """Iterate over all ways. A way comes after the one that it is compared with."""
        alone, pairs, threes = self.setup(1), self.setup(2), self.setup(3)
        again = replace(self.task)
        yield Way(f"{ONE}, step by step", self._serial(replace(alone, replay=False)))
        yield Way(ONE, self._serial(alone))
        yield Way(f"{ONE}, with another copy of the task", lambda _: Serial(self.federation, again, alone), ONE)
        yield Way(f"{ONE}, with that task again", lambda _: Serial(self.federation, again, alone), ONE)
        yield Way("all clients together", self._ranges(alone), ONE)
        for cut in range(1, min(self.federation.clients, 3)):
            yield Way(f"the cohort cut after client {cut}", self._ranges(alone, cut), ONE)
        yield Way("agents that answer for one client each", self._agents(alone), ONE)
        for crew in self.crews:
            yield Way(str(crew), self._processes(alone, crew), ONE)
        if pairs.group == 2:
            yield Way(PAIRS, self._ranges(pairs))
            yield Way(f"{PAIRS}, cut", self._ranges(pairs, 1), PAIRS)
            yield Way("three side by side", self._ranges(threes))
            for crew in self.crews:
                yield Way(f"{crew}, {PAIRS}", self._processes(pairs, crew), PAIRS)

    def _serial(self, setup: Setup) -> Callable[[Task], Backend]:
        return lambda task: Serial(self.federation, task, setup)

    def _ranges(self, setup: Setup, *cuts: int) -> Callable[[Task], Backend]:
        return lambda task: InProcess(Place(self.federation, task, setup), cuts)

    def _agents(self, setup: Setup) -> Callable[[Task], Backend]:
        return lambda task: InAgents(Place(self.federation, task, setup))

    def _processes(self, setup: Setup, crew: Workers) -> Callable[[Task], Backend]:
        return lambda task: Vector(self.federation, task, setup, crew)

    def compare(self, names: Sequence[str] = ()) -> Iterator[Found]:
        """Try every way, or only some."""
        _ = self.reference  # compute this first, so that nothing a way breaks can affect it
        for way in self.ways():
            if not names or way.name in names:
                yield self.try_out(way)

    def try_out(self, way: Way) -> Found:
        """Compute a run in one way, and compare it."""
        before = _generators()
        try:
            self.records[way.name] = self.run(way.backend(replace(self.task)))
        except Exception as error:
            return Found(way.name, error=error)
        found = self.distance(way.name, self.records[way.name])
        if _generators() != before:
            return replace(found, wrong=f"{found.wrong} a global generator is not restored.".strip())
        if way.like in self.records and not found.wrong:
            for one, other in zip(self.records[way.like], self.records[way.name], strict=True):
                differing = [name for name, value in facts(one).items() if value != facts(other)[name]]
                if differing:
                    wrong = f"other bits than '{way.like}' in {' and '.join(differing)} of round {one.round}."
                    return replace(found, wrong=wrong)
        return found

    def run(self, backend: Backend) -> list[RoundRecord]:
        algorithm, task = FedAvg(train=self.training), replace(self.task)
        measuring = Evaluation(splits=("test",), server=())
        with computing():
            given = fit(
                self.federation, task, algorithm, self.rounds, seed=self.seed, evaluation=measuring, backend=backend
            )
            return list(given)

    def distance(self, way: str, records: Sequence[RoundRecord]) -> Found:
        """Return the largest difference from the plain loop: in weights or, if they agree, in losses and metrics."""
        for plain, record in zip(self.reference, records, strict=True):
            model = record.state["model"]
            if {n: leaf.dtype for n, leaf in model.items()} != {n: leaf.dtype for n, leaf in plain.weights.items()}:
                return Found(way, wrong=f"the weights are {kinds(model)}, and in torch {kinds(plain.weights)}.")
        weights = [
            (leaf_distance(leaf, record.state["model"][name]), f"'{name}' after round {record.round}")
            for plain, record in zip(self.reference, records, strict=True)
            for name, leaf in plain.weights.items()
        ]
        far, where = max(weights, key=lambda pair: pair[0])
        if far <= self.tolerance:
            far, where = max([(far, where), *self._measured(records)], key=lambda pair: pair[0])
        return Found(way, far, where, allowed=self.tolerance)

    def _measured(self, records: Sequence[RoundRecord]) -> Iterator[tuple[float, str]]:
        """Iterate over the differences of all losses and metrics from the plain loop's."""
        for plain, record in zip(self.reference, records, strict=True):
            phases: list[tuple[Phase, dict[int, dict[SplitName, Values]]]] = [
                ("pre_fit", plain.before),
                ("post_fit", plain.after),
            ]
            if record.round == self.rounds:
                phases.append(("final", self.final))
            for phase, expected in phases:
                for client, splits in expected.items():
                    for split, values in splits.items():
                        told = record.clients[phase][client][split].values(self.task)
                        yield values_distance(values, told), f"{phase} of client {client} in round {record.round}"
            for report in record.reports:
                losses = {str(number): loss for number, loss in enumerate(plain.losses[report.client])}
                told = {str(number): epoch["loss"] for number, epoch in enumerate(report.history)}
                where = f"the training loss of client {report.client} in round {record.round}"
                yield values_distance(losses, told), where

    @cached_property
    def final(self) -> dict[int, dict[SplitName, Values]]:
        """The metrics of the plain loop's last weights on every client's test split."""
        task, weights = self.reference_task or self.task, self.reference[-1].weights
        with computing():
            return {
                client: {"test": evaluate(task, weights, self.federation, client, "test", self.evaluation_batch)}
                for client in range(self.federation.clients)
            }


def leaf_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference between two leaves, relative to the first one's largest value (at least 1)."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    kind = torch.complex128 if one.is_complex() else torch.float64
    difference = (one.to(kind) - other.to(kind)).abs()
    difference = difference.masked_fill(one == other, 0.0)  # infinities, which buffers may hold
    far = float(difference.max() / one.to(kind).abs().nan_to_num(posinf=1.0).max().clamp(min=1.0))
    return far if far == far else float("inf")


def values_distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return the same for named numbers."""
    if one.keys() != other.keys():
        return float("inf")
    far = [abs(value - other[name]) / max(abs(value), 1.0) for name, value in one.items()]
    return max((part if part == part else float("inf") for part in far), default=0.0)


def kinds(weights: Tree) -> str:
    """Describe the dtypes of a tree."""
    found = sorted({str(leaf.dtype).removeprefix("torch.") for leaf in weights.values()})
    return " and ".join(found) + f" in {len(weights)} leaves"


def facts(record: RoundRecord) -> dict[str, Any]:
    """Return everything in a record except times. Equal facts mean equal bits."""
    return {
        "the weights": {group: tree.sha256(leaves) for group, leaves in record.state.items()},
        "what clients keep": {c: {g: tree.sha256(t) for g, t in own.items()} for c, own in record.own.items()},
        "the evaluation": record.clients,
        "the reports": record.reports,
    }


def _generators() -> tuple[str, ...]:
    """Return the states of the global generators."""
    drawn = torch.random.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()
    return tuple(repr(state) for state in drawn)
