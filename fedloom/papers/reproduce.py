"""Run published experiments again, and put our results beside the published ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
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
from fedloom.papers.published import Measure, Reproduction, Row
from fedloom.results.report import write as write_report
from fedloom.results.run_data import RunData
from fedloom.results.table import Table
from fedloom.results.table import write as write_tables
from fedloom.tuning.estimate import Estimate, estimate

RECORD = "reproduction.json"


@dataclass(frozen=True)
class Rerun:
    """A reproduction and how to run it: shortened if `quick`, with changed keys; relative paths start at `base`."""

    reproduction: Reproduction
    quick: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    base: Path | None = None

    def plan(self, only: Sequence[str] = (), folder: Path | None = None) -> list[Planned]:
        """Choose the rows to run and estimate how long each takes.

        A row whose run has rows that are not wanted is run alone, unless that run has begun in the folder.
        """
        every = self.reproduction.row
        wanted = self.reproduction.quick.rows if self.quick and not only else only
        rows = [row for row in every if not wanted or any(fnmatch(row.name, one) for one in wanted)]
        nowhere = [one for one in wanted if not any(fnmatch(row.name, one) for row in rows)]
        if nowhere:
            raise InputError(f"No row is called {', '.join(nowhere)}. Known: {'; '.join(row.name for row in every)}.")
        more = {row.run for row in every if row not in rows and not (folder and self._place(folder, row).exists())}
        found, known, shared = [], dict[str, Estimate](), set[str]()
        for row in (row.alone if row.run in more else row for row in rows):
            experiment = self.experiment(row)
            # the cost of a round depends on batches, cohort, algorithms and metrics: time it once for each kind
            kind = f"{experiment.train} {experiment.cohort} {experiment.algorithm} {experiment.evaluate}"
            if kind not in known:
                known[kind] = estimate(experiment)
            cost = known[kind].seconds_a_round * self._rounds(row, experiment) + known[kind].seconds_at_the_end
            cells = len(experiment.algorithm) * len(experiment.seeds)
            seconds = 0.0 if row.run in shared else cost * cells + 3
            shared |= {row.run} - {""}
            found.append(Planned(row, experiment, seconds))
        return found

    def experiment(self, row: Row) -> Experiment:
        """Make the experiment of a row."""
        quick = self.reproduction.quick
        values = copy.deepcopy(self.reproduction.experiment)
        for key, value in {**row.set, **(quick.set if self.quick else {}), **self.changes}.items():
            experiment_file.change(values, key, copy.deepcopy(value))
        algorithms = values.get("algorithm", {})
        if row.label in algorithms and not row.run:
            values["algorithm"] = {row.label: algorithms[row.label]}
        experiment = experiment_file.parse(values, self.base or Path.cwd(), default_name="reproduction")
        if self.quick and experiment.rounds > quick.rounds:
            values["rounds"] = quick.rounds
            experiment = experiment_file.parse(values, experiment.base, default_name="reproduction")
        return experiment

    def _rounds(self, row: Row, experiment: Experiment) -> float:
        """Return how many rounds the published runs took, but no more than the experiment allows."""
        counted = [measure for measure in self.reproduction.measure if measure.kind == "rounds_to"]
        told = [told for measure in counted for told in row.numbers(measure).values() if not isinstance(told, str)]
        return min(max(told, default=experiment.rounds), experiment.rounds)

    def run(
        self,
        planned: Sequence[Planned],
        folder: Path,
        *,
        fresh: bool = False,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Table | None:
        """Run the rows that are not done, and write the table; None if it was asked to stop before the end.

        The table also has the rows of earlier runs in this folder with the same `quick`, `base` and `changes` (those
        of `[run]` may differ).
        """
        # [run] does not change the results
        changed = {key: str(value) for key, value in self.changes.items() if key.split(".")[0] != "run"}
        how = {"quick": self.quick, "changes": changed}
        known = {**self._done_before(folder, how), **{one.row.name: one for one in planned}}
        shown = [known[row.name] for row in self.reproduction.row if row.name in known]
        made: Table | None = None
        ran: dict[Path, RunData] = {}
        for one in planned:
            out = self._place(folder, one.row)
            again = fresh and out not in ran
            result = run_plan(
                Plan.of(one.experiment), out, fresh=again, progress=progress or Silent(), should_stop=should_stop
            )
            if not result.finished:
                return None
            if out not in ran:
                ran[out] = RunData.read(out)
                if self.reproduction.report:
                    write_report(out)
            one.sha256 = result.weights_sha256
            one.ours = {m.name: measured(m, ran[out], one.row.label) for m in self.reproduction.measure}
            one.curves = [
                self.reproduction.measure[0].curve(ran[out], *cell) for cell in _cells(ran[out], one.row.label)
            ]
            one.date = f"{date.today()}"
            made = table(self.reproduction, shown, quick=self.quick, changed=changed)
            write_tables([made], folder)  # after every row, so that you can watch a long reproduction
            write_atomically(folder / RECORD, _record(shown, how).encode())
            if self.reproduction.curves is not None:
                places = {done.row.name: self._place(folder, done.row) for done in shown if done.ours}
                views = {name: ran.get(place) or RunData.read(place) for name, place in places.items()}
                target = next(iter(one.experiment.evaluate.target.values()), None)
                draw(self.reproduction.curves, views, self.reproduction.title, target).save(folder)
        return made

    @staticmethod
    def _place(folder: Path, row: Row) -> Path:
        return folder / "rows" / row.folder

    def _done_before(self, folder: Path, how: Mapping[str, Any]) -> dict[str, Planned]:
        """Return the rows of an earlier record that were run in the same way."""
        path, rows = folder / RECORD, {row.name: row for row in self.reproduction.row}
        found = {}
        for done in json.loads(path.read_text()) if path.is_file() else []:
            if done["row"] in rows and all(done.get(key) == value for key, value in how.items()):
                row = rows[done["row"]]
                kept = (done["ours"], done["weights_sha256"], done.get("curves", []), done.get("date", ""))
                found[row.name] = Planned(row, self.experiment(row), 0.0, *kept)
        return found


def _record(planned: Sequence[Planned], how: Mapping[str, Any]) -> str:
    """Return all results, and how they were run, as JSON with one line for each row."""
    records = [
        {
            "row": one.row.name,
            "date": one.date,
            "seeds": one.experiment.seeds,
            **how,
            "ours": one.ours,
            "weights_sha256": one.sha256,
            "curves": one.curves,
        }
        for one in planned
        if one.ours
    ]
    return "[\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in records) + "\n]\n"


def measured(measure: Measure, view: RunData, label: str | None = None) -> list[float | None]:
    """Take the measure of each seed."""
    return [measure.value(view, *cell) for cell in _cells(view, label)]


def _cells(view: RunData, label: str | None) -> list[tuple[str, int]]:
    """Return the cells of one algorithm, or of all."""
    if label is not None and label not in view.labels:
        raise InputError(f"There is no algorithm '{label}' in {view.folder}. Known: {', '.join(view.labels)}.")
    return [cell for cell in view.cells if label in (None, cell[0])]
