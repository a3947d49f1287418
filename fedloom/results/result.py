"""The result of a run: its numbers, tables, figures and trained models, read from its folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedloom import files
from fedloom.discovery import optional
from fedloom.errors import InputError, StoreError, nearest
from fedloom.experiment.store import Store, no_run
from fedloom.metrics import short_name
from fedloom.results import headline
from fedloom.user_code import code_file

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from torch import nn

    from fedloom.algorithm import Algorithm
    from fedloom.data.federation import Federation
    from fedloom.data.preprocessing import Preprocessing
    from fedloom.experiment.checkpoint import Checkpoint
    from fedloom.experiment.plan import Plan
    from fedloom.federation.engine import Snapshot
    from fedloom.results.prediction import Predictor
    from fedloom.task import Task
    from fedloom.tree import Groups, Tree

Restored = TypeVar("Restored")
TABLES = {  # the name that users see → the table of the database
    "clients": "client_metrics",
    "server": "server_metrics",
    "rounds": "rounds",
    "participants": "participants",
    "history": "history",
    "pooled": "pooled_metrics",
    "public": "public_numbers",
}


class Picture(type(Path())):  # type: ignore[misc]
    """The path of a picture, which a notebook shows as the picture itself.

    `figure` is the matplotlib figure that was drawn, to change and save it again.
    """

    figure: Figure | None = None

    def _repr_png_(self) -> bytes | None:
        return self.read_bytes() if self.suffix.lower() == ".png" else None

    def _repr_svg_(self) -> str | None:
        return self.read_text(encoding="utf-8") if self.suffix.lower() == ".svg" else None


def open_store(folder: Path) -> Store:
    """Open the database of a run folder for reading."""
    if not (folder / "run.db").is_file():
        raise StoreError(no_run(folder))
    return Store(folder, read_only=True)


def read_cells(store: Store, folder: Path) -> list[dict[str, Any]]:
    """Return a run's cells. Where the run's process ended without recording why, cells are `interrupted`."""
    cells = store.cells()
    statuses = {cell["status"] for cell in cells}
    # between two cells none is running: then those that wait show that there was no end
    unfinished = "running" if statuses & {"running", "stopped", "failed"} else "waiting"
    if unfinished in statuses and not files.is_locked(folder):
        cells = [{**cell, "status": cell["status"].replace(unfinished, "interrupted")} for cell in cells]
    return cells


@dataclass(frozen=True)
class CellResult:
    """The result of a cell: one algorithm with one seed."""

    algorithm: str
    seed: int
    status: str
    rounds: int
    final: dict[str, float]
    headline: dict[str, float]  # `final`, the best round, or the mean of the last rounds: see `Result.rule`
    weights_sha256: str | None
    error: str | None = None
    abandoned: int = 0  # rounds that did not count, because too few clients took part or sent valid updates


@dataclass(frozen=True)
class Result:
    """What a run folder holds."""

    folder: Path
    name: str
    status: str
    runs: tuple[CellResult, ...] = field(repr=False)  # a notebook would show a screen of numbers
    rule: str = "final"  # what the headline numbers are: final, best, or last:k
    metrics: tuple[str, ...] = ()  # in the order of the experiment file
    plan: Plan | None = field(default=None, repr=False)  # what this process ran; a folder alone is enough for most

    @staticmethod
    def read(folder: Path | str, plan: Plan | None = None) -> Result:
        """Read a run folder, finished or not."""
        folder = _path(folder)
        with open_store(folder) as store:
            described = store.fact("description") or {}
            rule = (described.get("evaluate") or {}).get("headline", "final")
            metrics = described.get("metrics") or (described.get("task") or {}).get("metrics")
            # a task with its own loss may leave the choice to the labels
            metrics = metrics or [row["metric"] for row in store.rows("metrics") if row["metric"] != "loss"]
            runs = tuple(
                CellResult(
                    cell["label"],
                    cell["seed"],
                    cell["status"],
                    cell["rounds_done"],
                    store.summary(cell["id"]),
                    headline.of_cell(store, cell["id"], rule),
                    cell["weights_sha256"],
                    cell["error"],
                    store.abandoned(cell["id"]),
                )
                for cell in read_cells(store, folder)
            )
        status = overall({run.status for run in runs}, any(run.abandoned for run in runs))
        return Result(folder, folder.resolve().name, status, runs, rule, tuple(map(short_name, metrics)), plan)

    @property
    def finished(self) -> bool:
        """Whether every cell has ended, even if some of its rounds did not count."""
        return self.status in ("done", "degraded")

    @property
    def weights_sha256(self) -> str | None:
        """One fingerprint over all cells' final weights, in sorted order; none while a cell is unfinished."""
        hashes = [run.weights_sha256 for run in self.runs]
        if not hashes or None in hashes:
            return None
        return hashlib.sha256("\n".join(sorted(str(one) for one in hashes)).encode()).hexdigest()

    def json(self) -> dict[str, Any]:
        """What `--json` prints."""
        hidden = {"headline"} if self.rule == "final" else set()  # it would repeat `final`
        return {
            "name": self.name,
            "folder": str(self.folder),
            "headline": self.rule,
            "status": self.status,
            "weights_sha256": self.weights_sha256,
            "runs": [
                {key: value for key, value in asdict(cell).items() if key not in hidden and (key != "error" or value)}
                for cell in self.runs
            ],
        }

    def rows(self, table: str = "clients") -> list[dict[str, Any]]:
        """Return one of the run's tables as a list of rows."""
        if not isinstance(table, str) or table not in TABLES:
            raise InputError(f"There is no table '{table}'. Known: {', '.join(TABLES)}.")
        with Store(self.folder, read_only=True) as store:
            return store.rows(TABLES[table])

    def frame(self, table: str = "clients") -> pandas.DataFrame:
        """Return a table (clients, server, rounds, participants, history, pooled, public) as a pandas data frame.

        The pooled model trains a client that does not exist, `everyone`, which owns all examples: leave it out of means
        over clients. Its phase is `post_fit`. What a real client has with this model after round r is in `pre_fit` of
        round r + 1, or in `final`.
        """
        frames, rows = optional("pandas", "Tables as data frames need pandas", "pandas"), self.rows(table)
        if rows:
            return frames.DataFrame(rows)
        with Store(self.folder, read_only=True) as store:  # an empty table has columns, too
            return frames.DataFrame(columns=store.columns(TABLES[table]))

    def plot(self, metric: str = "accuracy", path: str | Path | None = None) -> Picture:
        """Draw a metric against rounds for all algorithms. Return the picture's path; a notebook shows the picture."""
        from fedloom.results import figure_style, learning_curves
        from fedloom.results.run_data import RunData

        run, target = RunData.read(self.folder), Picture(_path(path or self.folder / f"{metric}.png"))
        target.figure = learning_curves.draw_run(run, figure_style.line_styles(run.labels), metric)
        figure_style.save_figure(target.figure, target)
        return target

    def plot_generations(self, path: str | Path | None = None) -> Picture:
        """Draw fitness, validation, diversity and bytes of evolutions by generation; return the picture's path."""
        from fedloom.results import evolution_figure, figure_style
        from fedloom.results.run_data import RunData

        target = Picture(_path(path or self.folder / "generations.png"))
        target.figure = evolution_figure.draw(RunData.read(self.folder))
        figure_style.save_figure(target.figure, target)
        return target

    def report(self, fill: str = "min-max", *, progress: Callable[[str], object] = lambda text: None) -> Path:
        """Write `report.html` with the folders `tables` and `figures` beside it, and return its path.

        `fill` says what figures shade around means over clients: "min-max" or "std". `progress` is called with a line
        of text before each step.
        """
        from fedloom.results.report import write

        return write(self.folder, fill=fill, progress=progress)

    def weights(
        self, algorithm: str | None = None, seed: int | None = None, client: str | int | None = None
    ) -> dict[str, Tree]:
        """Return the trained weights of one cell: `{"model": …}`, or one entry per client if there is no global model.

        With a `client` (its name or its number), return the whole model that this client uses. It differs from the
        global model if clients keep a part of the model, or a model of their own.
        """
        from fedloom.experiment.checkpoint import load_frozen

        cell = self.cell(algorithm, seed)
        loaded = self._checkpoint(cell)
        frozen = load_frozen(self.folder, loaded)
        return {name: {**frozen, **model} for name, model in self._exchanged(cell, loaded.snapshot, client).items()}

    def _exchanged(self, cell: CellResult, snapshot: Snapshot, client: str | int | None) -> dict[str, Tree]:
        """Return the weights of one cell without frozen parameters."""
        if client is None and "model" in snapshot.state:
            return {"model": snapshot.state["model"]}
        if any("ticket" in own for own in snapshot.own.values()):
            raise StoreError(f"The clients of {cell.algorithm} keep their models at their sites, not in the folder.")
        if client is None and all("model" in own for own in snapshot.own.values()):
            return {self._file_name(number): own["model"] for number, own in sorted(snapshot.own.items())}
        made, task = self._algorithm_and_task(cell)
        numbers = sorted(snapshot.own) if client is None else [self._client_number(client)]
        initial = made.init_own(task, task.initial())
        kept = {number: snapshot.own.get(number, initial) for number in numbers}
        kept = self._with_choices(cell, made, task, snapshot.state, kept)
        return {self._file_name(number): made.model(task, snapshot.state, own) for number, own in kept.items()}

    def model(
        self, algorithm: str | None = None, seed: int | None = None, client: str | int | None = None
    ) -> nn.Module:
        """Return a trained model, ready to use; by default the global model of the first algorithm that has one.

        Without a global model, name the client.
        """
        from fedloom.training.modules import ModuleTensors, load

        cell = self.predicting(algorithm, seed, client)
        self._check_whose(cell, client)
        weights = self.weights(cell.algorithm, cell.seed, client)
        module = self._algorithm_and_task(cell)[1].build()
        load(ModuleTensors(module).own, next(iter(weights.values())))
        return module.eval()

    def predictor(
        self, algorithm: str | None = None, seed: int | None = None, client: str | int | None = None
    ) -> Predictor:
        """Return a trained model with its preprocessing; by default that of the first algorithm with a global model.

        Without a global model, and where clients normalise by their own statistics, name the client.
        """
        from fedloom.results.prediction import Predictor

        cell = self.predicting(algorithm, seed, client)
        self._check_whose(cell, client)
        preprocessing, name = self.preprocessing(cell.seed), None
        if client is not None:
            name = self._client_names[self._client_number(client)]
        _, task = self._algorithm_and_task(cell)
        model = self.model(cell.algorithm, cell.seed, client)
        return Predictor(model, preprocessing, task.torch_dtype, name, has_logits=task.loss == "bce")

    def _check_whose(self, cell: CellResult, client: str | int | None) -> None:
        """Refuse to choose a client's model by itself where every client has its own."""
        if client is None and not self.has_global_model(cell):
            shared = self._with_global_model
            other = f" Name another algorithm, which has one ({', '.join(shared)}), or a client." if shared else ""
            raise InputError(
                f"{cell.algorithm} has no global model: every client has its own.{other or ' Name a client.'} Known "
                f"clients: {', '.join(list(self._client_names.values())[:10])}."
            )

    def predicting(self, algorithm: str | None, seed: int | None, client: str | int | None) -> CellResult:
        """Return the cell whose model predicts: of the first algorithm that has one for what is asked."""
        if algorithm is None and client is None:
            algorithm = next(iter(self._with_global_model), None)
        return self.cell(algorithm, seed)

    @property
    def _with_global_model(self) -> list[str]:
        return [label for label in self._trained if self.has_global_model(label)]

    def has_global_model(self, cell: CellResult | str) -> bool:
        """Return whether a cell has one model for all clients. Of an algorithm's label, it is the first seed's cell."""
        cell = cell if isinstance(cell, CellResult) else self.cell(cell)
        return "model" in self._checkpoint(cell).snapshot.state

    def uses_global_model(self, cell: CellResult, client: str) -> bool:
        """Return whether a client's model is the one that all clients share."""
        if not self.has_global_model(cell):
            return False
        (of_client,) = self.weights(cell.algorithm, cell.seed, client).values()
        shared = self.weights(cell.algorithm, cell.seed)["model"]
        return shared.keys() == of_client.keys() and all(shared[name].equal(of_client[name]) for name in shared)

    def preprocessing(self, seed: int) -> Preprocessing:
        """Return how examples were prepared for a seed's models."""
        self.cell(None, seed)  # raises if there is none
        from fedloom.data.preprocessing import Preprocessing
        from fedloom.experiment.run_folder import preprocessing_file

        path = preprocessing_file(self.folder, seed)
        # earlier versions wrote no file, or that of the first seed only
        return Preprocessing.read(path) if path.is_file() else self._data(seed).preprocessing

    def predict(
        self,
        rows: Any,
        algorithm: str | None = None,
        seed: int | None = None,
        client: str | int | None = None,
        threshold: float | None = None,
    ) -> Any:
        """Predict new examples: a data frame gives a data frame, an array of examples a dict of columns.

        Of two classes, the second is predicted from the `threshold` on, a probability (0.5 by default).
        For classes, the columns are `prediction` and `probability CLASS`; for a regression, `prediction`. The data
        frame has the index of yours, and none of its columns: `rows.join(…)` puts both together.
        """
        from fedloom.results.prediction import predict

        return predict(self.predictor(algorithm, seed, client).with_threshold(threshold), rows)

    @property
    def _trained(self) -> list[str]:
        """The labels of algorithms that have trained."""
        return list(dict.fromkeys(cell.algorithm for cell in self.runs if cell.rounds))

    def personal(self) -> list[str]:
        """Return the labels of algorithms that have a global model, but whose clients use other models."""
        from fedloom.experiment.run_folder import has_own_models

        found = []
        for label in self._trained:
            cell = self.cell(label, None)
            algorithm, _ = self._algorithm_and_task(cell)
            if self.has_global_model(cell) and has_own_models(algorithm):
                found.append(label)
        return found

    def _checkpoint(self, cell: CellResult) -> Checkpoint:
        from fedloom.experiment import checkpoint

        loaded = checkpoint.load(checkpoint.of_cell(self.folder, cell.algorithm, cell.seed))
        if loaded is None and cell.status == "done":  # without rounds, there is nothing to continue from
            return self._initial(cell)
        if loaded is None:
            raise StoreError(f"{cell.algorithm} (seed {cell.seed}) has no checkpoint in {self.folder}.")
        return loaded

    def _initial(self, cell: CellResult) -> Checkpoint:
        """Return what a cell without rounds evaluated: the model as it was given."""
        from fedloom import tree
        from fedloom.experiment.checkpoint import FROZEN, Checkpoint
        from fedloom.federation.engine import Snapshot

        algorithm, task = self._algorithm_and_task(cell)
        state = algorithm.init(task, task.initial())
        own = dict.fromkeys(self._client_names, algorithm.init_own(task, task.initial()))
        model = algorithm.server_model(task, state)
        if model is not None and tree.sha256(task.whole(model)) != cell.weights_sha256:
            raise StoreError(
                f"{cell.algorithm} (seed {cell.seed}) trained no round, so {self.folder} holds no weights, and the "
                "model that it evaluated is no longer the one that its experiment names. Run it again."
            )
        return Checkpoint(Snapshot(0, state, own), {FROZEN: task.frozen_sha256} if task.frozen else {}, [])

    def _algorithm_and_task(self, cell: CellResult) -> tuple[Algorithm, Task]:
        from fedloom.data.preprocessing import Preprocessing
        from fedloom.experiment.run_folder import preprocessing_file

        path = preprocessing_file(self.folder, cell.seed)
        stored = Preprocessing.read(path) if path.is_file() else None
        table = stored if stored is not None and stored.columns else None  # other data may be of another dtype
        return self._from_plan(lambda plan: (plan.algorithms[cell.algorithm], plan.task(cell.seed)), table)

    def _from_plan(self, make: Callable[[Plan], Restored], table: Preprocessing | None = None) -> Restored:
        """Return a part of what this process ran, or rebuild it from the folder's experiment file."""
        if self.plan is not None:
            return make(self.plan)
        from fedloom.experiment import experiment_file
        from fedloom.experiment.plan import Plan

        file = self.folder / "experiment.toml"
        if not file.is_file():
            raise InputError(
                f"{self.folder} was run from Python, and only that code knows its model. Use the result that `run` "
                "returns: if the run is finished, running it again only reads it."
            )
        try:
            # paths of your own code are relative to the experiment file, which is usually in the current folder
            values = files.read_toml(file)
            values.get("run", {}).pop("compile", None)  # which folders of older versions have
            self._check_code(experiment_file.code_names(values))
            return make(Plan.of(experiment_file.parse(values, Path.cwd()), table))
        except InputError as error:
            raise InputError(
                f"{error} (Clients' models are rebuilt from {file}: change to the folder of the file that was run.)"
            ) from error

    def _check_code(self, names: Collection[str]) -> None:
        """Refuse code that came with the run's folder, which somebody else may have written."""
        files = {name: code_file(name, Path.cwd()) for name in sorted(names)}
        inside = [name for name, file in files.items() if file and file.is_relative_to(self.folder.resolve())]
        if inside:
            raise InputError(
                f"The code of this run, {inside[0]}, is in its own folder, whose files somebody else may have written. "
                "Nothing was loaded. Read the file, and copy it to a folder of yours that has the same path to it."
            )

    def _with_choices(
        self, cell: CellResult, made: Algorithm, task: Task, state: Groups, kept: dict[int, Groups]
    ) -> dict[int, Groups]:
        """What clients keep, after each has chosen a model by its own data, if its algorithm lets clients choose."""
        if not made.chooses:
            return kept  # most algorithms: no data needed
        from fedloom.federation.evaluation import chosen
        from fedloom.training.clients import Clients
        from fedloom.training.probe import probe

        federation = self._data(cell.seed)
        setup = probe(federation, task).setup(group=1)
        return {
            number: chosen(made, task, state, own, Clients(federation, (number,), setup=setup))
            for number, own in kept.items()
        }

    def _data(self, seed: int) -> Federation:
        """Load the data of a seed again. It must not have changed since the run."""
        from fedloom.experiment.run_folder import check_same_data

        federation = self._from_plan(lambda plan: plan.federation(seed))
        with Store(self.folder, read_only=True) as store:
            check_same_data(store, federation, seed)
        return federation

    def _file_name(self, client: int) -> str:
        """Return a client's name; one that is only its number says that it is a client's."""
        name = self._client_names[client]
        return f"client-{client}" if name == str(client) else name

    @cached_property
    def _client_names(self) -> dict[int, str]:
        with Store(self.folder, read_only=True) as store:
            return {int(row["client"]): row["name"] for row in store.rows("clients")}

    def _client_number(self, client: str | int) -> int:
        names = {name: number for number, name in self._client_names.items()}
        number = names.get(client) if isinstance(client, str) else client
        if number is None or number not in names.values():
            known = list(names)
            shown = ", ".join(known[:10]) + (f" … ({len(known)} in all)" if len(known) > 10 else "")
            raise InputError(f"There is no client {client!r}. Known: {shown}.{nearest(str(client), known)}")
        return number

    def cell(self, algorithm: str | None = None, seed: int | None = None) -> CellResult:
        """Return the result of a cell; by default the first one."""
        for cell in self.runs:
            if algorithm in (None, cell.algorithm) and seed in (None, cell.seed):
                return cell
        labels, seeds = (list(dict.fromkeys(getattr(cell, key) for cell in self.runs)) for key in ("algorithm", "seed"))
        known = f"{', '.join(labels)}; seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        which = "any algorithm" if algorithm is None else algorithm if isinstance(algorithm, str) else repr(algorithm)
        asked = " with ".join([which, *([] if seed is None else [f"seed {seed!r}"])])
        meant = nearest(algorithm, labels) if isinstance(algorithm, str) and algorithm not in labels else ""
        raise InputError(f"There is no run of {asked}. Known: {known}.{meant}")

    def only(self, algorithm: str | None = None, seed: int | None = None) -> Result:
        """Return the same result with the cells of one algorithm, of one seed, or of both."""
        self.cell(algorithm, seed)  # raises if there is none
        kept = (cell for cell in self.runs if algorithm in (None, cell.algorithm) and seed in (None, cell.seed))
        return replace(self, runs=tuple(kept))


def load(folder: Path | str) -> Result:
    """Return the result of a run in a folder: its numbers, tables, figures, models and predictions."""
    return Result.read(folder)


def _path(given: object) -> Path:
    if not isinstance(given, (str, os.PathLike)):
        raise InputError(f"A path must be a string or a pathlib.Path. Got {given!r} instead.")
    return Path(given)


def overall(statuses: set[str], abandoned: bool) -> str:
    """The status of the whole run: the worst of its cells', or `degraded` if some rounds of it did not count."""
    worst_first = ("failed", "running", "interrupted", "stopped", "waiting")
    done = "degraded" if abandoned else "done"
    return next((status for status in worst_first if status in statuses), done if statuses else "waiting")
