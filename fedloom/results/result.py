"""What a run leaves behind, for people and for programs: numbers, tables, a picture, the trained models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedloom.errors import InputError, StoreError, nearest
from fedloom.experiment.store import Store
from fedloom.results import headline

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from fedloom.algorithm import Algorithm
    from fedloom.data.federation import Federation
    from fedloom.experiment.plan import Plan
    from fedloom.federation.engine import Snapshot
    from fedloom.task import Task
    from fedloom.training.local import Groups
    from fedloom.tree import Tree

Made = TypeVar("Made")
TABLES = ("clients", "server", "rounds", "participants", "history", "pooled", "public")


def open_store(folder: Path) -> Store:
    """Open the database of a run folder for reading."""
    if not (folder / "run.db").is_file():
        raise StoreError(f"{folder} is not a run folder: there is no run.db in it.")
    return Store(folder, read_only=True)


@dataclass(frozen=True)
class CellResult:
    """One algorithm with one seed."""

    algorithm: str
    seed: int
    status: str
    rounds: int
    final: dict[str, float]
    headline: dict[
        str, float
    ]  # the same as `final`, or the best round, or the mean of the last rounds, as was asked for
    weights_sha256: str | None
    error: str | None = None


@dataclass(frozen=True)
class Result:
    """A run folder, read."""

    folder: Path
    name: str
    status: str
    runs: tuple[CellResult, ...]
    rule: str = "final"  # what the headline numbers are: final, best, or last:k
    metrics: tuple[str, ...] = ()  # in the order in which they were asked for
    tasks: Callable[[int], Task] | None = None
    algorithms: Mapping[str, Algorithm] | None = None
    federations: Callable[[int], Federation] | None = None

    @staticmethod
    def read(
        folder: Path | str,
        tasks: Callable[[int], Task] | None = None,
        algorithms: Mapping[str, Algorithm] | None = None,
        federations: Callable[[int], Federation] | None = None,
    ) -> Result:
        """The results in a run folder, finished or not."""
        folder = Path(folder)
        with open_store(folder) as store:
            cells = store.cells()
            described = store.fact("description") or {}
            rule = (described.get("evaluate") or {}).get("headline", "final")
            metrics = described.get("metrics") or (described.get("task") or {}).get("metrics") or ()
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
                )
                for cell in cells
            )
        status = _overall([run.status for run in runs])
        name = folder.resolve().name
        return Result(folder, name, status, runs, rule, tuple(metrics), tasks, algorithms, federations)

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
        """One of the run's tables as plain rows."""
        if table not in TABLES:
            raise InputError(f"There is no table '{table}'. Known: {', '.join(TABLES)}.")
        with Store(self.folder, read_only=True) as store:
            return store.rows(_STORED[table])

    def frame(self, table: str = "clients") -> pandas.DataFrame:
        """One of the run's tables (clients, server, rounds, participants, history, pooled, public) as pandas has it."""
        try:
            import pandas
        except ImportError as error:
            raise InputError("Tables as data frames need pandas: pip install 'fedloom[pandas]'.") from error
        return pandas.DataFrame(self.rows(table))

    def plot(self, metric: str = "accuracy", path: str | Path | None = None) -> Path:
        """Draw a metric against rounds for all algorithms, and return the path of the picture."""
        from fedloom.results import figure_style, figures, learning_curves
        from fedloom.results.run_data import RunData

        run, target = RunData.read(self.folder), Path(path or self.folder / f"{metric}.png")
        figure_style.save_figure(learning_curves.draw_run(run, figures.line_styles(run), metric), target)
        return target

    def plot_generations(self, path: str | Path | None = None) -> Path:
        """Draw fitness, validation, diversity and bytes of evolutions by generation; return the picture's path."""
        from fedloom.results import evolution_figure, figure_style
        from fedloom.results.run_data import RunData

        target = Path(path or self.folder / "generations.png")
        figure_style.save_figure(evolution_figure.draw(RunData.read(self.folder)), target)
        return target

    def report(self, fill: str = "min-max", *, progress: Callable[[str], object] = lambda text: None) -> Path:
        """Write `report.html` with the folders `tables` and `figures` beside it, and return its path.

        `fill` says what figures shade around means over users: "min-max" or "std". `progress` is called with a line of
        text before each step.
        """
        from fedloom.results.report import write

        return write(self.folder, fill=fill, progress=progress)

    def weights(
        self, algorithm: str | None = None, seed: int | None = None, client: str | int | None = None
    ) -> dict[str, Tree]:
        """Trained weights of one cell: `{"model": …}`, or one entry per client where there is no global model.

        With a `client` (its name, or its number), the whole model that this client uses: where clients keep a part of
        the model or one of their own, this is not the global one.
        """
        run = self._cell(algorithm, seed)
        snapshot = self._snapshot(run)
        if client is None and "model" in snapshot.state:
            return {"model": snapshot.state["model"]}
        if any("ticket" in own for own in snapshot.own.values()):
            raise StoreError(f"What the clients of {run.algorithm} keep never left their sites.")
        if client is None and all("model" in own for own in snapshot.own.values()):
            return {f"client-{number}": own["model"] for number, own in sorted(snapshot.own.items())}
        made, task = self._made(run)
        numbers = sorted(snapshot.own) if client is None else [self._number(client)]
        initial = made.init_own(task, task.initial())
        kept = {number: snapshot.own.get(number, initial) for number in numbers}
        kept = self._chosen(run, made, task, snapshot.state, kept)
        return {f"client-{number}": made.model(task, snapshot.state, own) for number, own in kept.items()}

    def model(
        self, algorithm: str | None = None, seed: int | None = None, client: str | int | None = None
    ) -> nn.Module:
        """A trained model, ready to use: of the first algorithm and seed unless others are named, or of one client."""
        from fedloom.training.modules import load

        run = self._cell(algorithm, seed)
        weights = self.weights(run.algorithm, run.seed, client)
        module = self._made(run)[1].build()
        load(module, next(iter(weights.values())))
        return module.eval()

    def personal(self) -> list[str]:
        """Algorithms whose clients use another model than the global one that there is."""
        from fedloom.algorithm import Algorithm

        found = []
        for label in dict.fromkeys(run.algorithm for run in self.runs if run.rounds):
            run = self._cell(label, None)
            if "model" in self._snapshot(run).state and type(self._made(run)[0]).model is not Algorithm.model:
                found.append(label)
        return found

    def _snapshot(self, run: CellResult) -> Snapshot:
        from fedloom.experiment import checkpoint

        loaded = checkpoint.load(checkpoint.of_cell(self.folder, run.algorithm, run.seed))
        if loaded is None:
            raise StoreError(f"{run.algorithm} (seed {run.seed}) has no checkpoint in {self.folder}.")
        return loaded.snapshot

    def _made(self, run: CellResult) -> tuple[Algorithm, Task]:
        """The algorithm and the task of a cell: those that were run, or made again from the folder's file."""
        if self.algorithms is not None and self.tasks is not None:
            return self.algorithms[run.algorithm], self.tasks(run.seed)
        return self._again(lambda plan: (plan.algorithms[run.algorithm], plan.task(run.seed)))

    def _again(self, make: Callable[[Plan], Made]) -> Made:
        """Something that the run had, made again from the folder's file."""
        from fedloom.experiment import experiment_file
        from fedloom.experiment.plan import Plan

        file = self.folder / "experiment.toml"
        if not file.is_file():
            raise InputError(
                f"{self.folder} was run from Python, and only the code there knows its model: "
                "use the result that `run` returns (running again what is finished only reads it)."
            )
        try:
            # code of one's own is named relative to the experiment file, which is usually where one is
            values = experiment_file.tomllib.loads(file.read_text(encoding="utf-8"))
            values["run"].pop("compile", None)  # which folders of older versions have
            return make(Plan.of(experiment_file.parse(values, Path.cwd())))
        except InputError as error:
            raise InputError(
                f"{error} (Models of clients are put together from {file}; be in the folder of the file that was run.)"
            ) from error

    def _chosen(
        self, run: CellResult, made: Algorithm, task: Task, state: Groups, kept: dict[int, Groups]
    ) -> dict[int, Groups]:
        """What clients keep, after they looked at their data where their algorithm has them choose a model."""
        if not made.chooses:
            return kept  # most need no data
        from fedloom.federation.evaluation import chosen
        from fedloom.training.clients import Clients
        from fedloom.training.probe import probe

        given = self.federations
        federation = given(run.seed) if given is not None else self._again(lambda plan: plan.federation(run.seed))
        setup = probe(federation, task).setup(group=1)
        return {
            number: chosen(made, task, state, own, Clients(federation, (number,), setup=setup))
            for number, own in kept.items()
        }

    def _number(self, client: str | int) -> int:
        with Store(self.folder, read_only=True) as store:
            names = {row["name"]: int(row["client"]) for row in store.rows("clients")}
        number = names.get(client) if isinstance(client, str) else client
        if number is None or number not in names.values():
            known = list(names)
            shown = ", ".join(known[:10]) + (f" … ({len(known)} in all)" if len(known) > 10 else "")
            raise InputError(f"There is no client {client!r}. Known: {shown}.{nearest(str(client), known)}")
        return number

    def _cell(self, algorithm: str | None, seed: int | None) -> CellResult:
        for run in self.runs:
            if algorithm in (None, run.algorithm) and seed in (None, run.seed):
                return run
        known = ", ".join(f"{run.algorithm} (seed {run.seed})" for run in self.runs)
        raise InputError(f"There is no run of {algorithm} with seed {seed}. Known: {known}.")


_STORED = {
    "clients": "client_metrics",
    "server": "server_metrics",
    "pooled": "pooled_metrics",
    "rounds": "rounds",
    "participants": "participants",
    "history": "history",
    "public": "public_numbers",
}


def _overall(statuses: list[str]) -> str:
    for worst in ("failed", "running", "stopped", "waiting"):
        if worst in statuses:
            return worst
    return "done" if statuses else "waiting"
