"""Try many settings of one experiment and rank them by validation data; no test split is used.

Every setting is a run in its own folder, so a sweep continues where it stopped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedloom.data.build import as_split
from fedloom.errors import InputError, TrainingError
from fedloom.experiment import experiment_file
from fedloom.experiment.description import identity
from fedloom.experiment.experiment_file import Experiment
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress, Silent
from fedloom.experiment.run import run_plan
from fedloom.experiment.run_folder import has_own_models
from fedloom.files import write_atomically
from fedloom.metrics import short_name
from fedloom.results.common_clients import at_end, measured, only, shared
from fedloom.results.figure_style import CaptionedFigure
from fedloom.results.report_warnings import FEW_SEEDS
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from fedloom.results.run_values import MetricInfo
from fedloom.results.sentences import say
from fedloom.results.statistics import Spread, spread
from fedloom.results.table import Table, Value, show
from fedloom.results.table import write as write_tables
from fedloom.tuning import sweep_figure, sweep_folder
from fedloom.tuning.search_space import Choices, Setting, name, settings, short
from fedloom.tuning.sweep_advice import of_another, promises

MODELS = {  # the model and the data that settings are ranked by, as keys of a cell's numbers and in words
    "server_validation": "the global model on validation data",
    "validation": "the final model on the clients' own validation splits",
}
KEEPS_CLIENTS = ("normalize", "scale_target", "split")  # keys of [data] that move no example to another client


@dataclass(eq=False)
class Trial:
    """One setting with one algorithm: what was measured on validation data, for each seed."""

    setting: Setting  # of the keys that change this algorithm
    label: str
    values: dict[int, float] = field(default_factory=dict)  # by seed
    error: str = ""
    result: Result | None = None
    pruned: bool = False  # it was behind early on, and was not run to the end

    @property
    def spread(self) -> Spread:
        """Mean and interval over seeds."""
        return spread(list(self.values.values()))

    def ties(self, other: Trial) -> bool:
        """Whether the means are equal, apart from rounding."""
        return math.isclose(self.spread.mean, other.spread.mean, rel_tol=1e-9)

    def value(self, key: str) -> str | None:
        """The value of a key as you would type it; None if the key does not change this algorithm."""
        return short(self.setting[key]) if key in self.setting else None

    @property
    def place(self) -> str:
        """The folder of its run, below the sweep's `settings`."""
        text = name(self.setting)
        plain = re.sub(r"[^\w.=+-]+", "_", text)
        if plain != text.replace(" ", "_") or len(plain) >= 100:
            plain = f"{plain[:80]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        return f"{plain}/{self.label}"


@dataclass(frozen=True)
class SweepResult:
    """What a sweep found."""

    folder: Path
    metric: MetricInfo
    measured: str  # which model on which data, in words
    trials: tuple[Trial, ...]  # the best first
    unchanged: tuple[str, ...] = ()  # algorithms that no setting changes: they were not run
    # seed → at how many clients all have a value, if not alike; 0: each setting has a mean over clients of its own
    common: Mapping[int, int] = field(default_factory=dict)
    spends: bool = False  # whether settings have differential privacy: each run of theirs spends its own ε

    @property
    def keys(self) -> list[str]:
        """The keys that change an algorithm."""
        return list(dict.fromkeys(key for trial in self.trials for key in trial.setting))

    def best(self, label: str | None = None) -> Trial | None:
        """Return the best setting, of one algorithm or of all."""
        whole = (trial for trial in self.trials if trial.values and not trial.pruned)
        return next((trial for trial in whole if label in (None, trial.label)), None)

    def ties(self, best: Trial) -> list[Trial]:
        """Return the settings of the same algorithm that have the mean of the best one, which is the first of them."""
        return [trial for trial in self.trials if trial.label == best.label and self.rank(trial) == self.rank(best)]

    def rank(self, trial: Trial) -> int | None:
        """Return a setting's place; equal means share one, and what failed or was not run to the end has none."""
        if not trial.values or trial.pruned:
            return None
        return next(place for place, one in enumerate(self.trials, 1) if one.ties(trial))

    def table(self) -> Table:
        """List every setting that was tried, the best first."""
        keys = self.keys
        shown, deviation = self.metric.number_format, self.metric.deviation_format
        columns: list[tuple[str, str, Callable[[Trial], Value]]] = [  # name, kind, value
            ("rank", "whole", self.rank),
            ("algorithm", "text", lambda one: one.label),
            *((key, "text", lambda one, key=key: one.value(key)) for key in keys),
            ("mean", shown, lambda one: one.spread.mean if one.values else None),
            ("std over seeds", deviation, lambda one: one.spread.std),
            ("95 % low", shown, lambda one: self._end(one.spread, one.spread.low)),
            ("95 % high", shown, lambda one: self._end(one.spread, one.spread.high)),
            ("seeds", "whole", lambda one: one.spread.count),
            ("remark", "text", lambda one: one.error),
        ]
        if len({trial.label for trial in self.trials}) == 1:
            del columns[1]
        if not any(trial.error for trial in self.trials):
            del columns[-1]
        rows = tuple(tuple(value(trial) for _, _, value in columns) for trial in self.trials)
        about = {"tried": len(self.trials), "metric": self.metric.name, "measured": self.measured}
        chosen = "" if promises(self) else say("note", "sweep_chooses")
        note = f"{say('note', 'sweep', **about)} {chosen}".rstrip()
        ends = [end for trial in self.trials if trial.spread.std > 0 for end in trial.spread.interval]
        if self.metric.share and ends and (min(ends) < 0 or max(ends) > 1):
            note += " " + say("note", "beyond")
        note = " ".join([note, *self.cautions()])
        ranks = [rank for trial in self.trials if (rank := self.rank(trial)) is not None]
        if len(set(ranks)) < len(ranks):
            note += " Settings with the same mean tie: they share a rank."
        if self.unchanged:
            note += f" Not run, because these settings do not change it: {', '.join(self.unchanged)}."
        names, kinds, _ = zip(*columns, strict=True)
        return Table("sweep", f"Sweep over {', '.join(keys)}", names, rows, kinds, note)

    def _end(self, over_seeds: Spread, end: float) -> float | None:
        """An end of the interval; none if all seeds agree, which says nothing about chance."""
        return end if over_seeds.std else None

    def cautions(self) -> Iterator[str]:
        """What few seeds leave open, and what clients pay for all these runs."""
        seeds = min((trial.spread.count for trial in self.trials if trial.values), default=FEW_SEEDS)
        if seeds < FEW_SEEDS:
            yield say("caution", "one_seed" if seeds == 1 else "few_seeds", seeds=seeds)
            yield say("caution", "near_in_a_sweep")
        if self.common:
            counts = ", ".join(f"{count} (seed {seed})" for seed, count in self.common.items() if count)
            apart = ", ".join(str(seed) for seed, count in self.common.items() if not count)
            if counts:
                yield say("caution", "uneven_in_a_sweep", metric=self.metric.name, counts=counts)
            if apart:
                yield say("caution", "apart_in_a_sweep", metric=self.metric.name, seeds=apart)
        if self.spends:
            runs = sum(trial.spread.count for trial in self.trials)
            yield say("caution", "spent_in_a_sweep", runs=runs)

    def figure(self) -> CaptionedFigure | None:
        """Draw every algorithm with the settings that it was tried with; None if nothing was varied."""
        return sweep_figure.draw(self)

    def write(self) -> list[Path]:
        """Write the table as CSV, Markdown and LaTeX, the figure as PNG, SVG and PDF, and everything as JSON."""
        figure = self.figure()
        files = [*write_tables([self.table()], self.folder), *(figure.save(self.folder) if figure is not None else ())]
        sweep_folder.finish(self.folder, self.json(), self.in_short())
        return files

    def in_short(self) -> str:
        """The best setting with its number, or from where to where the numbers go; empty if nothing was measured."""
        best = self.best()
        if best is None:
            return ""
        if promises(self):
            means = sorted(trial.spread.mean for trial in self.trials if self.rank(trial) is not None)
            low, high = (show(mean, self.metric.number_format) for mean in (means[0], means[-1]))
            return f"{low} to {high} validation {self.metric.name}"
        label = f"{best.label}, " if len({trial.label for trial in self.trials}) > 1 else ""
        mean = show(best.spread.mean, self.metric.number_format)
        return f"{label}{name(best.setting)}: {mean} validation {self.metric.name}"

    def json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        tried = []
        for trial in self.trials:
            error = {"error": trial.error} if trial.error else {}
            known = {"setting": trial.setting, "algorithm": trial.label, "rank": self.rank(trial)}
            tried.append({**known, "values": trial.values, **error})
        ranked = {"metric": self.metric.name, "measured": self.measured, "cautions": [*self.cautions()]}
        return {"folder": str(self.folder), **ranked, "tried": tried}


def sweep(
    file: Path,
    over: Choices,
    *,
    changes: Mapping[str, Any] | None = None,
    random: int | None = None,
    seed: int = 0,
    out: Path | None = None,
    fresh: bool = False,
    prune: bool = False,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> SweepResult | None:
    """Try every setting and rank them by validation data; None if it was asked to stop before the end.

    With `prune`, all settings run for a third of the rounds, and only the better half of each algorithm's to the end.
    """
    if not over:
        raise InputError("Say what to sweep over, such as --over train.lr=0.01,0.1.")
    found = settings(over, random, seed)
    # read all of them before the first one runs: a mistake in the last one is found now
    written = [experiment_file.load(file, {**(changes or {}), **setting}) for setting in found]
    experiments = [_on_validation(one) for one in written]
    first = written[0]
    if any(one.algorithm.keys() != first.algorithm.keys() for one in written):
        raise InputError("A sweep needs the same algorithms in all settings: sweep over their keys, such as train.lr.")
    folder = out or Path("runs") / f"{first.name}-sweep"
    progress = progress or Silent()
    keys = _changing(file, changes or {}, found, experiments)
    labels = list(keys)
    tried: dict[tuple[str, str], tuple[Trial, Experiment]] = {}
    for setting, experiment in zip(found, experiments, strict=True):
        for label in labels:
            trial = Trial({key: setting[key] for key in setting if key in keys[label]}, label)
            tried.setdefault((label, name(trial.setting)), (trial, experiment))  # the same algorithm is tried once
    todo = list(tried.values())
    trials = [trial for trial, _ in todo]
    plans: dict[str, Plan] = {}

    def train(rounds: int | None, fresh: bool) -> bool:
        """Run all that are not pruned, for some rounds or to the end; false if it was asked to stop."""
        for number, (trial, experiment) in enumerate(todo, 1):
            if trial.pruned or trial.error:
                continue
            if not isinstance(progress, Silent):
                label = f" {trial.label}" if len(labels) > 1 else ""
                progress.note(f"{number} of {len(todo)}: {name(trial.setting)}{label}")
            plan, where = _plan(experiment, trial.label, plans), folder / "settings" / trial.place
            if rounds is not None:
                plan = replace(plan, rounds=rounds if fresh else max(rounds, _rounds_done(where)))
            try:
                # a continued sweep has many settings that are done
                trial.result = run_plan(
                    plan, where, fresh=fresh, progress=progress, should_stop=should_stop, say_if_done=False
                )
            except TrainingError as error:  # a setting that diverges is a result; the others continue
                progress.note(f"  failed: {error}")
                trial.error = str(error)
                continue
            if not trial.result.finished:
                return False
        return True

    early, decision = max(1, first.rounds // 3), folder / "pruned.json"
    with sweep_folder.running(folder, list(found[0]), fresh):
        if prune and early < first.rounds:
            if fresh or not decision.is_file():
                if not train(early, fresh):
                    return None
                content = {"after": early, "pruned": _behind(first, trials)}
                write_atomically(decision, json.dumps(content, indent=1).encode())
                fresh = False
            record = json.loads(decision.read_text())
            for trial in trials:
                if trial.place in record["pruned"]:
                    after = f"{record['after']} round" + ("s" if record["after"] > 1 else "")
                    trial.pruned, trial.error = True, f"behind after {after}: not run to the end"
                    trial.result = Result.read(folder / "settings" / trial.place)
        if not train(None, fresh):
            return None
        unchanged = tuple(label for label in first.algorithm if label not in labels)
        spends = any(one.privacy.dp or one.privacy.example_dp for one in written)
        ranked = replace(_ranked(folder, first, trials), unchanged=unchanged, spends=spends)
        ranked.write()
        return ranked


def _changing(
    file: Path, changes: Mapping[str, Any], found: Sequence[Setting], experiments: Sequence[Experiment]
) -> dict[str, list[str]]:
    """Return the algorithms that some setting changes, each with the keys that change it.

    A key changes an algorithm if without it, some setting would be another experiment for this algorithm. If no key
    changes anything, all algorithms are tried with all settings.
    """
    labels, keys = list(experiments[0].algorithm), list(found[0])
    changing: dict[str, list[str]] = {}
    for key in keys:
        left = set(labels)  # the algorithms that are not known to be changed
        for setting, experiment in zip(found, experiments, strict=True):
            try:
                rest = {other: value for other, value in setting.items() if other != key}
                without = _on_validation(experiment_file.load(file, {**changes, **rest}))
            except InputError:  # the others need it
                left = {label for label in labels if of_another(key, label, labels)}
                break
            left = {  # an algorithm that is not in the file is there because of its key
                label
                for label in left & without.algorithm.keys()
                if _decides(experiment, label) == _decides(without, label)
            }
            if not left:
                break
        for label in (label for label in labels if label not in left):
            changing.setdefault(label, []).append(key)
    return {label: changing[label] for label in labels if label in changing} or dict.fromkeys(labels, keys)


def _decides(experiment: Experiment, label: str) -> str:
    """Return what decides the result of one algorithm."""
    tables = {key: value for key, value in experiment.resolved().items() if key not in ("name", "train", "run")}
    algorithm = experiment.algorithm[label].model_dump(mode="json")
    return identity({**tables, "algorithm": [experiment.names[label], algorithm]})


def _rounds_done(folder: Path) -> int:
    """Return how far an earlier sweep ran a setting."""
    if not (folder / "run.db").is_file():
        return 0
    return max((cell.rounds for cell in Result.read(folder).runs), default=0)


def _behind(experiment: Experiment, trials: Sequence[Trial]) -> list[str]:
    """Return the worse half of each algorithm's settings, by what validation says now; ties with the better stay."""
    ranked = _ranked(Path(), experiment, trials).trials
    found = []
    for label in {trial.label for trial in trials}:
        able = [trial for trial in ranked if trial.label == label and trial.values]
        half = (len(able) + 1) // 2
        found += [trial.place for trial in able[half:] if not trial.ties(able[half - 1])]
    for trial in trials:
        trial.values.clear()
    return sorted(found)


def _on_validation(experiment: Experiment) -> Experiment:
    """Measure the same experiment on validation data only."""
    held = experiment.data.server
    at_server = isinstance(held, Mapping) and "validation" in held
    if as_split(experiment.data.split).validation == 0 and not at_server:
        raise InputError(
            "A sweep ranks by validation data, and there is none: [data] split gives the validation split a share of "
            "0. Set shares for training, validation and test there, such as split = [0.6, 0.2, 0.2]."
        )
    only = {"splits": ("validation",), "universal": False, "server": ("validation",), "headline": "final"}
    return experiment.replace(evaluate=experiment.evaluate.replace(**only))  # type: ignore[no-any-return]


def _plan(experiment: Experiment, label: str, plans: dict[str, Plan]) -> Plan:
    """Plan one algorithm, so that the others have a result if it diverges; share the data of an earlier plan."""
    only = experiment.choose([label])
    plan = Plan.of(only)
    key = json.dumps(only.resolved()["data"], sort_keys=True, default=str)
    return replace(plan, federation=plans.setdefault(key, plan).federation)


def _ranked(folder: Path, experiment: Experiment, trials: Sequence[Trial]) -> SweepResult:
    """Read what validation says of each setting, by seed, and sort."""
    results = [trial.result for trial in trials if trial.result is not None]
    place, metric = _measured(experiment, trials)
    for trial in trials:
        for cell in trial.result.runs if trial.result is not None else ():
            value = cell.final.get(f"{place}_{metric}", math.nan)
            if math.isfinite(value):
                trial.values[cell.seed] = value
    info = RunData.read(results[0].folder).metric(metric) if results else MetricInfo(metric, True, metric != "loss")
    common = _compare_at_common_clients(trials, metric) if place == "validation" and not info.is_mean else {}

    def order(trial: Trial) -> tuple[bool, bool, float]:
        mean = trial.spread.mean if trial.values else 0.0
        return not trial.values, trial.pruned, -mean if info.higher_is_better else mean

    return SweepResult(folder, info, MODELS[place], tuple(sorted(trials, key=order)), common=common)


def _compare_at_common_clients(trials: Sequence[Trial], metric: str) -> dict[int, int]:
    """Take means over the clients at which all settings have a value, in seeds in which some lack it at other clients.

    Return how many clients these are, by seed: 0 where every setting keeps the mean over its own clients, because
    settings divide the data otherwise, so that a number means another client, or have fewer than half in common.
    """
    runs = {trial: RunData.read(trial.result.folder) for trial in trials if trial.result is not None}
    counts = {}
    for seed in sorted({seed for trial in trials for seed in trial.values}):
        found = {
            trial: at_end(measured(run, trial.label, seed, "final", metric, "validation"))
            for trial, run in runs.items()
            if seed in trial.values and not trial.pruned
        }
        kept = shared([*found.values()])
        if kept is None:
            continue
        fewest = min(len(losses) for _, losses in found.values())
        alike = len({_divided(runs[trial]) for trial in found}) == 1
        counts[seed] = len(kept) if alike and 2 * len(kept) >= fewest else 0
        for trial, (known, _) in found.items() if counts[seed] else ():
            trial.values[seed] = float(only(known, kept).values.mean())
    return counts


def _divided(run: RunData) -> str:
    """What decides which examples a client has: two runs with the same have the same clients in a seed."""
    data = run.description.get("data") or {}
    return identity({key: value for key, value in data.items() if key not in KEEPS_CLIENTS})


def _measured(experiment: Experiment, trials: Sequence[Trial]) -> tuple[str, str]:
    """Return what to rank by: the place of a number, which is one of MODELS, and its metric.

    It is the validation number of the headline of `fedloom run`: the global model if the server tests it, else the
    models that clients end with. Where clients end with models of their own, the global model says nothing about them.
    """
    cells = [cell for trial in trials if trial.result is not None for cell in trial.result.runs]
    personal = any(has_own_models(experiment.algorithm[trial.label]) for trial in trials)
    found = next((trial.result.metrics for trial in trials if trial.result is not None), ())
    named = found if experiment.task.metrics is None else experiment.task.metrics
    metrics = (short_name(next(iter(named), "loss")), "loss")  # loss: if it is undefined everywhere
    places = list(MODELS) if _server_tests(experiment) and not personal else list(reversed(MODELS))
    for place, metric in itertools.product(places, metrics):
        known = [f"{place}_{metric}" in cell.final for cell in cells]
        if any(known) and (all(known) or place == "validation"):
            return place, metric
    return places[0], metrics[0]


def _server_tests(experiment: Experiment) -> bool:
    """Whether `fedloom run` measures the global model on test data."""
    if experiment.evaluate.server is not None:
        return "test" in experiment.evaluate.server
    held = experiment.data.server
    return "test" in held if isinstance(held, Mapping) else held != "none"
