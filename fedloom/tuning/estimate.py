"""Estimate what an experiment costs before it runs, and say what may go wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from fedloom import machine, tree
from fedloom.compression.table import NO_COMPRESSION
from fedloom.data.describe import describe
from fedloom.data.federation import Federation
from fedloom.data.split import SplitName
from fedloom.errors import InputError, TrainingError
from fedloom.experiment.cautions import cautions
from fedloom.experiment.checks import check_start
from fedloom.experiment.experiment_file import Experiment
from fedloom.experiment.plan import Plan
from fedloom.experiment.worker_groups import choose_setup, working_bytes
from fedloom.federation.work import Report
from fedloom.privacy.dp.accounted import Accounted, planned
from fedloom.privacy.protection import Protection
from fedloom.privacy.secure.aggregation import NobodySent
from fedloom.privacy.table import PrivacyTable
from fedloom.task import Task
from fedloom.training import evaluation, generators
from fedloom.training.clients import Clients
from fedloom.training.probe import Probe, probe
from fedloom.tuning import step_size
from fedloom.tuning.rehearsal import EXAMPLES, MessageBytes, few_examples, rehearse


@dataclass(frozen=True)
class Estimate:
    """Clients, memory, bytes sent and a rough time."""

    clients: int
    examples: int
    smallest_client: int
    largest_client: int
    parameters: int
    cohort: int
    cells: int
    group: int
    group_reason: str
    data_bytes: int
    memory_bytes: int
    traffic_a_round: dict[str, MessageBytes | None]  # by algorithm
    uncompressed_a_round: dict[str, MessageBytes | None]  # the same without [compress], if the file has one
    seconds_a_round: float
    seconds_at_the_end: float  # of a cell: to measure all clients' models on everybody's tests
    seconds: float
    kept_bytes: int = 0
    cautions: tuple[str, ...] = ()  # about algorithms and data
    pooled: tuple[str, ...] = ()  # algorithms that need all data in one place
    accounting: tuple[Accounted, ...] = ()  # what all rounds cost of ε, and the numbers that it follows from
    clients_of_seed: int | None = None  # whose clients these are, if every seed draws its own

    def json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Describe the estimate in words."""
        seed = self.clients_of_seed
        own = "" if seed is None else f" in seed {seed}; every seed draws its own"
        return [
            *(f"Caution: {text}" for text in self.cautions),
            f"{self.clients:,} {'client' if self.clients == 1 else 'clients'} with {self.examples:,} examples"
            + (f", {self.smallest_client:,} to {self.largest_client:,} each{own}" if self.clients > 1 else ""),
            f"{self.parameters:,} parameters; {self.cohort:,} {'client' if self.cohort == 1 else 'clients'} a round; "
            f"{self.cells} {'cell' if self.cells == 1 else 'cells'} (algorithm × seed)",
            f"data {size(self.data_bytes)}, memory about {size(self.memory_bytes)}",
            *(
                f"{label} trains on all examples in one place: every client would give them away"
                if label in self.pooled
                else f"{label} sends {_sent(traffic)}{_instead(traffic, self.uncompressed_a_round.get(label))}"
                for label, traffic in self.traffic_a_round.items()
            ),
            f"group size {self.group}: {self.group_reason}",
            f"roughly {duration(self.seconds_a_round)} a round on this machine, {duration(self.seconds)} in all",
            *map(str, self.accounting),
            *([f"keeping the model of every round takes {size(self.kept_bytes)} of disk"] if self.kept_bytes else []),
        ]


def _rehearsed(
    plan: Plan, federation: Federation, task: Task, facts: Probe, cohort: int
) -> dict[str, Sequence[Report] | None]:
    """Return what clients of each algorithm report about a round. Raise what its run would raise in your own code."""
    return {
        label: rehearse(algorithm, federation, task, facts, cohort, plan.compress)
        for label, algorithm in plan.algorithms.items()
    }


def _without_compression(
    plan: Plan, federation: Federation, task: Task, facts: Probe, cohort: int
) -> dict[str, MessageBytes | None]:
    """Return what algorithms would send without compression, if there is one."""
    if plan.compress == NO_COMPRESSION:
        return {}
    plain = replace(plan, compress=NO_COMPRESSION)
    return _sent_in_a_round(_rehearsed(plain, federation, task, facts, cohort))


def _sent_in_a_round(rehearsed: Mapping[str, Sequence[Report] | None]) -> dict[str, MessageBytes | None]:
    return {label: None if reports is None else MessageBytes.of(reports) for label, reports in rehearsed.items()}


def _too_large_steps(
    plan: Plan, rehearsed: Mapping[str, Sequence[Report] | None], federation: Federation, task: Task, facts: Probe
) -> Iterator[str]:
    few = few_examples(federation)
    for label, reports in rehearsed.items():
        if said := step_size.caution(plan.algorithms[label], reports, few, task, facts):
            yield f"{label}: {said}"


def first_seed(plan: Plan) -> tuple[Federation, Task, Probe, int]:
    """Return the data and the task of the first seed, what is known about them, and the clients of a round."""
    federation, task = plan.federation(plan.seeds[0]), plan.task(plan.seeds[0])
    plan.cohort.check(federation.clients)
    return federation, task, probe(federation, task), plan.cohort.answers(federation.clients)


@contextmanager
def _refusing() -> Iterator[None]:
    """Refuse an experiment that would fail while it trains: nothing was trained yet, so the experiment is wrong."""
    try:
        yield
    except TrainingError as error:
        raise InputError(str(error)) from error


@_refusing()
def estimate(experiment: Experiment) -> Estimate:
    """Load the data, build the model, time a few steps, and multiply."""
    plan, run = Plan.of(experiment), experiment.run
    check_start(plan)
    federation, task, facts, cohort = first_seed(plan)
    _measure_once(federation, task, facts, experiment.evaluate.splits)
    group = choose_setup(facts, run, cohort).group
    reason = facts.__dict__.get("cannot_group")  # known only if clients were to train side by side
    workers = machine.cores() if run.workers == "auto" else run.workers
    if run.backend == "vector":
        workers = machine.worker_count(run.workers)
    if run.backend == "serial":
        reason, workers = "the serial backend", 1
    elif not reason:
        chosen = f"for a model of {size(facts.bytes)} and {cohort} clients a round"
        reason = chosen if run.group == "auto" else "as requested"
    sizes = federation.sizes("train")
    rehearsed = _rehearsed(plan, federation, task, facts, cohort)
    step_seconds, rows = _time_step(federation, task, experiment.train.batch_size, sizes)
    steps = np.ceil(sizes / rows).mean() * experiment.train.epochs * cohort
    forward = sum(federation.sizes(split).sum() for split in experiment.evaluate.splits)
    tested = _tested(federation, experiment.evaluate.server)
    one_forward = step_seconds / rows / 3  # of one example: a step also computes gradients, which takes twice as long
    scored = np.mean([algorithm.models_scored(cohort) for algorithm in experiment.algorithm.values()])
    scores = scored * cohort * federation.sizes("validation").mean()
    everyone = cohort * federation.sizes("test").sum() if experiment.evaluate.universal else 0
    evaluated = ((forward * 2 + tested) / experiment.evaluate.every + scores) * one_forward
    if experiment.evaluate.stop == "target":  # any round may be the last one
        evaluated, everyone = evaluated + everyone * one_forward, 0
    measured = federation.clients * len(experiment.evaluate.splits)
    handled = (cohort * 3 + measured) * 3e-4  # what every client costs besides its steps
    seconds = (steps * step_seconds + evaluated + handled) / min(workers, cohort) + 0.01
    cells = len(experiment.algorithm) * len(experiment.seeds)
    at_the_end = everyone * one_forward / min(workers, cohort)
    data = sum(tree.size({"x": x, "y": y}) for x, y in [(federation.x, federation.y), *federation.server.values()])
    model = facts.bytes
    return Estimate(
        clients=federation.clients,
        examples=len(federation.y),
        smallest_client=int(np.diff(federation.offsets).min()),
        largest_client=int(np.diff(federation.offsets).max()),
        parameters=task.parameters,
        cohort=cohort,
        cells=cells,
        group=int(group),
        group_reason=reason,
        data_bytes=data,
        memory_bytes=int(2 * data + (workers + 1) * machine.WORKER_BYTES + workers * working_bytes(model, int(group))),
        traffic_a_round=_sent_in_a_round(rehearsed),
        uncompressed_a_round=_without_compression(plan, federation, task, facts, cohort),
        seconds_a_round=float(seconds),
        seconds_at_the_end=float(at_the_end),
        seconds=float((seconds * experiment.rounds + at_the_end) * cells + 3),
        kept_bytes=model * experiment.rounds * cells if experiment.run.keep_models else 0,
        cautions=(
            *cautions(plan, task, federation),
            *_too_large_steps(plan, rehearsed, federation, task, facts),
            *_small_ranges(plan, federation, task, facts),
            *filter(None, [facts.caution]),
            *describe(federation, plan.in_seed(plan.seeds[0])).warnings,
        ),
        accounting=tuple(
            planned(
                plan.privacy,
                plan.cohort,
                federation.clients,
                int(sizes.min()),
                plan.rounds,
                {label: algorithm.train for label, algorithm in plan.algorithms.items()},
            )
        ),
        pooled=tuple(label for label, algorithm in experiment.algorithm.items() if algorithm.pooled),
        clients_of_seed=plan.seeds[0] if plan.draws_clients else None,
    )


def _small_ranges(plan: Plan, federation: Federation, task: Task, facts: Probe) -> Iterator[str]:
    """Say so if updates of a rehearsal are out of the range of secure aggregation. A clip of dp bounds them anyway."""
    table = plan.privacy.secure_aggregation
    if table is None or plan.privacy.dp is not None or plan.compress.up is not None:
        return
    secure = PrivacyTable(secure_aggregation=table.model_copy(update={"lost": (0.0,) * 5}))
    for label, algorithm in plan.algorithms.items():
        protection = Protection(secure, plan.cohort, table.min_clients, 1)
        try:
            few, bound = table.min_clients, plan.cohort.max_examples
            rehearse(algorithm, federation, task, facts, few, epochs=1.0, protection=protection, max_examples=bound)
        except TrainingError as error:
            if not isinstance(error.__cause__, NobodySent):
                raise
            yield (
                f"{label}: clients may send nothing. In a rehearsal with {EXAMPLES} examples and one epoch, "
                f"{error.__cause__.why}."
            )


def _tested(federation: Federation, wanted: Sequence[SplitName] | None) -> int:
    """Count the examples that the global model is measured on: the server's, or those of all clients."""
    held = {split: len(y) for split, (_, y) in federation.server.items()}
    if wanted is None:
        return sum(held.values())
    return sum(held[split] if split in held else int(federation.sizes(split).sum()) for split in wanted)


def _measure_once(federation: Federation, task: Task, facts: Probe, splits: Sequence[SplitName]) -> None:
    """Measure the initial model at the client with most examples. Raise what a run would raise in your own code."""
    for split in splits:
        largest = int(federation.sizes(split).argmax())
        data = Clients(federation, (largest,), setup=facts.setup(group=1), round=1)
        try:
            evaluation.evaluate(task, task.initial(), data, 0, split).values(task)
        except Exception as error:
            raise data.blame(error, "evaluation", 0) from error


def _time_step(
    federation: Federation, task: Task, batch_size: int | str, sizes: np.ndarray[Any, Any]
) -> tuple[float, int]:
    """Return the seconds of a training step and its examples. Raise what a run would raise in your own code."""
    rows = int(min(256, max(1, sizes.mean()))) if batch_size == "full" else int(batch_size)
    rows = min(rows, max(1, int(sizes.max())))
    data = Clients(federation, (int(sizes.argmax()),), round=1)
    x, y = evaluation.batch(data, data.rows(0, "train")[:rows], task)
    module = task.module.train()
    parameters = [p for p in module.parameters() if p.requires_grad]
    times = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with generators.lent(), task.python_state.fresh():
            for _ in range(4):
                given = x.clone()  # a model may write into it
                began = time.perf_counter()
                torch.autograd.grad(task.batch_loss(module(given), y), parameters, allow_unused=True)
                times.append(time.perf_counter() - began)
    except Exception as error:
        raise data.blame(error, "local training, step 1", 0) from error
    finally:
        torch.set_num_threads(threads)
    return min(times) * 1.3 + 1e-4, rows  # the optimiser and the loop around it


def _sent(traffic: MessageBytes | None) -> str:
    if traffic is None:
        return "what only a run can tell"
    if not traffic.up and not traffic.down:
        return "nothing"
    return f"{size(traffic.up)} up and {size(traffic.down)} down a round"


def _instead(traffic: MessageBytes | None, plain: MessageBytes | None) -> str:
    """Say what compression changes."""
    if traffic is None or plain is None or not (plain.up or plain.down):
        return ""
    if traffic == plain:
        return ": [compress] finds no change of the model in its messages, so they are sent as they are"
    as_it_is = "; what its clients send is sent as it is" if traffic.up == plain.up else ""
    before = _sent(plain).removesuffix(" a round")
    return f", instead of {before} without [compress]{as_it_is}"


def size(count: float) -> str:
    """Write bytes in words.

    >>> size(1_234_567)
    '1.2 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Write seconds in words.

    >>> duration(90), duration(6000), duration(200_000)
    ('2 minutes', '1.7 hours', '2.3 days')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600 * 1.5:
        return f"{seconds / 60:.0f} minutes"
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
