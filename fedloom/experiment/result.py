"""What a run leaves behind, for people and for programs: numbers, tables, a picture, the trained models."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.errors import InputError, StoreError
from fedloom.experiment.store import Store

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from fedloom.task import Task
    from fedloom.tree import Tree

TABLES = ("clients", "server", "rounds", "participants", "history", "pooled", "public")


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

    @staticmethod
    def read(folder: Path, tasks: Callable[[int], Task] | None = None) -> Result:
        """The results in a run folder, finished or not."""
        if not (folder / "run.db").is_file():
            raise StoreError(f"{folder} is not a run folder: there is no run.db in it.")
        with Store(folder, read_only=True) as store:
            cells = store.cells()
            described = store.fact("description") or {}
            rule = (described.get("evaluate") or {}).get("headline", "final")
            metrics = described.get("metrics") or (described.get("task") or {}).get("metrics") or ()
            lower = {row["metric"] for row in store.rows("metrics") if not row["higher_is_better"]}
            means = {row["metric"] for row in store.rows("metrics") if row["is_mean"]}
            runs = tuple(
                CellResult(
                    cell["label"],
                    cell["seed"],
                    cell["status"],
                    cell["rounds_done"],
                    store.summary(cell["id"]),
                    _headline(store, cell["id"], rule, lower, means),
                    cell["weights_sha256"],
                    cell["error"],
                )
                for cell in cells
            )
        return Result(
            folder, folder.resolve().name, _overall([run.status for run in runs]), runs, rule, tuple(metrics), tasks
        )

    @property
    def weights_sha256(self) -> str | None:
        """One fingerprint over all cells' final weights, in sorted order; none while a cell is unfinished."""
        hashes = [run.weights_sha256 for run in self.runs]
        if not hashes or None in hashes:
            return None
        return hashlib.sha256("\n".join(sorted(str(one) for one in hashes)).encode()).hexdigest()

    def json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "headline": self.rule,
            "status": self.status,
            "weights_sha256": self.weights_sha256,
            "runs": [
                {
                    "algorithm": run.algorithm,
                    "seed": run.seed,
                    "status": run.status,
                    "rounds": run.rounds,
                    "final": run.final,
                    **({"headline": run.headline} if self.rule != "final" else {}),
                    "weights_sha256": run.weights_sha256,
                    **({"error": run.error} if run.error else {}),
                }
                for run in self.runs
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
        """Draw a metric against rounds for all algorithms; the picture's path."""
        from fedloom.experiment.plot import curves

        target = Path(path) if path is not None else self.folder / f"{metric}.png"
        clients, server = self.rows("clients"), self.rows("server")
        with Store(self.folder, read_only=True) as store:
            no_mean = {row["metric"] for row in store.rows("metrics") if not row["is_mean"]}
        if metric in no_mean:  # one value from everybody's scores, instead of a mean that means nothing
            clients = [{**row, "client": "all"} for row in self.rows("pooled")]
        splits = dict.fromkeys(row["split"] for row in (*server, *clients) if row["metric"] == metric)
        curves(clients, server, target, metric, "test" if "test" in splits or not splits else next(iter(splits)))
        return target

    def weights(self, algorithm: str | None = None, seed: int | None = None) -> dict[str, Tree]:
        """Trained weights of one cell: `{"model": …}`, or one entry per client where there is no global model."""
        from fedloom.experiment import checkpoint

        run = self._cell(algorithm, seed)
        loaded = checkpoint.load(self.folder / "cells" / f"{run.algorithm}-{run.seed}")
        if loaded is None:
            raise StoreError(f"{run.algorithm} (seed {run.seed}) has no checkpoint in {self.folder}.")
        if "model" in loaded.snapshot.state:
            return {"model": loaded.snapshot.state["model"]}
        if any("ticket" in own for own in loaded.snapshot.own.values()):
            raise StoreError(f"{run.algorithm} has no global model, and its clients' models never left their sites.")
        return {
            f"client-{client}": own["model"] for client, own in sorted(loaded.snapshot.own.items()) if "model" in own
        }

    def model(self, algorithm: str | None = None, seed: int | None = None, client: int | None = None) -> nn.Module:
        """A trained model, ready to use; without arguments, that of the first algorithm and seed."""
        from fedloom.local import load

        if self.tasks is None:
            raise InputError("The result was read from a folder: use `weights`, or `fedloom export DIR --model`.")
        run = self._cell(algorithm, seed)
        weights = self.weights(run.algorithm, run.seed)
        which = "model" if "model" in weights else f"client-{client if client is not None else 0}"
        if which not in weights:
            raise InputError(f"There is no model '{which}'. Known: {', '.join(weights)}.")
        module = self.tasks(run.seed).build()
        load(module, weights[which])
        return module.eval()

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


def _headline(store: Store, cell: int, rule: str, lower: set[str], means: set[str]) -> dict[str, float]:
    """The numbers that count: at the end, of the best round, or the mean of the last k measured rounds."""
    if rule == "final":
        return store.summary(cell)
    series: dict[str, dict[int, list[float]]] = {}
    for row in store.rows("client_metrics", cell):
        if row["value"] is not None and row["phase"] in ("pre_fit", "post_fit") and row["metric"] in means:
            name = f"{row['phase']}_{row['split']}_{row['metric']}"
            series.setdefault(name, {}).setdefault(row["round"], []).append(row["value"])
    for row in store.rows("server_metrics", cell):
        if row["value"] is not None:
            series.setdefault(f"server_{row['split']}_{row['metric']}", {})[row["round"]] = [row["value"]]
    chosen = {}
    for name, rounds in series.items():
        curve = [statistics.fmean(values) for _, values in sorted(rounds.items())]
        if rule == "best":
            chosen[name] = (min if any(name.endswith(f"_{metric}") for metric in lower) else max)(curve)
        else:
            chosen[name] = statistics.fmean(curve[-int(rule.removeprefix("last:")) :])
    return chosen


def _overall(statuses: list[str]) -> str:
    for worst in ("failed", "running", "stopped", "waiting"):
        if worst in statuses:
            return worst
    return "done" if statuses else "waiting"
