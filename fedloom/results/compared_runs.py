"""Several runs as one, so that the tables and figures of a run also compare runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from fedloom.errors import InputError, nearest
from fedloom.experiment.experiment_file import differences
from fedloom.results.result import Result
from fedloom.results.run_data import Cell, ClientValues, Curve, RunData

MEASURING = {"headline": "final", "clients": "all"}  # keys of [evaluate] that must agree, with their defaults
OF_A_RUN = ("name", "seeds", "algorithm", "code", "metrics")  # parts of a description that runs need not have alike


@dataclass(frozen=True)
class ComparedRuns(RunData):
    """The cells of several runs. An algorithm that is in two of them is named after its run, too."""

    sources: Mapping[str, tuple[RunData, str]] = field(default_factory=dict)  # label → its run, and its label there

    @cached_property
    def result(self) -> Result:
        """The numbers that the runs end with, of the metrics that all of them have."""
        cells = [
            replace(cell, algorithm=label)
            for label, (run, there) in self.sources.items()
            for cell in run.result.runs
            if cell.algorithm == there
        ]
        first = next(iter(self.sources.values()))[0].result
        return replace(first, folder=self.folder, name=self.name, runs=tuple(cells), metrics=tuple(self.metrics))

    @property
    def name(self) -> str:
        """The names of the runs."""
        return " and ".join(dict.fromkeys(run.folder.resolve().name for run, _ in self.sources.values()))

    def only(self, metric: str) -> ComparedRuns:
        """The same runs, seen through one metric."""
        if metric not in self.metrics:
            known = list(self.metrics)
            raise InputError(
                f"Not all runs have a metric '{metric}'. All have: {_listed(known)}.{nearest(metric, known)}"
            )
        return replace(self, metrics={metric: self.metrics[metric]})

    def is_pooled(self, label: str) -> bool:
        run, there = self.sources[label]
        return run.is_pooled(there)

    def client_values(self, label: str, seed: int, phase: str, metric: str, split: str = "test") -> ClientValues:
        run, there = self.sources[label]
        return run.client_values(there, seed, phase, metric, split)

    def server_values(self, label: str, seed: int, metric: str, split: str = "test") -> Curve:
        run, there = self.sources[label]
        return run.server_values(there, seed, metric, split)

    def pooled_values(self, label: str, seed: int, phase: str, metric: str, split: str = "test") -> Curve:
        run, there = self.sources[label]
        return run.pooled_values(there, seed, phase, metric, split)

    def rows(self, table: str, label: str, seed: int) -> Sequence[dict[str, Any]]:
        run, there = self.sources[label]
        return run.rows(table, there, seed)


def combine(folders: Sequence[Path]) -> ComparedRuns:
    """Read several runs as one. Raise if they are not comparable, and say why."""
    if len(folders) < 2:
        raise InputError("Name two runs or more to compare, such as: fedloom compare runs/one runs/two")
    twice = next((path for path, count in Counter(path.resolve() for path in folders).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice: a run compares its own algorithms in its report.")
    runs = [RunData.read(folder) for folder in folders]
    for one, other in combinations(runs, 2):
        reasons = list(_not_comparable(one, other))
        if reasons:
            listed = "\n  ".join(reasons)
            raise InputError(f"{one.folder} and {other.folder} are not comparable:\n  {listed}")
    labels = Counter(label for run in runs for label in run.labels)
    names = Counter(run.folder.resolve().name for run in runs)
    sources: dict[str, tuple[RunData, str]] = {}
    cells: dict[Cell, dict[str, Any]] = {}
    for run in runs:
        folder = run.folder.resolve()
        name = folder.name if names[folder.name] == 1 else f"{folder.parent.name}/{folder.name}"
        for there in run.labels:
            label = there if labels[there] == 1 else f"{there} ({name})"
            sources[label] = run, there
            cells |= {(label, seed): cell for (known, seed), cell in run.cells.items() if known == there}
    first = runs[0]
    metrics = {key: info for key, info in first.metrics.items() if all(run.metrics.get(key) == info for run in runs)}
    return ComparedRuns(first.folder, cells, metrics, first.clients, first.facts, sources=sources)


def _not_comparable(one: RunData, other: RunData) -> Iterator[str]:
    """Why two runs cannot be compared, a sentence each."""
    pair = one, other
    done = [
        list(dict.fromkeys(seed for (_, seed), cell in run.cells.items() if cell["status"] == "done")) for run in pair
    ]
    unfinished = [run for run, seeds in zip(pair, done, strict=True) if not seeds]
    yield from (f"{run.folder} has no finished cell: it is {run.result.status}." for run in unfinished)
    seeds = sorted({*done[0]} & {*done[1]})
    if not seeds and not unfinished:
        yield f"They have no finished seed in common: {_listed(done[0])} and {_listed(done[1])}."
    if any(_data(one, seed) != _data(other, seed) for seed in seeds):
        changed = differences(one.description.get("data"), other.description.get("data"), "data")
        known = f" ({'; '.join(changed)})" if changed and isinstance(one.description.get("data"), Mapping) else ""
        yield f"Their examples, partitions or splits differ{known}: the same algorithm would have other numbers."
    if not {*one.metrics.values()} & {*other.metrics.values()}:
        yield f"They have no metric in common: {_listed(one.metrics)} and {_listed(other.metrics)}."
    for key, default in MEASURING.items():
        ways = [run.evaluation.get(key, default) for run in (one, other)]
        if ways[0] != ways[1]:
            yield f"Their numbers are about different rounds or clients: evaluate.{key} is {ways[0]} and {ways[1]}."


def _data(run: RunData, seed: int) -> str | None:
    """The fingerprint of a seed's data. Where all seeds share their data, only the first seed has it."""
    known = run.data_fingerprints
    return known.get(str(seed), next(iter(known.values()), None))


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def what_differs(run: ComparedRuns) -> list[str]:
    """What differs between the first run and each other, apart from their algorithms; a line each."""
    runs = list({source.folder: source for source, _ in run.sources.values()}.values())
    first, lines = runs[0], []
    for other in runs[1:]:
        before, after = ({k: v for k, v in one.description.items() if k not in OF_A_RUN} for one in (first, other))
        rounds = [max(cell["rounds_done"] for cell in one.cells.values()) for one in (first, other)]
        changed = [f"rounds: {rounds[0]} → {rounds[1]}"] if rounds[0] != rounds[1] else []
        lines += [f"{first.folder} → {other.folder}: {line}" for line in [*changed, *differences(before, after)]]
        if first.description.get("cohort") != other.description.get("cohort"):
            lines.append("Numbers after local training are about the clients that each run drew, which differ.")
    return lines
