"""A run folder as arrays: tables, figures and the report are made from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.errors import InputError, StoreError
from fedloom.experiment.description import identity, keeps_clients
from fedloom.experiment.store import OWN_MODELS, Store
from fedloom.federation.sampling import Sampling
from fedloom.metrics import class_number, short_name
from fedloom.metrics import metric as known_metric
from fedloom.results.result import Result, open_store, read_cells
from fedloom.results.run_values import ClientValues, Curve, Floats, MetricInfo, RoundCosts, RoundTimes, grouped
from fedloom.results.safe_text import distinct_names
from fedloom.results.sentences import say
from fedloom.results.table import STATISTICS

Cell = tuple[str, int]  # the label of an algorithm, and a seed
AUDIT = "audit.json"
ABOUT = "experiment"  # beside the findings of audits: the identity of the experiment that they are about
PER_ROUND = ("rounds", "times", "server_metrics")  # tables with few rows for a round
EVERYONE = "everyone"  # the name of the client that owns all data: the pooled baseline trains on it


@dataclass(frozen=True)
class RunData:
    """Everything in a run folder that can be shown. Values are read from the database when they are first used."""

    folder: Path
    cells: dict[Cell, dict[str, Any]]
    metrics: dict[str, MetricInfo]  # in the order of the experiment file; the loss comes last
    clients: tuple[dict[str, Any], ...]
    facts: Mapping[str, Any]
    _read: dict[Any, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def read(folder: Path) -> RunData:
        """Read a run folder, finished or not."""
        with open_store(folder) as store:
            return RunData._of(store, folder)

    @staticmethod
    def _of(store: Store, folder: Path) -> RunData:
        cells = {(cell["label"], cell["seed"]): cell for cell in read_cells(store, folder)}
        rows, clients, facts = store.rows("metrics"), store.rows("clients"), store.facts()
        description = facts.get("description") or {}
        wanted = _wanted_metrics(description)
        places = {short_name(name): place for place, name in enumerate(wanted)}
        rows.sort(key=lambda row: (row["metric"] == "loss", places.get(row["metric"], len(wanted))))
        classes = (facts.get("labels") or {}).get("classes") or ()
        metrics = {
            row["metric"]: MetricInfo(
                row["metric"], bool(row["is_mean"]), bool(row["higher_is_better"]), _class_of(row["metric"], classes)
            )
            for row in rows
        }
        return RunData(folder, cells, metrics, tuple(clients), facts)

    def reread(self) -> RunData:
        """Read the run as it is now: nothing of cells that have not changed, and only new rounds of those that have."""
        with open_store(self.folder) as store:
            now = RunData._of(store, self.folder)
            for key, known in list(self._read.items()):  # other threads may add to it
                values = isinstance(known, ClientValues)
                if not values and key[0] == "pooled":
                    if known:  # a label that has not begun may still be pooled
                        now._read[key] = known
                    continue
                place = key[:2] if values else key[1:]
                cell = now.cells.get(place, {})
                if cell == self.cells.get(place):
                    now._read[key] = known
                elif cell and not values and key[0] in PER_ROUND:
                    # the last round is read again: its end may have added to it, or later ones were taken back
                    last = min(known[-1]["round"] if known else 0, cell["rounds_done"])
                    earlier = [row for row in known if row["round"] < last]
                    now._read[key] = earlier + store.rows(key[0], cell["id"], after=last - 1)
                elif cell and values and len(known) and key[2] in ("pre_fit", "post_fit"):
                    _, _, phase, metric, split = key
                    last = int(known.rounds[-1])
                    if cell["rounds_done"] >= last:  # otherwise some rounds were taken back
                        later = store.client_values(cell["id"], phase, split, metric, after=last)
                        now._read[key] = known.followed_by(ClientValues.of(later))
        return now

    @property
    def name(self) -> str:
        """The experiment's name, or the folder's."""
        return str(self.description.get("name") or self.folder.resolve().name)

    @property
    def description(self) -> Mapping[str, Any]:
        """The experiment file as nested tables, or the arguments of the Python call."""
        return self.facts.get("description") or {}

    @property
    def is_network(self) -> bool:
        """Whether clients were on other machines."""
        return bool(self.facts.get("network"))

    @property
    def withheld(self) -> Mapping[str, Sequence[int]]:
        """The metrics that policies of sites withhold, and the clients there."""
        return self.facts.get("withheld") or {}

    @property
    def hides_sizes(self) -> bool:
        """Whether sites did not say how many examples their clients have."""
        return self.is_network and "secure_aggregation" in (self.description.get("privacy") or {})

    @property
    def server_tests(self) -> int:
        """How many test examples the server itself holds; 0 if it has none, or if that is not known."""
        return int((self.facts.get("server") or {}).get("test", 0))

    @property
    def wanted_metrics(self) -> list[str]:
        """The metrics as the experiment names them, or as they were chosen."""
        return _wanted_metrics(self.description) or [name for name in self.metrics if name != "loss"]

    @property
    def evaluation(self) -> Mapping[str, Any]:
        """The table `[evaluate]` of the description."""
        return self.description.get("evaluate") or {}

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The algorithms' labels, in the order of the experiment file."""
        return tuple(dict.fromkeys(label for label, _ in self.cells))

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, in the order of the experiment file."""
        return tuple(dict.fromkeys(seed for _, seed in self.cells))

    @cached_property
    def result(self) -> Result:
        """The numbers that the run ends with."""
        found = Result.read(self.folder)
        return replace(found, runs=tuple(one for one in found.runs if (one.algorithm, one.seed) in self.cells))

    def of_algorithms(self, labels: Collection[str]) -> RunData:
        """The same run, as if it had no other algorithms."""
        return replace(self, cells={cell: row for cell, row in self.cells.items() if cell[0] in labels})

    @cached_property
    def audit(self) -> dict[str, Any]:
        """What the audits of this run found, by the audit's name; empty if there were none."""
        return read_findings(self.folder, self.description)

    @property
    def data_fingerprints(self) -> dict[str, str]:
        """Seed → SHA-256 of the data it used: all equal, unless every seed draws its own data."""
        return self._of_seeds("data of seed ")

    @property
    def test_fingerprints(self) -> dict[str, str]:
        """Seed → SHA-256 of the global model's test examples, if they stay the same however the rest is divided."""
        return self._of_seeds("test of seed ")

    def _of_seeds(self, beginning: str) -> dict[str, str]:
        known = {key: value for key, value in self.facts.items() if key.startswith(beginning) and value is not None}
        return {key.removeprefix(beginning): str(value) for key, value in known.items()}

    @property
    def done(self) -> bool:
        """Whether every cell is finished."""
        return bool(self.cells) and all(cell["status"] == "done" for cell in self.cells.values())

    @property
    def started_at(self) -> str | None:
        """When the first cell began, in ISO format; None if no cell has begun."""
        return min((cell["started"] for cell in self.cells.values() if cell["started"]), default=None)

    @property
    def finished_at(self) -> str | None:
        """When the last finished cell ended, in ISO format; None if no cell has ended."""
        return max((cell["finished"] for cell in self.cells.values() if cell["finished"]), default=None)

    def metric(self, name: str) -> MetricInfo:
        """What is known about a metric; one that was never stored counts as a mean where higher is better."""
        return self.metrics.get(name, MetricInfo(name, True, name != "loss"))

    @property
    def main_metric(self) -> str:
        """The metric that figures and cautions are about: the first one, or the loss."""
        return next(iter(self.metrics), "loss")

    @cached_property
    def client_names(self) -> list[str]:
        """The clients' names in the data. Those that look alike are marked."""
        return distinct_names([str(client["name"]) for client in self.clients], taken=(EVERYONE, *STATISTICS))

    def client_name(self, client: int) -> str:
        """A client's name in the data, marked if it looks like another."""
        if 0 <= client < len(self.clients):
            return self.client_names[client]
        return EVERYONE if client == len(self.clients) else str(client)

    def is_pooled(self, label: str) -> bool:
        """Whether the algorithm trained on everybody's examples in one place."""
        ids = [cell["id"] for (known, _), cell in self.cells.items() if known == label]
        found: bool = self._cached(("pooled", label), lambda store: any(map(store.is_pooled, ids)))
        return found

    def client_values(self, label: str, seed: int, phase: str, metric: str, split: str = "test") -> ClientValues:
        """A metric of one cell at its clients. Values that are not finite are left out.

        The pooled model does not train at clients: what a client has after a round is what it has before the next one.
        It is shown for the rounds in which its own training was measured, which are those of the other algorithms.
        The pooled model is measured at all clients, but shown only for the clients at which the other algorithms are
        measured: after local training, and everywhere if `evaluate.clients` is "cohort", those that were drawn.
        """
        found = self._stored_values(label, seed, phase, metric, split)
        if not self.is_pooled(label):
            return found
        if phase == "post_fit":
            before, final = (self._stored_values(label, seed, one, metric, split) for one in ("pre_fit", "final"))
            clients, values = np.append(before.clients, final.clients), np.append(before.values, final.values)
            found = ClientValues(np.append(before.rounds - 1, final.rounds), clients, values)
        if phase in ("pre_fit", "post_fit"):
            found = found.keep(np.isin(found.rounds, self._trained_rounds(label, seed)))
        if not self.about_drawn_clients(phase):
            return found
        if self.has_clock:  # every algorithm has its own clients: there are none to show the pooled model for
            return found.keep(np.zeros(len(found), dtype=np.bool_))
        if self.sampling is None:
            return found
        drawn = np.zeros(len(found), dtype=np.bool_)
        for round in np.unique(found.rounds).tolist():
            cohort = np.asarray(self.sampling.draw(len(self.clients), round, seed))
            drawn |= (found.rounds == round) & np.isin(found.clients, cohort)
        return found.keep(drawn)

    @property
    def data_marks(self) -> dict[str, str]:
        """What data a SHA-256 is of → the SHA-256: a line for all seeds, if they have the same data."""
        known = self.data_fingerprints
        if self.has_one_split and len(known) > 1:
            return {"data of all seeds": next(iter(known.values()))}
        return {f"data of seed {seed}": sha256 for seed, sha256 in known.items()}

    @property
    def has_one_split(self) -> bool:
        """Whether all seeds train and test on the same examples."""
        return len(set(self.data_fingerprints.values())) == 1

    @cached_property
    def same_clients(self) -> bool:
        """Whether a client is the same one in every seed. If every seed draws a partition, it is not."""
        if self.has_one_split or not self.data_fingerprints:
            return True
        data = self.description.get("data")
        if not isinstance(data, Mapping):  # a Python program made the data
            return False
        return keeps_clients(data)

    @property
    def in_first_seed(self) -> str:
        """What a sentence about single clients must add: whose they are, if every seed has its own clients."""
        return "" if self.same_clients else f" in seed {self.seeds[0]}"

    @property
    def seeds_of_clients(self) -> tuple[int, ...]:
        """The seeds whose numbers of one client may be averaged: only the first, if every seed has its own clients."""
        return self.seeds if self.same_clients else self.seeds[:1]

    def about_clients(self, text: str) -> str:
        """A note about single clients, which says if they are those of the first seed."""
        if self.same_clients:
            return text
        own = say("note", "own_clients", seed=self.seeds[0])
        return f"{text} {own}".strip()

    def client_values_by_seed(
        self, label: str, phase: str, metric: str, seeds: Sequence[int] | None = None
    ) -> dict[int, ClientValues]:
        """Seed → the values of one algorithm at its clients, for the seeds that have some."""
        found = {seed: self.client_values(label, seed, phase, metric) for seed in seeds or self.seeds}
        return {seed: values for seed, values in found.items() if len(values)}

    def last_round(self, label: str, phase: str, metric: str) -> dict[int, ClientValues]:
        """Seed → the values of its last measured round."""
        found = self.client_values_by_seed(label, phase, metric)
        return {seed: values.last_round() for seed, values in found.items()}

    def last_means(self, label: str, phase: str, metric: str) -> dict[int, float]:
        """Client → its value in the last measured round, averaged over the seeds that measured it then.

        If every seed has its own clients, these are the values of the first seed.
        """
        found = self.client_values_by_seed(label, phase, metric, self.seeds_of_clients)
        runs = [values.last_round() for values in found.values()]
        if not runs:
            return {}
        means = grouped(np.concatenate([one.clients for one in runs]), np.concatenate([one.values for one in runs]))
        return dict(zip(means.index.tolist(), means.mean.tolist(), strict=True))

    @cached_property
    def end_phase(self) -> str:
        """The phase that says how clients fare at the end: with the final model, or else after local training."""
        final = (self._stored_values(*cell, "final", "loss", "test") for cell in self.cells)
        return "final" if any(map(len, final)) else "post_fit"

    def about_drawn_clients(self, phase: str) -> bool:
        """Whether a phase is measured only at the clients that were drawn."""
        only_cohort = self.evaluation.get("clients") == "cohort"
        return phase == "post_fit" or (only_cohort and phase in ("pre_fit", "final"))

    def leaves_out_clients(self, phase: str) -> bool:
        """Whether numbers of a phase are about some of the clients only: not all clients are drawn in every round."""
        some = self.sampling is not None or self.has_clock
        return some and (phase == "universal" or self.about_drawn_clients(phase))

    def drawn(self, phase: str) -> str:
        """A remark for titles, if a phase is about some of the clients only."""
        return " (drawn clients)" if self.leaves_out_clients(phase) else ""

    @cached_property
    def sampling(self) -> Sampling | None:
        """How clients are drawn (with one seed, the same ones for every algorithm); None if all are, or if unknown."""
        found = self.known_sampling
        if found is None:
            return None
        everybody = found.sampling == "fixed" and found.size(len(self.clients)) == len(self.clients)
        return None if everybody else found

    @cached_property
    def known_sampling(self) -> Sampling | None:
        """How clients are drawn, even if all are; None if unknown."""
        try:
            return Sampling(**(self.description.get("cohort") or {}))
        except InputError:  # a program's own way of drawing clients is not in the description
            return None

    def _stored_values(self, label: str, seed: int, phase: str, metric: str, split: str) -> ClientValues:
        def read(store: Store) -> ClientValues:
            cell = self.cells.get((label, seed))
            return ClientValues.of(store.client_values(cell["id"], phase, split, metric) if cell else np.empty((0, 3)))

        values: ClientValues = self._cached((label, seed, phase, metric, split), read)
        return values

    def _trained_rounds(self, label: str, seed: int) -> Sequence[int]:
        cell = self.cells.get((label, seed))
        found: Sequence[int] = self._cached(
            ("trained rounds", label, seed), lambda store: sorted(store.trained_rounds(cell["id"])) if cell else ()
        )
        return found

    def summary(self, label: str, seed: int) -> dict[str, float]:
        """The final numbers of one cell, which the report compares: see `Store.summary`."""
        cell = self.cells[label, seed]["id"]
        found: dict[str, float] = self._cached(("summary", label, seed), lambda store: store.summary(cell))
        return found

    def server_values(self, label: str, seed: int, metric: str, split: str = "test") -> Curve:
        """The global model on the server's data: rounds and values."""
        return self._curve("server_metrics", label, seed, metric=metric, split=split)

    def pooled_values(self, label: str, seed: int, phase: str, metric: str, split: str = "test") -> Curve:
        """A metric over the examples of all measured clients together: rounds and values.

        For the pooled model these are all clients, so it has no value where the others' values are about drawn clients.
        """
        own_models = phase != "post_fit" and label in (self.facts.get(OWN_MODELS) or ())  # see `Store.summary`
        if own_models or (self.leaves_out_clients(phase) and self.is_pooled(label)):
            return np.empty(0, np.int64), np.empty(0)
        rounds, values = self._curve("pooled_metrics", label, seed, metric=metric, split=split, phase=phase)
        if phase != "pre_fit" or not self.is_pooled(label):
            return rounds, values
        known = np.isin(rounds, self._trained_rounds(label, seed))
        return rounds[known], values[known]

    @cached_property
    def has_server_test(self) -> bool:
        """Whether the global model itself was measured on test data."""
        return any(len(self.server_values(*cell, metric)[0]) for cell in self.cells for metric in self.metrics)

    def server_holds(self, split: str) -> bool:
        """Whether the server has a split of its own; if not, what it measures is the union of the clients'."""
        held = self.facts.get("server")  # earlier versions did not record it on a network
        return held is None or bool(held.get(split))

    def costs(self, label: str, seed: int) -> RoundCosts:
        """Seconds and bytes of every round. A pooled model is sent to nobody: it has no bytes."""
        rows = self.rows("rounds", label, seed)
        rounds, seconds = _column(rows, "round", np.int64), _column(rows, "seconds", np.float64)
        up, down, participants = (_column(rows, name, np.int64) for name in ("bytes_up", "bytes_down", "participants"))
        if self.is_pooled(label):  # older versions stored bytes
            up, down = np.zeros_like(up), np.zeros_like(down)
        return RoundCosts(rounds, seconds, up, down, participants)

    @property
    def has_secret_noise(self) -> bool:
        """Whether the run has noise of differential privacy, which nobody can draw again."""
        privacy = self.description.get("privacy") or {}
        return bool(privacy.get("dp") or privacy.get("example_dp"))

    @property
    def has_clock(self) -> bool:
        """Whether the run has a virtual clock."""
        return "system" in self.description

    @property
    def slots(self) -> int | None:
        """How many clients are at work at any time in asynchronous rounds; None in rounds that wait."""
        cohort = self.description.get("cohort") or {}
        if not self.has_clock or cohort.get("mode") != "async":
            return None
        return Sampling(**cohort).slots(len(self.clients))

    def times(self, label: str, seed: int) -> RoundTimes:
        """Virtual time of every round; empty without a virtual clock."""
        rows = self.rows("times", label, seed)
        began, ended = (_column(rows, name, np.float64) for name in ("began", "ended"))
        return RoundTimes(_column(rows, "round", np.int64), began, ended)

    def marked_clients(self, label: str, seed: int, why: str) -> list[tuple[str, int]]:
        """The names of clients that rounds are marked with, such as those that were left out, with the rounds."""
        shown = {row["name"]: name for row, name in zip(self.clients, self.client_names, strict=True)}
        rows = self.rows("public_numbers", label, seed)
        return [(shown.get(row["client"], str(row["client"])), row["round"]) for row in rows if row["name"] == why]

    def history(self, label: str, seed: int) -> dict[str, Floats]:
        """Metric → its value after every local epoch of the pooled model, one round after the other."""
        found: dict[str, list[float]] = {}
        for row in self.rows("history", label, seed):
            found.setdefault(row["metric"], []).append(math.nan if row["value"] is None else row["value"])
        return {metric: np.array(values) for metric, values in found.items()}

    def _curve(self, table: str, label: str, seed: int, **wanted: str) -> Curve:
        rows = [
            row
            for row in self.rows(table, label, seed)
            if row["value"] is not None and all(row[key] == value for key, value in wanted.items())
        ]
        return _column(rows, "round", np.int64), _column(rows, "value", np.float64)

    def rows(self, table: str, label: str, seed: int) -> Sequence[dict[str, Any]]:
        """The rows that one cell has in a table of the database."""
        cell = self.cells.get((label, seed))
        if cell is None:
            return ()
        rows: list[dict[str, Any]] = self._cached((table, label, seed), lambda store: store.rows(table, cell["id"]))
        return rows

    def _cached(self, key: Any, read: Callable[[Store], Any]) -> Any:
        if key not in self._read:
            with Store(self.folder, read_only=True) as store:
                self._read[key] = read(store)
        return self._read[key]


def _class_of(metric: str, classes: Sequence[str]) -> str:
    """Return the name of the class that a metric is about; empty if it is about all, or the classes have no names."""
    try:
        number = class_number(known_metric(metric))
    except InputError:  # your own
        return ""
    named = number is not None and number < len(classes) and classes[number] != str(number)
    return str(classes[number]) if named and number is not None else ""


def _wanted_metrics(description: Mapping[str, Any]) -> list[str]:
    return list(description.get("metrics") or (description.get("task") or {}).get("metrics") or ())


def _column(rows: Sequence[Mapping[str, Any]], name: str, kind: Any) -> Any:
    return np.array([row[name] for row in rows], dtype=kind)


def read_findings(folder: Path, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return what audits of an experiment found; findings about another one are left out.

    Audits are about the first seed, so findings stay when a run gets more seeds.
    """
    path, seeds = folder / AUDIT, description.get("seeds") or ()
    fewer = ({**description, "seeds": seeds[:count]} for count in range(1, len(seeds)))
    known = [{"identity": identity(one)} for one in (description, *fewer)]
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({error}). Delete it, and audit the run again.") from error
    return found if found.get(ABOUT) in known else {}
