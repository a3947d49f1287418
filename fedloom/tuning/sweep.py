"""Many settings of one experiment, ranked by validation: what is tried is never measured on a test split.

Every setting is a run of its own in a folder of its own, so a sweep goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.build import as_split
from fedloom.errors import InputError, TrainingError
from fedloom.experiment import experiment_file
from fedloom.experiment.experiment_file import Experiment
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress, Silent
from fedloom.experiment.run import run_plan
from fedloom.files import write_atomically
from fedloom.results.figure_style import STYLE, CaptionedFigure, lay_out, new_figure, show_percent
from fedloom.results.result import Result
from fedloom.results.statistics import spread
from fedloom.results.table import Table, Value, show
from fedloom.results.table import write as write_tables
from fedloom.tuning.search_space import Choices, Setting, name, settings, short


@dataclass
class Tried:
    """One setting with one algorithm: what validation says, by seed."""

    setting: Setting
    label: str
    values: dict[int, float] = field(default_factory=dict)
    error: str = ""
    result: Result | None = None
    pruned: bool = False  # was behind early on, and was not run to the end


@dataclass(frozen=True)
class Swept:
    """What a sweep found."""

    folder: Path
    metric: str
    measured: str
    higher: bool
    percent: bool
    tried: tuple[Tried, ...]  # the best first

    def best(self, label: str | None = None) -> Tried | None:
        """The best setting, of one algorithm or of all."""
        whole = (one for one in self.tried if one.values and not one.pruned)
        return next((one for one in whole if label in (None, one.label)), None)

    def table(self) -> Table:
        """Every setting that was tried, the best first."""
        keys = list(self.tried[0].setting)
        several = len({one.label for one in self.tried}) > 1
        rows: list[tuple[Value, ...]] = []
        for rank, one in enumerate(self.tried, 1):
            over = spread(list(one.values.values()))
            label = (one.label,) if several else ()
            rows.append(
                (
                    rank if one.values and not one.pruned else None,
                    *label,
                    *(short(one.setting[key]) for key in keys),
                    over.mean if one.values else None,
                    over.std,
                    max(over.low, 0.0) if self.percent else over.low,
                    min(over.high, 1.0) if self.percent else over.high,
                    over.count,
                    one.error,
                )
            )
        shown, deviation = ("percent", "deviation") if self.percent else ("number", "number")
        names = ("rank", *(("algorithm",) if several else ()), *keys)
        columns = (*names, "mean", "std over seeds", "95 % low", "95 % high", "seeds", "remark")
        kinds = ("whole", *["text"] * (len(names) - 1), shown, deviation, shown, shown, "whole", "text")
        note = (
            f"Every setting that was tried ({len(self.tried)} rows), ranked by {self.metric} on {self.measured}. The "
            "test splits were not looked at: measure the chosen setting on them once, with fedloom run. The best of "
            "many is the best partly by chance, so its validation number is optimistic."
        )
        if not any(spread(list(one.values.values())).count > 1 for one in self.tried):
            note += " One seed: neighbours in this ranking may differ by chance alone."
        wrong = len(columns) if any(one.error for one in self.tried) else len(columns) - 1
        shown_rows = tuple(row[:wrong] for row in rows)
        return Table("sweep", f"Sweep over {', '.join(keys)}", columns[:wrong], shown_rows, kinds[:wrong], note)

    def drawn(self) -> CaptionedFigure | None:
        """A heat map over two keys, or a line over one, for each algorithm."""
        import matplotlib

        keys = [key for key in self.tried[0].setting if len({short(one.setting[key]) for one in self.tried}) > 1]
        if not keys:
            return None
        with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
            return lay_out(self._heat_map(keys) if len(keys) > 1 else self._line(keys[0]))

    def _heat_map(self, keys: list[str]) -> CaptionedFigure:
        down, across = keys[:2]
        labels = list(dict.fromkeys(one.label for one in sorted(self.tried, key=lambda one: one.label)))
        rows, columns = (_axis([one.setting[key] for one in self.tried]) for key in (down, across))
        means = [spread(list(one.values.values())).mean for one in self.tried if one.values]
        width = 0.9 + max(1.9, 0.62 * len(columns)) * len(labels)
        figure = new_figure(width, 1.2 + 0.34 * len(rows))
        axes = figure.subplots(1, len(labels), sharey=True, squeeze=False)[0]
        low, high = (min(means), max(means)) if means else (0.0, 1.0)
        for here, label in zip(axes, labels, strict=True):
            grid = np.full((len(rows), len(columns)), np.nan)
            for one in reversed([one for one in self.tried if one.label == label and one.values]):  # the best last
                place = rows.index(short(one.setting[down])), columns.index(short(one.setting[across]))
                grid[place] = spread(list(one.values.values())).mean
            image = here.imshow(grid, cmap="cividis" if self.higher else "cividis_r", aspect="auto", vmin=low,
                                vmax=high if high > low else low + 1e-9)  # fmt: skip
            for (row, column), value in np.ndenumerate(grid):
                dark = (value - low) / (high - low or 1) < 0.55
                ink = "#222222" if not math.isfinite(value) or dark != self.higher else "white"
                text = show(float(value), "deviation" if self.percent else "number")
                here.text(column, row, text, ha="center", va="center", size=6.5, color=ink)
            here.set_xticks(range(len(columns)), columns)
            here.set_yticks(range(len(rows)), rows)
            here.set_title(label, loc="left")
            here.set_xlabel(across)
            here.spines[:].set_visible(False)
        axes[0].set_ylabel(down)
        bar = figure.colorbar(image, ax=list(axes), pad=0.02)
        bar.set_label(f"Validation {self.metric}")
        show_percent(bar.ax.yaxis, self.percent)
        unit = ", in per cent" if self.percent else ""
        rest = f" Best over {', '.join(keys[2:])}." if len(keys) > 2 else ""
        caption = f"Mean over seeds of {self.metric}{unit} on {self.measured}; – was not tried or failed.{rest}"
        return CaptionedFigure("sweep", f"{self.metric.capitalize()} over {down} and {across}", caption, figure)

    def _line(self, key: str) -> CaptionedFigure:
        from fedloom.results.learning_curves import line_style

        figure = new_figure(5.6, 2.7)
        axes = figure.add_subplot()
        labels = sorted({one.label for one in self.tried})
        places = _axis([one.setting[key] for one in self.tried])
        for number, label in enumerate(labels):
            found = {short(one.setting[key]): spread(list(one.values.values())) for one in self.tried
                     if one.label == label and one.values}  # fmt: skip
            at = [place for place, text in enumerate(places) if text in found]
            over = [found[places[place]] for place in at]
            style = line_style(number)
            axes.plot(at, [one.mean for one in over], **style, marker="o", markersize=3, linewidth=1.4, label=label)
            if all(one.count > 1 for one in over):
                axes.fill_between(at, [one.low for one in over], [one.high for one in over], color=style["color"],
                                  alpha=0.15, linewidth=0)  # fmt: skip
        axes.set_xticks(range(len(places)), places)
        axes.set_xlabel(key)
        axes.set_ylabel(f"Validation {self.metric}")
        axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
        show_percent(axes.yaxis, self.percent)
        if len(labels) > 1:
            figure.legend(loc="outside right center", frameon=False)
        caption = f"{self.metric.capitalize()} on {self.measured}: mean and, of several seeds, 95 % t interval."
        return CaptionedFigure("sweep", f"{self.metric.capitalize()} over {key}", caption, figure)

    def write(self) -> list[Path]:
        """The table as CSV, Markdown and LaTeX, and the figure as PNG and SVG."""
        figure = self.drawn()
        return [*write_tables([self.table()], self.folder), *(figure.save(self.folder) if figure is not None else ())]

    def json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "folder": str(self.folder),
            "metric": self.metric,
            "measured": self.measured,
            "tried": [
                {
                    "setting": o.setting,
                    "algorithm": o.label,
                    "values": o.values,
                    **({"error": o.error} if o.error else {}),
                }
                for o in self.tried
            ],
        }


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
) -> Swept | None:
    """Try every setting and rank them by validation; None when asked to stop before the end.

    With `prune`, all are run for a third of the rounds, and of each algorithm only the better half to the end.
    """
    if not over:
        raise InputError("Say what to sweep over, such as --over train.lr=0.01,0.1.")
    found = settings(over, random, seed)
    # all of them are read before the first is run: a mistake in the last one is found now
    experiments = [_validated(experiment_file.load(file, {**(changes or {}), **setting})) for setting in found]
    folder = out or Path("runs") / f"{experiments[0].name}-sweep"
    told = progress or Silent()
    labels = _affected(list(experiments[0].algorithm), list(found[0]))
    todo = [(setting, label, one) for setting, one in zip(found, experiments, strict=True) for label in labels]
    plans: dict[str, Plan] = {}
    tried = [Tried(setting, label) for setting, label, _ in todo]

    def train(rounds: int | None, fresh: bool) -> bool:
        """Run all that are still in, for so many rounds or to the end; false when asked to stop."""
        for number, (one, (setting, label, experiment)) in enumerate(zip(tried, todo, strict=True), 1):
            if one.pruned or one.error:
                continue
            if not isinstance(told, Silent):
                told.note(f"{number} of {len(todo)}: {name(setting)} {label if len(labels) > 1 else ''}".rstrip())
            # one algorithm at a time: when one of them diverges, the others still have a result
            only = experiment.replace(
                algorithm={label: experiment.algorithm[label]}, names={label: experiment.names[label]}
            )
            where = folder / "settings" / _folder(setting) / label
            plan = _plan(only, plans)
            if rounds is not None:
                plan = replace(plan, rounds=rounds if fresh else max(rounds, _rounds_done(where)))
            try:
                one.result = run_plan(plan, where, fresh=fresh, progress=told, should_stop=should_stop)
            except TrainingError as error:  # a setting that diverges is a result; the others go on
                told.note(f"  failed: {error}")
                one.error = str(error)
                continue
            if one.result.status != "done":
                return False
        return True

    early, decided = max(1, experiments[0].rounds // 3), folder / "pruned.json"
    if prune and early < experiments[0].rounds:
        if fresh or not decided.is_file():
            if not train(early, fresh):
                return None
            behind = _behind(experiments[0], tried)
            write_atomically(decided, json.dumps({"after": early, "pruned": behind}, indent=1).encode())
            fresh = False
        record = json.loads(decided.read_text())
        for one in tried:
            if _place(one) in record["pruned"]:
                one.pruned, one.error = True, f"behind after {record['after']} rounds: not run to the end"
                one.result = Result.read(folder / "settings" / _folder(one.setting) / one.label)
    return _ranked(folder, experiments[0], tried) if train(None, fresh) else None


def _affected(labels: list[str], keys: Sequence[str]) -> list[str]:
    """The algorithms that the keys are about: one algorithm's own settings change nothing in the others."""
    named = {key.split(".")[1] for key in keys if key.startswith("algorithm.")}
    only = all(key.startswith("algorithm.") for key in keys)
    return [label for label in labels if label in named] or labels if only else labels


def _rounds_done(folder: Path) -> int:
    """How far an earlier sweep has come with a setting."""
    if not (folder / "run.db").is_file():
        return 0
    return max((cell.rounds for cell in Result.read(folder).runs), default=0)


def _place(one: Tried) -> str:
    return f"{_folder(one.setting)}/{one.label}"


def _behind(experiment: Experiment, tried: Sequence[Tried]) -> list[str]:
    """The worse half of each algorithm's settings, by what validation says now."""
    _measure(experiment, tried)
    lower = _metric(experiment, tried)[1]
    found = []
    for label in {one.label for one in tried}:
        able = [one for one in tried if one.label == label and one.values]
        able.sort(key=lambda one: spread(list(one.values.values())).mean, reverse=not lower)
        found += [_place(one) for one in able[(len(able) + 1) // 2 :]]
    for one in tried:
        one.values.clear()
    return sorted(found)


def _axis(values: Sequence[Any]) -> list[str]:
    """The different values in order: numbers by size, others as they come."""
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return list(dict.fromkeys(short(value) for value in (sorted(values) if numeric else values)))


def _validated(experiment: Experiment) -> Experiment:
    """The same experiment, measured on validation data only."""
    if as_split(experiment.data.split).validation == 0 and experiment.data.server == "none":
        raise InputError(
            "A sweep ranks by validation data, and there is none: [data] split gives the validation split a share of 0."
        )
    measured = experiment.evaluate.replace(
        splits=("validation",), universal=False, server=("validation",), headline="final"
    )
    return experiment.replace(evaluate=measured)  # type: ignore[no-any-return]


def _plan(experiment: Experiment, plans: dict[str, Plan]) -> Plan:
    """A plan that shares the data of an earlier one, where it is the same."""
    plan = Plan.of(experiment)
    key = json.dumps(experiment.resolved()["data"], sort_keys=True, default=str)
    return replace(plan, federation=plans.setdefault(key, plan).federation)


def _folder(setting: Setting) -> str:
    text = name(setting)
    plain = re.sub(r"[^\w.=+-]+", "_", text)
    return (
        plain
        if plain == text.replace(" ", "_") and len(plain) < 100
        else (f"{plain[:80]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")
    )


def _metric(experiment: Experiment, tried: Sequence[Tried]) -> tuple[str, bool, bool]:
    """What ranks, whether less of it is better, and whether the server holds the validation data."""
    runs = [cell for one in tried if one.result is not None for cell in one.result.runs]
    metric = next(iter(experiment.task.metrics), "loss")
    if runs and not any(f"post_fit_validation_{metric}" in cell.final for cell in runs):
        metric = "loss"  # a metric that is no mean over examples
    served = bool(runs) and all(f"server_validation_{metric}" in cell.final for cell in runs)
    return metric, metric in ("loss", "mse", "mae"), served


def _measure(experiment: Experiment, tried: Sequence[Tried]) -> None:
    """What validation says of each setting, by seed."""
    metric, _, served = _metric(experiment, tried)
    key = f"{'server' if served else 'post_fit'}_validation_{metric}"
    for one in tried:
        for cell in one.result.runs if one.result is not None else ():
            if math.isfinite(cell.final.get(key, math.nan)):
                one.values[cell.seed] = cell.final[key]


def _ranked(folder: Path, experiment: Experiment, tried: Sequence[Tried]) -> Swept:
    metric, lower, served = _metric(experiment, tried)
    _measure(experiment, tried)

    def order(one: Tried) -> tuple[bool, bool, float]:
        mean = spread(list(one.values.values())).mean if one.values else 0.0
        return not one.values, one.pruned, mean if lower else -mean

    where = (
        "the global model on validation data" if served else "the clients' own validation splits after local training"
    )
    swept = Swept(
        folder, metric, where, not lower, metric == "accuracy" or metric.startswith("top_"),
        tuple(sorted(tried, key=order)),
    )  # fmt: skip
    swept.write()
    write_atomically(folder / "sweep.json", json.dumps(swept.json(), indent=1).encode())
    return swept
