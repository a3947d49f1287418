"""Measure on this machine how long an experiment's rounds take, and say how they are computed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedloom import machine
from fedloom.algorithm import Algorithm
from fedloom.backends.vector import Workers
from fedloom.clock.fleet import Fleet
from fedloom.experiment.experiment_file import Experiment
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress
from fedloom.experiment.tables import RunTable
from fedloom.experiment.worker_groups import backend_on, choose_setup, start_workers
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.training.clients import Setup
from fedloom.training.probe import Probe
from fedloom.training.trainers import LANES, SMALL_MODEL
from fedloom.tuning.estimate import duration, first_seed, size

WARM_UP = 2  # rounds that are not counted: they load, record and fill caches


@dataclass(frozen=True)
class Timing:
    """Rounds of one algorithm. Processor time and memory are None if the system does not report them."""

    algorithm: str
    first_round: float  # seconds from the start to the end of the first round, loading included
    rounds: tuple[float, ...]  # seconds of each round, with the experiment's evaluation
    training: tuple[float, ...]  # seconds of each round without any evaluation
    examples_a_second: float  # that clients train on, without evaluation
    busy: float | None  # the share of the workers' time in which they computed
    memory: int | None  # bytes: the peaks of all processes, added up

    def lines(self) -> list[str]:
        """Describe the timing in words."""
        low, middle, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        trained = statistics.median(self.training)
        found = [
            f"{duration(middle)} a round (half of them between {duration(low)} and {duration(high)}), "
            f"{duration(trained)} of it for training",
            f"{self.examples_a_second:,.0f} examples a second in training; "
            f"the first round was done after {duration(self.first_round)}",
        ]
        if self.busy is not None and self.memory is not None:
            found.append(f"workers computed {self.busy:.0%} of the time; at most {size(self.memory)} of memory in all")
        return found


@dataclass(frozen=True)
class Bench:
    """What was measured, and how clients were computed."""

    choices: tuple[str, ...]
    timings: tuple[Timing, ...]
    machine: dict[str, Any]

    def json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def bench(experiment: Experiment, rounds: int, progress: Progress) -> Bench:
    """Run some rounds of every algorithm with the experiment's first seed; nothing is stored."""
    began = time.perf_counter()
    workers = start_workers(experiment.run, progress.note)
    try:
        federation, task, facts, cohort = first_seed(Plan.of(experiment))
        setup = choose_setup(facts, experiment.run, cohort)
        common: dict[str, Any] = {"seed": experiment.seeds[0], "sampling": experiment.cohort}
        if (system := experiment.system) is not None:  # a virtual clock: its times decide who takes part
            common["fleet"] = Fleet.of(system, federation, experiment.seeds[0], step=0.01, base=experiment.base)
        common["backend"] = backend_on(workers, federation, task, setup)
        processes = None  # on a cluster they are on other machines
        if workers is None or isinstance(workers, Workers):
            processes = [process.pid for process in workers.processes] if workers else []
        timings = []
        progress.expect(len(experiment.algorithm), 2 * (rounds + WARM_UP))
        for label, algorithm in experiment.algorithm.items():
            measured = {"rounds": experiment.evaluate, "training": Evaluation(splits=(), server=())}
            running = {
                name: fit(federation, task, algorithm, 10**9, evaluation=evaluation, **common)
                for name, evaluation in measured.items()
            }

            def trained(cohort: Sequence[int], algorithm: Algorithm = algorithm) -> int:
                clients = range(federation.clients) if algorithm.pooled else cohort
                return int(federation.counts(clients, "train").sum() * algorithm.train.epochs)

            timings.append(_time(label, running, trained, rounds, began, processes, progress))
            began = time.perf_counter()
        chosen = choices(facts, setup, experiment.run, cohort, workers)
        return Bench(tuple(chosen), tuple(timings), machine.facts())
    finally:
        if workers is not None:
            workers.close()


def _time(
    label: str,
    running: Mapping[str, Iterator[RoundRecord]],
    trained: Callable[[Sequence[int]], int],
    rounds: int,
    began: float,
    processes: list[int] | None,
    progress: Progress,
) -> Timing:
    """Time rounds with and without evaluation in turns, so that a busy moment of the machine disturbs both."""
    seconds: dict[str, list[float]] = {name: [] for name in running}
    title = f"{label}, with and without evaluation"
    progress.begin(title, 0, 2 * (rounds + WARM_UP))
    examples, first, done = 0, 0.0, 0
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            used, clock = _processor_seconds(processes), time.perf_counter()
        for name, records in running.items():
            record = next(records)
            first, done = first or time.perf_counter() - began, done + 1
            progress.step(title, done, {}, record.seconds)
            if number >= WARM_UP:
                seconds[name].append(record.seconds)
        if number >= WARM_UP:
            examples += trained(record.cohort)
    progress.end(title)
    busy, elapsed = None, time.perf_counter() - clock
    worked = _processor_seconds(processes)
    if used is not None and worked is not None:
        busy = min((worked - used) / elapsed / max(len(processes or ()), 1), 1.0)
    timed = tuple(seconds["rounds"]), tuple(seconds["training"])
    return Timing(label, first, *timed, examples / sum(seconds["training"]), busy, _peak_bytes(processes))


def choices(facts: Probe, setup: Setup, settings: RunTable, cohort: int, workers: object) -> list[str]:
    """Say how clients are computed, and why."""
    where = "this process, one client after another" if workers is None else f"{workers} with one thread each"
    asked = "as requested" if settings.group != "auto" else ""
    if setup.group > 1:
        why = asked or f"a model of {size(facts.bytes)} is small (up to {size(SMALL_MODEL)}) and {cohort} take part"
        together = f"{setup.group} clients side by side: {why}"
    else:
        rule = f"side by side pays up to {size(SMALL_MODEL)} of model and from {2 * LANES} clients a round"
        why = asked or f"the model has {size(facts.bytes)} and {cohort} take part; {rule}"
        # known only if clients were to train side by side
        together = f"one client at a time: {facts.__dict__.get('cannot_group') or why}"
    if setup.replay and (kernels := facts.own_trial.recorded()[0]):
        steps = f"steps are recorded and replayed: {kernels} kernels each, without autograd"
    else:
        steps = "steps are done by autograd: this model's cannot be replayed"
    return [where, together, steps]


def _processor_seconds(processes: list[int] | None) -> float | None:
    """Return the processor time of the workers, or of this process if there are none."""
    if processes is None:
        return None
    measured = processes or [os.getpid()]
    try:
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in measured]
        return sum(int(part[11]) + int(part[12]) for part in fields) / os.sysconf("SC_CLK_TCK")
    except OSError:  # not Linux
        return None


def _peak_bytes(processes: list[int] | None) -> int | None:
    """Add up the peak memory of this process and of the workers."""
    if processes is None:
        return None
    try:
        found = [Path(f"/proc/{pid}/status").read_text() for pid in (os.getpid(), *processes)]
        peaks = [line for status in found for line in status.splitlines() if line.startswith("VmHWM")]
        return sum(int(line.split()[1]) * 1024 for line in peaks)
    except OSError:
        return None
