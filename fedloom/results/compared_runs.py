"""Several runs as one, so that the tables and figures of a run also compare runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.errors import InputError, nearest
from fedloom.experiment.description import differences
from fedloom.results.comparisons import main_comparison
from fedloom.results.report_warnings import about_algorithms, about_numbers, about_seeds, about_weights
from fedloom.results.result import CellResult, Result
from fedloom.results.run_data import Cell, RunData
from fedloom.results.run_values import ClientValues, Curve
from fedloom.results.sentences import say

MEASURING = {"headline": "final", "clients": "all"}  # keys of [evaluate] that must agree, with their defaults
OF_A_RUN = ("name", "seeds", "algorithm", "code", "metrics")  # parts of a description that may differ between runs


@dataclass(frozen=True)
class ComparedRuns(RunData):
    """The cells of several runs. An algorithm that is in two of them is named after its run, too.

    An algorithm whose models and numbers are the same in two runs is there once: a copy of a result is not evidence,
    and it would widen the intervals of all pairs.
    """

    sources: Mapping[str, tuple[RunData, str]] = field(default_factory=dict)  # label → its run, and its label there
    copies: Sequence[str] = ()  # which algorithms are the same in several runs, a sentence each
    other_clients: bool = False  # whether clients hold other examples, so that only the test of global models is shared

    @cached_property
    def result(self) -> Result:
        """The numbers that the runs end with, of the metrics that all of them have."""
        cells = [
            replace(cell, algorithm=label, headline=self._shared(cell.headline))
            for label, (run, there) in self.sources.items()
            for cell in run.result.runs
            if cell.algorithm == there
        ]
        first = next(iter(self.sources.values()))[0].result
        return replace(first, folder=self.folder, name=self.name, runs=tuple(cells), metrics=tuple(self.metrics))

    @property
    def data_fingerprints(self) -> dict[str, str]:
        """Those of all runs: one may have more seeds than another, each with data of its own."""
        found = (run.data_fingerprints for run, _ in self.sources.values())
        return {seed: data for one in found for seed, data in one.items()}

    @property
    def has_one_split(self) -> bool:
        return all(run.has_one_split for run, _ in self.sources.values())

    def _shared(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The numbers that are about the same examples in all runs."""
        return {key: value for key, value in numbers.items() if not self.other_clients or key.startswith("server_test")}

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

    def choose(self, wanted: Sequence[str]) -> ComparedRuns:
        """The same runs with some of the algorithms: of all runs (`fedavg`), or of one (`fedavg (RUN)`)."""
        labels = {label for name in wanted for label in self.named(name)}
        sources = {label: source for label, source in self.sources.items() if label in labels}
        cells = {place: cell for place, cell in self.cells.items() if place[0] in labels}
        kept = tuple(f"{there} is the same " for _, there in sources.values())
        copies = [text for text in self.copies if text.startswith(kept)]
        return replace(self, sources=sources, cells=cells, copies=copies)

    def baseline(self, name: str) -> str:
        """The one label that a name stands for, if it has a number in the main comparison."""
        found, main = self.named(name), main_comparison(self)
        if len(found) > 1:
            raise InputError(f"'{name}' stands for several algorithms. Choose one as the baseline: {_listed(found)}.")
        if main is not None and found[0] not in main.values:
            known = _listed(main.values)
            raise InputError(f"{found[0]} has no number for '{main.title}', so it is no baseline. Known: {known}.")
        return found[0]

    def named(self, name: str) -> list[str]:
        """The labels that a name stands for; * matches anything."""
        found = [label for label, (_, there) in self.sources.items() if _matches(name, label) or _matches(name, there)]
        if not found:
            known = list(self.sources)
            raise InputError(f"No run has an algorithm '{name}'. Known: {_listed(known)}.{nearest(name, known)}")
        return found

    def is_pooled(self, label: str) -> bool:
        run, there = self.sources[label]
        return run.is_pooled(there)

    def leaves_out_clients(self, phase: str) -> bool:
        return not self.other_clients and any(run.leaves_out_clients(phase) for run, _ in self.sources.values())

    def client_values(self, label: str, seed: int, phase: str, metric: str, split: str = "test") -> ClientValues:
        run, there = self.sources[label]
        found = run.client_values(there, seed, phase, metric, split)
        return found.keep(np.full(len(found), not self.other_clients))

    def _stored_values(self, label: str, seed: int, phase: str, metric: str, split: str) -> ClientValues:
        run, there = self.sources[label]
        found = run._stored_values(there, seed, phase, metric, split)
        return found.keep(np.full(len(found), not self.other_clients))

    def summary(self, label: str, seed: int) -> dict[str, float]:
        run, there = self.sources[label]
        return self._shared(run.summary(there, seed))

    def server_values(self, label: str, seed: int, metric: str, split: str = "test") -> Curve:
        run, there = self.sources[label]
        return run.server_values(there, seed, metric, split)

    def pooled_values(self, label: str, seed: int, phase: str, metric: str, split: str = "test") -> Curve:
        run, there = self.sources[label]
        rounds, values = run.pooled_values(there, seed, phase, metric, split)
        return (rounds[:0], values[:0]) if self.other_clients else (rounds, values)

    def rows(self, table: str, label: str, seed: int) -> Sequence[dict[str, Any]]:
        run, there = self.sources[label]
        return run.rows(table, there, seed)


def _matches(pattern: str, label: str) -> bool:
    return label == pattern or fnmatchcase(label, pattern)  # a folder's name may have brackets


def combine(folders: Sequence[Path]) -> ComparedRuns:
    """Read several runs as one, or the algorithms of one. Raise if they are not comparable, and say why."""
    twice = next((path for path, count in Counter(path.resolve() for path in folders).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice. Name it once to compare its own algorithms.")
    runs = [RunData.read(folder) for folder in folders]
    for one, other in combinations(runs, 2):
        reasons = list(_not_comparable(one, other))
        if reasons:
            listed = "\n  ".join(reasons)
            raise InputError(f"{one.folder} and {other.folder} are not comparable:\n  {listed}")
    kept, copies = _without_copies([(run, label) for run in runs for label in run.labels])
    labels = Counter(label for _, label in kept)
    names = Counter(run.folder.resolve().name for run in runs)
    sources: dict[str, tuple[RunData, str]] = {}
    cells: dict[Cell, dict[str, Any]] = {}
    for run, there in kept:
        folder = run.folder.resolve()
        name = folder.name if names[folder.name] == 1 else f"{folder.parent.name}/{folder.name}"
        label = there if labels[there] == 1 else f"{there} ({name})"
        sources[label] = run, there
        cells |= {(label, seed): cell for (known, seed), cell in run.cells.items() if known == there}
    first = runs[0]
    metrics = {key: info for key, info in first.metrics.items() if all(run.metrics.get(key) == info for run in runs)}
    other_clients = any(_have_other_clients(one, other) for one, other in combinations(runs, 2))
    kept_parts: dict[str, Any] = {"sources": sources, "copies": copies, "other_clients": other_clients}
    return ComparedRuns(first.folder, cells, metrics, first.clients, first.facts, **kept_parts)


def _without_copies(all_sources: Sequence[tuple[RunData, str]]) -> tuple[list[tuple[RunData, str]], list[str]]:
    """Leave out an algorithm that another run has with the same models and numbers; say which ones."""
    kept: list[tuple[RunData, str]] = []
    copies = []
    for run, label in all_sources:
        same = next((place for place, other in enumerate(kept) if _same(other, (run, label))), None)
        if same is None:
            kept.append((run, label))
            continue
        known = kept[same][0]
        copies.append(f"{label} is the same in {known.folder} and {run.folder}, with the same weights: it counts once.")
        if len(_finished(run, label)) > len(_finished(known, label)):
            kept[same] = run, label
    return kept, copies


def _same(one: tuple[RunData, str], other: tuple[RunData, str]) -> bool:
    """Whether two runs have an algorithm of the same name with the same weights and numbers, in all seeds of one."""
    if one[1] != other[1]:
        return False
    these, those = _finished(*one), _finished(*other)
    seeds = these.keys() & those.keys()
    return (
        bool(seeds)
        and len(seeds) == min(len(these), len(those))
        and all(
            these[seed].weights_sha256 == those[seed].weights_sha256
            and all(those[seed].headline.get(key, value) == value for key, value in these[seed].headline.items())
            for seed in seeds
        )
    )


def _finished(run: RunData, label: str) -> dict[int, CellResult]:
    """Seed → the finished cell of an algorithm whose weights are known."""
    known = (cell for cell in run.result.runs if cell.algorithm == label and cell.weights_sha256)
    return {cell.seed: cell for cell in known if cell.status == "done"}


def _not_comparable(one: RunData, other: RunData) -> Iterator[str]:
    """Why two runs cannot be compared, a sentence each."""
    pair = one, other
    done = [_finished_seeds(run) for run in pair]
    unfinished = [run for run, seeds in zip(pair, done, strict=True) if not seeds]
    yield from (f"{run.folder} has no finished cell: it is {run.result.status}." for run in unfinished)
    if not {*done[0]} & {*done[1]} and not unfinished:
        yield f"They have no finished seed in common: {_listed(done[0])} and {_listed(done[1])}."
    if _have_other_clients(one, other) and not _share_test(one, other):
        changed = differences(one.description.get("data"), other.description.get("data"), "data")
        classes = [(run.facts.get("labels") or {}).get("classes") or () for run in pair]
        known = f" ({'; '.join(changed)})" if changed and isinstance(one.description.get("data"), Mapping) else ""
        if all(classes) and classes[0] != classes[1]:  # such as 1, 2 in a file, and 0, 1 in a program
            known = f" (their classes are called {_listed(classes[0])} and {_listed(classes[1])})"
        yield (
            f"Their examples, partitions or splits differ{known}, and their global models are not tested on the same "
            "examples. Test them on examples that the server holds, such as server = 0.2 in [data], read their reports "
            f"side by side, or see both with `fedloom watch {one.folder} {other.folder}`."
        )
    if not {*one.metrics.values()} & {*other.metrics.values()}:
        yield f"They have no metric in common: {_listed(one.metrics)} and {_listed(other.metrics)}."
    for key, default in MEASURING.items():
        ways = [run.evaluation.get(key, default) for run in (one, other)]
        if ways[0] != ways[1]:
            yield f"Their numbers are about different rounds or clients: evaluate.{key} is {ways[0]} and {ways[1]}."
    rules, every = (
        [run.evaluation.get(key, default) for run in pair] for key, default in (("headline", "final"), ("every", 1))
    )
    if every[0] != every[1] and rules[0] == rules[1] != "final":
        yield f"Their headline, {rules[0]}, is about different rounds: evaluate.every is {every[0]} and {every[1]}."


def _finished_seeds(run: RunData) -> list[int]:
    return list(dict.fromkeys(seed for (_, seed), cell in run.cells.items() if cell["status"] == "done"))


def _common_seeds(one: RunData, other: RunData) -> list[int]:
    return sorted({*_finished_seeds(one)} & {*_finished_seeds(other)})


def _have_other_clients(one: RunData, other: RunData) -> bool:
    """Whether clients hold other examples in one run than in the other, or divide them otherwise into splits."""
    data = one.data_fingerprints, other.data_fingerprints
    return any(_of_seed(data[0], seed) != _of_seed(data[1], seed) for seed in _common_seeds(one, other))


def _share_test(one: RunData, other: RunData) -> bool:
    """Whether both test global models, and on the same examples."""
    tests = one.test_fingerprints, other.test_fingerprints
    pairs = [(_of_seed(tests[0], seed), _of_seed(tests[1], seed)) for seed in _common_seeds(one, other)]
    return one.has_server_test and other.has_server_test and all(a is not None and a == b for a, b in pairs)


def _of_seed(known: Mapping[str, str], seed: int) -> str | None:
    """The fingerprint of a seed. Of seeds that share their data, earlier versions kept that of the first one only."""
    return known.get(str(seed), next(iter(known.values()), None))


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def what_differs(run: ComparedRuns) -> list[str]:
    """What differs between the first run and each other, and in the settings of algorithms of both; a line each."""
    compared, lines = _compared(run), list(run.copies)
    first, first_labels = compared[0]
    labels = dict.fromkeys(there for _, there in run.sources.values())
    for other, other_labels in compared[1:]:
        before, after = map(_of_both, (first, other))
        if "files" not in before or "files" not in after:  # an earlier version did not record which there were
            before, after = ({k: v for k, v in one.items() if k != "files"} for one in (before, after))
        before, after, unknown = _of_shared_seeds(first, other, before, after)
        rounds = [_most_rounds(first, first_labels), _most_rounds(other, other_labels)]
        changed = [f"rounds: {rounds[0]} → {rounds[1]}"] if rounds[0] != rounds[1] else []
        changed += [*differences(before, after), *unknown, *_own_settings(first, other, labels)]
        lines += [f"{first.folder} → {other.folder}: {line}" for line in changed]
        if first.description.get("cohort") != other.description.get("cohort"):
            lines.append("Numbers after local training are about the clients that each run drew, which differ.")
    return lines


def _of_shared_seeds(
    one: RunData, other: RunData, before: dict[str, Any], after: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Leave out what Python programs recorded of their first seeds only, if these differ, and say what is not known."""
    first = [run.seeds[0] for run in (one, other)]
    if first[0] == first[1] or any(isinstance(run.description.get("data"), Mapping) for run in (one, other)):
        return before, after, []
    leave = {"values your code uses"} | (set() if _have_other_clients(one, other) else {"data"})
    before, after = ({key: value for key, value in run.items() if key not in leave} for run in (before, after))
    for run in (before, after):
        run["task"] = {key: value for key, value in (run.get("task") or {}).items() if key != "init"}
    begin = f"they begin with seeds {first[0]} and {first[1]}"
    return before, after, [f"{begin}, so whether initial weights and values in the model's code differ is not known"]


def _most_rounds(run: RunData, labels: Collection[str]) -> int:
    """How many rounds any of these algorithms has done."""
    return max(int(cell["rounds_done"]) for (label, _), cell in run.cells.items() if label in labels)


def _of_both(run: RunData) -> dict[str, Any]:
    """What decides the result of a run, whatever algorithms it has."""
    found = {key: value for key, value in run.description.items() if key not in OF_A_RUN}
    values = {key: value for key, value in found.pop("values", {}).items() if key in ("model", "args", "loss")}
    return {**found, **({"values your code uses": values} if values else {})}


def _own_settings(one: RunData, other: RunData, labels: Iterable[str]) -> Iterator[str]:
    """What differs in the settings of algorithms that both runs have, beyond what [train] already says."""
    trains = [run.description.get("train") or {} for run in (one, other)]
    said = differences(trains[0], trains[1], "train")
    for label in labels:
        if not all(label in (run.description.get("algorithm") or {}) for run in (one, other)):
            continue
        tables = [run.description["algorithm"][label] for run in (one, other)]
        before, after = (_settings(train, table) for train, table in zip(trains, tables, strict=True))
        if bool(trains[0]) != bool(trains[1]):  # one is of a Python program, where the name is that of a class
            before, after = ({k: v for k, v in one.items() if k != "name"} for one in (before, after))
        for line in differences(before, after, f"algorithm.{label}"):
            if line.replace(f"algorithm.{label}", "train", 1) not in said:
                yield line
        for key in sorted(trains[0].keys() & trains[1].keys()):
            if trains[0][key] != trains[1][key] and before.get(key) == after.get(key):  # it has a value of its own
                yield f"algorithm.{label}.{key}: {before.get(key)} in both"


def _settings(train: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of an algorithm: those of [train], and its own. A Python program has no [train]."""
    own = {**train, **table, **(table.get("train") or {})}
    return {key: value for key, value in own.items() if key != "train" and value is not None}


def cautions(run: ComparedRuns) -> Iterator[str]:
    """What a reader should know before trusting a ranking of the algorithms of several runs."""
    if run.other_clients:
        yield say("caution", "other_clients")
    rounds: dict[int, list[str]] = {}
    for label, (source, there) in run.sources.items():
        rounds.setdefault(_most_rounds(source, {there}), []).append(label)
    if len(rounds) > 1:
        listed = "; ".join(f"{count} rounds: {', '.join(labels)}" for count, labels in rounds.items())
        yield say("caution", "other_rounds", rounds=listed)
    said: dict[str, None] = {}  # each sentence once
    for source, labels in _compared(run):
        here = {there: label for label, (one, there) in run.sources.items() if one.folder == source.folder}
        said |= dict.fromkeys(_renamed(text, here) for text in about_numbers(source, labels))
    yield from said
    yield from about_seeds(run)
    said = {}
    for source, labels in _compared(run):
        said |= dict.fromkeys(about_algorithms(source, {*source.labels} - labels))
    yield from said
    if not run.other_clients:
        yield from about_weights(run, run.sources)
        return
    for source, _ in _compared(run):  # each has clients of its own sizes
        yield from about_weights(source, {name: one for name, one in run.sources.items() if one[0] is source})


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """A sentence that begins with algorithms' labels in their run, with their labels in the comparison instead.

    >>> _renamed("fedavg, local may diverge.", {"fedavg": "fedavg (one)", "local": "local (one)"})
    'fedavg (one), local (one) may diverge.'
    >>> _renamed("fedavg and local ended with the same weights.", {"fedavg": "fedavg (one)", "local": "local (one)"})
    'fedavg (one) and local (one) ended with the same weights.'
    """
    label = max((label for label in names if text.startswith((f"{label} ", f"{label}, "))), key=len, default="")
    rest = text.removeprefix(label)
    if label and (then := next((word for word in (", ", " and ") if rest.startswith(word)), "")):
        rest = then + _renamed(rest.removeprefix(then), names)
    return names.get(label, "") + rest


def _compared(run: ComparedRuns) -> list[tuple[RunData, set[str]]]:
    """Each run, with the labels of those of its algorithms that are compared."""
    labels: dict[Path, set[str]] = {}
    for source, there in run.sources.values():
        labels.setdefault(source.folder, set()).add(there)
    return [(source, labels[source.folder]) for source in {one.folder: one for one, _ in run.sources.values()}.values()]
