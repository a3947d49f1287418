"""Run published experiments again, and put our results beside the published ones."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fedloom.errors import InputError
from fedloom.experiment import experiment_file
from fedloom.experiment.experiment_file import Experiment
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress, Silent
from fedloom.experiment.run import run_plan
from fedloom.files import write_atomically
from fedloom.papers.comparison import Planned, table
from fedloom.papers.curve_figure import draw
from fedloom.papers.measurement import Measure
from fedloom.papers.published import Reproduction, Row
from fedloom.results.report import write as write_report
from fedloom.results.run_data import RunData
from fedloom.results.table import Table
from fedloom.results.table import write as write_tables
from fedloom.tuning.estimate import estimate

RECORD = "reproduction.json"


def plan(
    reproduction: Reproduction,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> list[Planned]:
    """Choose the rows to run and estimate how long each takes; relative paths start at `base`."""
    wanted = reproduction.quick.rows if quick and not only else only
    rows = [row for row in reproduction.row if not wanted or any(fnmatch(row.name, one) for one in wanted)]
    nowhere = [one for one in wanted if not any(fnmatch(row.name, one) for row in rows)]
    if nowhere:
        known = "; ".join(row.name for row in reproduction.row)
        raise InputError(f"No row is called {', '.join(nowhere)}. Known: {known}.")
    found, speeds, shared = [], dict[str, float](), set[str]()
    for row in rows:
        experiment = experiment_of(reproduction, row, quick=quick, changes=changes, base=base)
        # the cost of a step depends on batches and cohort: time it once for each kind
        kind = f"{experiment.train} {experiment.cohort}"
        if kind not in speeds:
            speeds[kind] = estimate(experiment).seconds_a_round
        rounds = min(_expected(reproduction, row, experiment.rounds), experiment.rounds)
        cells = len(experiment.algorithm) * len(experiment.seeds)
        seconds = 0.0 if row.run in shared else speeds[kind] * rounds * cells + 3
        shared |= {row.run} - {""}
        found.append(Planned(row, experiment, seconds))
    return found


def experiment_of(
    reproduction: Reproduction,
    row: Row,
    *,
    quick: bool = False,
    changes: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> Experiment:
    """Make the experiment of a row."""
    settings = {**row.set, **(reproduction.quick.set if quick else {}), **(changes or {})}
    values = copy.deepcopy(reproduction.experiment)
    for key, value in settings.items():
        experiment_file.change(values, key, copy.deepcopy(value))
    experiment = experiment_file.parse(values, base or Path.cwd(), default_name="reproduction")
    if quick and experiment.rounds > reproduction.quick.rounds:
        values["rounds"] = reproduction.quick.rounds
        experiment = experiment_file.parse(values, experiment.base, default_name="reproduction")
    return experiment


def _expected(reproduction: Reproduction, row: Row, most: int) -> float:
    """Return how many rounds the published runs took."""
    told = [
        told
        for measure in reproduction.measure
        if measure.kind == "rounds_to"
        for told in row.numbers(measure).values()
    ]
    return max((one for one in told if not isinstance(one, str)), default=most)


def reproduce(
    reproduction: Reproduction,
    planned: Sequence[Planned],
    folder: Path,
    *,
    quick: bool = False,
    changes: Mapping[str, Any] | None = None,
    base: Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Table | None:
    """Run the rows that are not done, and write the table; None if it was asked to stop before the end.

    The table also has the rows of earlier runs in this folder with the same `quick`, `base` and `changes` (those of
    `[run]` may differ).
    """
    progress = progress or Silent()
    # [run] does not change the results
    changed = {key: str(value) for key, value in (changes or {}).items() if key.split(".")[0] != "run"}
    how = {"quick": quick, "changes": changed}
    known = {one.row.name: one for one in planned}
    for name, found in _recorded(folder / RECORD, how).items():
        row = next((row for row in reproduction.row if row.name == name), None)
        if row is not None and name not in known:
            experiment = experiment_of(reproduction, row, quick=quick, changes=changes, base=base)
            known[name] = Planned(row, experiment, 0.0, found["ours"], found["weights_sha256"])
    shown = [known[row.name] for row in reproduction.row if row.name in known]
    ran: dict[Path, RunData] = {}
    for one in planned:
        out = folder / "rows" / one.row.folder
        again = fresh and out not in ran
        result = run_plan(Plan.of(one.experiment), out, fresh=again, progress=progress, should_stop=should_stop)
        if result.status != "done":
            return None
        if out not in ran:
            ran[out] = RunData.read(out)
            if reproduction.report:
                write_report(out)
        one.sha256 = result.weights_sha256
        one.ours = {measure.name: measured(measure, ran[out], one.row.label) for measure in reproduction.measure}
        made = table(reproduction, shown, quick=quick, changed=changed)
        write_tables([made], folder)  # after every row, so that you can watch a long reproduction
        write_atomically(folder / RECORD, json.dumps(_record(shown, how), indent=1).encode())
        if reproduction.curves is not None:
            places = {done.row.name: folder / "rows" / done.row.folder for done in shown if done.ours}
            views = {name: ran.get(place) or RunData.read(place) for name, place in places.items()}
            target = next(iter(one.experiment.evaluate.target.values()), None)
            draw(reproduction.curves, views, reproduction.title, target).save(folder)
    return made


def _record(planned: Sequence[Planned], how: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all results, and how they were run."""
    return [
        {"row": one.row.name, "seeds": one.experiment.seeds, "ours": one.ours, "weights_sha256": one.sha256, **how}
        for one in planned
        if one.ours
    ]


def _recorded(path: Path, how: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows of an earlier record that were run in the same way."""
    rows = json.loads(path.read_text()) if path.is_file() else []
    return {one["row"]: one for one in rows if all(one.get(key) == value for key, value in how.items())}


def measured(measure: Measure, view: RunData, label: str | None = None) -> list[float | None]:
    """Take the measure of each seed."""
    if label is not None and label not in view.labels:
        raise InputError(f"There is no algorithm '{label}' in {view.folder}. Known: {', '.join(view.labels)}.")
    return [measure.value(view, *cell) for cell in view.cells if label in (None, cell[0])]


def duration(seconds: float) -> str:
    """Write a rough time in words.

    >>> duration(50), duration(4000), duration(200000)
    ('1 minute', '1.1 hours', '2.3 days')
    """
    minutes = math.ceil(seconds / 60)
    if minutes < 60:
        return f"{minutes} minute{'s' if minutes != 1 else ''}"
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
