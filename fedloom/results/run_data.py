"""A run folder as arrays: what tables, figures and the report are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError, StoreError
from fedloom.experiment.round_rows import LEFT_OUT
from fedloom.experiment.store import Store
from fedloom.federation.sampling import Sampling
from fedloom.results.result import Result

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Key = tuple[str, int]  # label and seed


@dataclass(frozen=True)
class Stats:
    """Average, standard deviation (population, as the clients are all there are), lowest and highest, along an axis."""

    index: Ints
    mean: Floats
    std: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class ClientValues:
    """One number for some rounds and clients."""

    rounds: Ints
    clients: Ints
    values: Floats

    def __len__(self) -> int:
        return len(self.values)

    def by_round(self) -> Stats:
        """Over clients, for each round."""
        return grouped(self.rounds, self.values)

    def by_client(self) -> Stats:
        """Over rounds, for each client."""
        return grouped(self.clients, self.values)

    def last(self) -> ClientValues:
        """The last round that was measured."""
        return self._kept(self.rounds == (self.rounds.max() if len(self) else 0))

    def after(self, round: int) -> ClientValues:
        """The rounds after this one."""
        return self._kept(self.rounds > round)

    def only(self, cohorts: Mapping[int, Sequence[int]]) -> ClientValues:
        """In each round the clients of its cohort."""
        here = np.zeros(len(self), dtype=np.bool_)
        for round, cohort in cohorts.items():
            here |= (self.rounds == round) & np.isin(self.clients, np.asarray(cohort))
        return self._kept(here)

    def _kept(self, here: NDArray[np.bool_]) -> ClientValues:
        return ClientValues(self.rounds[here], self.clients[here], self.values[here])


def grouped(of: Ints, values: Floats) -> Stats:
    """Statistics of the values that share a number.

    >>> found = grouped(np.array([1, 1, 2]), np.array([0.0, 1.0, 5.0]))
    >>> found.index.tolist(), found.mean.tolist(), found.std.tolist(), found.high.tolist()
    ([1, 2], [0.5, 5.0], [0.5, 0.0], [1.0, 5.0])
    """
    order = np.argsort(of, kind="stable")
    at, starts, counts = np.unique(of[order], return_index=True, return_counts=True)
    if not len(at):
        empty = np.empty(0)
        return Stats(at, empty, empty, empty, empty)
    ordered = values[order]
    mean = np.add.reduceat(ordered, starts) / counts
    deviations = (ordered - np.repeat(mean, counts)) ** 2
    std = np.sqrt(np.add.reduceat(deviations, starts) / counts)
    return Stats(at, mean, std, np.minimum.reduceat(ordered, starts), np.maximum.reduceat(ordered, starts))


@dataclass(frozen=True)
class RoundCosts:
    """What each round took."""

    rounds: Ints
    seconds: Floats
    bytes_up: Ints
    bytes_down: Ints
    participants: Ints

    @property
    def bytes_so_far(self) -> Ints:
        """Bytes up and down so far."""
        return np.cumsum(self.bytes_up + self.bytes_down)


@dataclass(frozen=True)
class MetricInfo:
    """What is known about a metric."""

    name: str
    is_mean: bool
    higher_is_better: bool

    @property
    def percent(self) -> bool:
        """Whether it is a share, shown as a percentage."""
        return self.name == "accuracy" or self.name.startswith("top_")


@dataclass(frozen=True)
class RunData:
    """Everything in a run folder that can be shown, read when it is asked for."""

    folder: Path
    cells: dict[Key, dict[str, Any]]
    metrics: dict[str, MetricInfo]  # those that were asked for come first, the loss last
    clients: tuple[dict[str, Any], ...]
    facts: Mapping[str, Any]
    _read: dict[Any, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def read(folder: Path) -> RunData:
        """A run folder, finished or not."""
        if not (folder / "run.db").is_file():
            raise StoreError(f"{folder} is not a run folder: there is no run.db in it.")
        with Store(folder, read_only=True) as store:
            cells = {(cell["label"], cell["seed"]): cell for cell in store.cells()}
            found = [
                MetricInfo(row["metric"], bool(row["is_mean"]), bool(row["higher_is_better"]))
                for row in store.rows("metrics")
            ]
            clients, facts = store.rows("clients"), store.facts()
        described = facts.get("description") or {}
        asked = list(described.get("metrics") or (described.get("task") or {}).get("metrics") or ())
        kinds = sorted(
            found, key=lambda kind: (kind.name == "loss", *([asked.index(kind.name)] if kind.name in asked else [99]))
        )
        return RunData(folder, cells, {kind.name: kind for kind in kinds}, tuple(clients), facts)

    @property
    def name(self) -> str:
        """The experiment's name, or the folder's."""
        return str(self.description.get("name") or self.folder.resolve().name)

    @property
    def description(self) -> Mapping[str, Any]:
        """What the experiment is."""
        return self.facts.get("description") or {}

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The algorithms, in the file's order."""
        return tuple(dict.fromkeys(label for label, _ in self.cells))

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, in the file's order."""
        return tuple(dict.fromkeys(seed for _, seed in self.cells))

    @cached_property
    def result(self) -> Result:
        """The numbers that the run ends with."""
        return Result.read(self.folder)

    @property
    def data_fingerprints(self) -> set[str]:
        """Fingerprints of the data that the seeds used: one, or one for each seed that drew its own."""
        return {str(value) for fact, value in self.facts.items() if fact.startswith("data of seed")}

    @property
    def done(self) -> bool:
        """Whether every cell is."""
        return bool(self.cells) and all(cell["status"] == "done" for cell in self.cells.values())

    def metric(self, metric: str) -> MetricInfo:
        """What is known about a metric; one that was never stored is a mean where higher is better."""
        return self.metrics.get(metric, MetricInfo(metric, True, metric != "loss"))

    @property
    def main_metric(self) -> str:
        """What the comparison is about: the first metric asked for that is a mean and has numbers, else the loss."""
        means = [kind.name for kind in self.metrics.values() if kind.is_mean]
        return means[0] if means else "loss"

    def client_name(self, client: int) -> str:
        """As the data calls it."""
        if 0 <= client < len(self.clients):
            return str(self.clients[client]["name"])
        return "everyone" if client == len(self.clients) else str(client)

    def is_pooled(self, label: str) -> bool:
        """Whether it trained on everybody's examples in one place."""
        ids = [self.cells[key]["id"] for key in self.cells if key[0] == label]
        who: set[int] = self._cached(
            ("participants", label), lambda store: {client for cell in ids for client in store.participating(cell)}
        )
        return bool(self.clients) and who == {len(self.clients)}

    def client_values(self, label: str, seed: int, phase: str, metric: str, split: str = "test") -> ClientValues:
        """A client metric of one cell. Values that are not finite are left out.

        The pooled model trains at no client: what each client has after a round is what it has before the next one. It
        is measured at all clients, and shown for those that the other algorithms are measured at: after local training
        for the clients that were drawn, as everywhere if `evaluate.clients` is "cohort".
        """
        series = self._series(label, seed, phase, metric, split)
        if not self.is_pooled(label) or not self.shows_drawn(phase):
            return series
        if phase == "post_fit":
            before, final = (self._series(label, seed, one, metric, split) for one in ("pre_fit", "final"))
            later = before.rounds > 1
            series = ClientValues(
                np.append(before.rounds[later] - 1, final.rounds),
                np.append(before.clients[later], final.clients),
                np.append(before.values[later], final.values),
            )
        if self.sampling is None:
            return series
        cohorts = {
            round: self.sampling.draw(len(self.clients), round, seed) for round in np.unique(series.rounds).tolist()
        }
        return series.only(cohorts)

    def shows_drawn(self, phase: str) -> bool:
        """Whether a phase is about the clients that were drawn, and not about all."""
        only_cohort = (self.description.get("evaluate") or {}).get("clients") == "cohort"
        return phase == "post_fit" or (only_cohort and phase in ("pre_fit", "final"))

    @cached_property
    def sampling(self) -> Sampling | None:
        """Who is drawn, with one seed the same clients whatever the algorithm; none where that is everybody."""
        try:
            found = Sampling(**(self.description.get("cohort") or {}))
        except InputError:  # somebody's own way of drawing clients, which only a program knows
            return None
        everybody = found.sampling == "fixed" and found.size(len(self.clients)) == len(self.clients)
        return None if everybody else found

    def _series(self, label: str, seed: int, phase: str, metric: str, split: str) -> ClientValues:
        def read(store: Store) -> ClientValues:
            cell = self.cells.get((label, seed))
            rows = store.client_values(cell["id"], phase, split, metric) if cell else []
            kept = [row for row in rows if row[2] is not None and math.isfinite(row[2])]
            table = np.array(kept, dtype=np.float64).reshape(-1, 3)
            return ClientValues(table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2])

        series: ClientValues = self._cached(("series", label, seed, phase, metric, split), read)
        return series

    def server_values(self, label: str, seed: int, metric: str, split: str = "test") -> tuple[Ints, Floats]:
        """The global model on data of the server's: rounds and values."""
        rows = [
            row
            for row in self._rows("server_metrics", label, seed)
            if row["metric"] == metric and row["split"] == split and row["value"] is not None
        ]
        return _column(rows, "round", np.int64), _column(rows, "value", np.float64)

    def pooled_values(self, label: str, seed: int, phase: str, metric: str, split: str = "test") -> tuple[Ints, Floats]:
        """A metric from everybody's examples together: rounds and values.

        The pooled model's is about all clients. Where others' is about those that were drawn, it has none beside them.
        """
        if self.sampling is not None and self.shows_drawn(phase) and self.is_pooled(label):
            return np.empty(0, np.int64), np.empty(0)
        rows = [
            row
            for row in self._rows("pooled_metrics", label, seed)
            if (row["metric"], row["split"], row["phase"]) == (metric, split, phase) and row["value"] is not None
        ]
        return _column(rows, "round", np.int64), _column(rows, "value", np.float64)

    def costs(self, label: str, seed: int) -> RoundCosts:
        """Bytes and seconds of every round."""
        rows = self._rows("rounds", label, seed)
        return RoundCosts(
            _column(rows, "round", np.int64),
            _column(rows, "seconds", np.float64),
            _column(rows, "bytes_up", np.int64),
            _column(rows, "bytes_down", np.int64),
            _column(rows, "participants", np.int64),
        )

    def left_out(self, label: str, seed: int) -> list[str]:
        """Names of the clients whose updates were not finite, one for every such round."""
        return [row["client"] for row in self._rows("public_numbers", label, seed) if row["name"] == LEFT_OUT]

    def abandoned(self, label: str, seed: int) -> tuple[int, int]:
        """How many rounds did not count, and of how many."""
        rows = self._rows("rounds", label, seed)
        return sum(not row["complete"] for row in rows), len(rows)

    def history(self, label: str, seed: int) -> dict[str, Floats]:
        """Metric → value after every local epoch of the pooled model, rounds one after another."""
        found: dict[str, list[float]] = {}
        for row in self._rows("history", label, seed):
            found.setdefault(row["metric"], []).append(math.nan if row["value"] is None else row["value"])
        return {metric: np.array(values) for metric, values in found.items()}

    @cached_property
    def has_server_test(self) -> bool:
        """Whether the global model was measured on test data by itself."""
        return any(
            len(self.server_values(label, seed, metric)[0]) for label, seed in self.cells for metric in self.metrics
        )

    def last_round(self, label: str, phase: str, metric: str) -> dict[int, ClientValues]:
        """The last measured round of each seed."""
        found = {
            seed: self.client_values(label, seed, phase, metric).last()
            for seed in self.seeds
            if (label, seed) in self.cells
        }
        return {seed: series for seed, series in found.items() if len(series)}

    def _rows(self, table: str, label: str, seed: int) -> Sequence[dict[str, Any]]:
        cell = self.cells.get((label, seed))
        if cell is None:
            return ()
        rows: list[dict[str, Any]] = self._cached((table, label, seed), lambda store: store.rows(table, cell["id"]))
        return rows

    def _cached(self, key: Any, read: Any) -> Any:
        if key not in self._read:
            with Store(self.folder, read_only=True) as store:
                self._read[key] = read(store)
        return self._read[key]


def _column(rows: Sequence[Mapping[str, Any]], name: str, kind: Any) -> Any:
    return np.array([row[name] for row in rows], dtype=kind)
