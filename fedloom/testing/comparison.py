"""Compute one task in every way that fedloom has, and compare each with the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

from fedloom.algorithms.fedavg import FedAvg
from fedloom.backends.protocol import Backend
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Workers
from fedloom.data.federation import Federation
from fedloom.federation.engine import Evaluation, Phase, RoundRecord, fit
from fedloom.federation.work import Place
from fedloom.machine import computing
from fedloom.task import Task
from fedloom.testing.plain_loop import PlainRound, plain_fedavg
from fedloom.testing.ways import ONE, InAgents, Way, difference, leaf_distance, spread, values_distance
from fedloom.training import generators
from fedloom.training.clients import Setup
from fedloom.training.probe import Probe, probe
from fedloom.training.settings import Training
from fedloom.tree import Tree

TOLERANCE = {"float64": 1e-9, "float32": 1e-3}  # the largest difference allowed between two ways to compute


@dataclass(frozen=True)
class Found:
    """The result for one way: how far it is from the plain loop, and what is wrong with it (empty if nothing is)."""

    way: str
    far: float = 0.0  # the largest difference, relative to the largest value of a leaf (at least 1)
    wrong: str = ""

    @property
    def sentence(self) -> str:
        """The problem as a sentence; empty if there is none."""
        return f"{self.way}: {self.wrong}" if self.wrong else ""


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
        settings: dict[str, Any] = {"seed": self.seed, "evaluation_batch": self.evaluation_batch}
        task = self.reference_task or self.task
        with computing():
            return list(plain_fedavg(task, self.federation, self.training, self.rounds, **settings))

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
        alone, again = self.setup(1), replace(self.task)

        def serial(task: Task, setup: Setup = alone) -> Callable[[], Backend]:
            return partial(Serial, self.federation, task, setup)

        yield Way(f"{ONE}, step by step", serial(replace(self.task), replace(alone, replay=False)))
        yield Way(ONE, serial(replace(self.task)))
        yield Way(f"{ONE}, with another copy of the task", serial(again), ONE)
        yield Way(f"{ONE}, with that task again", serial(again), ONE)
        agents = partial(InAgents, Place(self.federation, replace(self.task), alone))
        yield Way("agents that answer for one client each", agents, ONE)
        yield from spread(self.found, self.crews, evaluation_batch=self.evaluation_batch)

    def try_out(self, way: Way) -> Found:
        """Compute a run in one way, and compare it."""
        with suppress(Exception):  # a metric of yours may import a package, which may draw random numbers once
            _ = self.reference
        before = generators.positions()
        try:
            records = self.records[way.name] = self.run(way.backend())
        except Exception as error:
            return Found(way.name, wrong=f"{type(error).__name__}: {error}")
        if wrong := self._other_dtypes(records):
            return Found(way.name, wrong=wrong)
        far, where = self._largest_difference(records)
        said = []
        if far > self.tolerance:
            said.append(f"{where} differs by {far:.1e} from the plain torch loop.")
        if generators.positions() != before:
            said.append("a global generator is not restored.")
        if way.like in self.records and (other := difference(self.records[way.like], records)):
            said.append(f"other bits than '{way.like}': {other}.")
        return Found(way.name, far, " ".join(said))

    def run(self, backend: Backend) -> list[RoundRecord]:
        options: dict[str, Any] = {"seed": self.seed, "evaluation": Evaluation(splits=("test",), server=())}
        algorithm, task = FedAvg(train=self.training), replace(self.task)
        with computing():
            return list(fit(self.federation, task, algorithm, self.rounds, backend=backend, **options))

    def _other_dtypes(self, records: Sequence[RoundRecord]) -> str:
        """Say which dtypes the weights have, if they are not the plain loop's."""
        for plain, record in zip(self.reference, records, strict=True):
            model = self.task.whole(record.state["model"])
            if {n: leaf.dtype for n, leaf in model.items()} != {n: leaf.dtype for n, leaf in plain.weights.items()}:
                return f"the weights are {kinds(model)}, and in torch {kinds(plain.weights)}."
        return ""

    def _largest_difference(self, records: Sequence[RoundRecord]) -> tuple[float, str]:
        """Return the largest difference from the plain loop: in weights or, if they agree, in losses and metrics."""
        rounds = list(zip(self.reference, records, strict=True))
        weights = [
            (leaf_distance(leaf, self.task.whole(record.state["model"])[name]), f"'{name}' after round {record.round}")
            for plain, record in rounds
            for name, leaf in plain.weights.items()
        ]
        far, where = max(weights)
        if far > self.tolerance:
            return far, where
        return max([(far, where), *(pair for plain, record in rounds for pair in self._measured(plain, record))])

    def _measured(self, plain: PlainRound, record: RoundRecord) -> Iterator[tuple[float, str]]:
        """Iterate over the differences of all losses and metrics from the plain loop's."""
        for phase, clients in plain.measured.items():
            for client, values in clients.items():
                told = record.clients[cast("Phase", phase)][client]["test"].values(self.task)
                yield values_distance(values, told), f"{phase} of client {client} in round {record.round}"
        for report in record.reports:
            losses = {str(number): loss for number, loss in enumerate(plain.losses[report.client])}
            told = {str(number): epoch["loss"] for number, epoch in enumerate(report.history)}
            yield values_distance(losses, told), f"the training loss of client {report.client} in round {record.round}"


def kinds(weights: Tree) -> str:
    """Describe the dtypes of a tree."""
    found = sorted({str(leaf.dtype).removeprefix("torch.") for leaf in weights.values()})
    return " and ".join(found) + f" in {len(weights)} leaves"
