"""Runs whose rounds are written when a test wants them: without training, of any size, with names of any kind."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedloom.experiment.store import Store
from fedloom.federation.engine import RoundRecord
from fedloom.federation.work import Report
from fedloom.training.evaluation import Measured
from tests.conftest import federation
from tests.experiment.round_records import TASK

UNIVERSAL = {"description": {"metrics": ["accuracy"], "evaluate": {"splits": ["test"], "universal": True}}}
HOSTILE = '<script>document.title="stolen"</script><img src=x onerror=alert(1)>'


@dataclass
class GrowingRun:
    """A run's folder with some cells, to which rounds are added one by one."""

    folder: Path
    labels: Sequence[str] = ("fedavg", "local")
    seeds: Sequence[int] = (1, 2)
    clients: Sequence[str] = ("cork", "kerry", "clare")
    rounds: int = 10
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.done = 0
        self.store = Store(self.folder)
        self.store.set_clients(federation([20] * len(self.clients), names=tuple(self.clients)))
        description = {
            "name": self.folder.name,
            "metrics": ["accuracy"],
            "evaluate": {"splits": ["test"]},
            "cohort": {},
        }
        for key, value in {"description": description, "rounds": self.rounds, **self.facts}.items():
            self.store.set_fact(key, value)
        self.cells = {(label, seed): self.store.cell(label, seed) for seed in self.seeds for label in self.labels}
        for cell in self.cells.values():
            self.store.set_status(cell, "running")

    def add(self, rounds: int = 1, **changes: Any) -> GrowingRun:
        """Finish some rounds in all cells."""
        for _ in range(rounds):
            self.done += 1
            for (label, seed), cell in self.cells.items():
                self.store.save(cell, self._record(self.labels.index(label), seed, **changes), TASK)
        return self

    def end(self) -> GrowingRun:
        """Mark all cells as done."""
        for cell in self.cells.values():
            self.store.set_status(cell, "done", weights_sha256="0" * 64)
        return self

    def add_universal(self, algorithm: int, seed: int, accuracy: float) -> None:
        """Finish one cell with a round that tests its clients' models on all tests."""
        cell = self.cells[self.labels[algorithm], seed]
        made = self._record(algorithm, seed, round=self.done + 1)
        tested = Measured(30, {"loss": 30.0, "accuracy": 30 * accuracy})
        after = {client: {**splits, "universal": tested} for client, splits in made.clients["post_fit"].items()}
        self.store.save(cell, replace(made, clients={**made.clients, "post_fit": after}), TASK)
        self.store.set_status(cell, "done", weights_sha256="0" * 64)

    def accuracy(self, algorithm: int, seed: int, client: int, round: int) -> float:
        """What a client reaches: a different number for each."""
        best = 0.9 - 0.1 * algorithm - 0.02 * (client % 10) + 0.005 * seed
        return best * (1 - math.exp(-round / 4))

    def _record(self, algorithm: int, seed: int, **changes: Any) -> RoundRecord:
        def measured(client: int) -> dict[str, Measured]:
            accuracy = self.accuracy(algorithm, seed, client, self.done)
            return {"test": Measured(10, {"loss": 10 * (1.5 - accuracy), "accuracy": 10 * accuracy})}

        everybody = tuple(range(len(self.clients)))
        values: dict[str, Any] = {
            "round": self.done,
            "state": {},
            "cohort": everybody,
            "reports": tuple(Report(client, 100, 200) for client in everybody),
            "clients": {
                "pre_fit": {one: measured(one) for one in everybody},
                "post_fit": {one: measured(one) for one in everybody},
            },
            "server": {},
            "own": {},
            "seconds": 0.5,
        }
        return RoundRecord(**{**values, **changes})


def write_large(folder: Path, clients: int = 1000, rounds: int = 500) -> GrowingRun:
    """A run of one cell with many clients and rounds, written straight into the database."""
    run = GrowingRun(folder, ("fedavg",), (1,), [f"hospital-{number:04d}" for number in range(clients)], rounds).add()
    database = sqlite3.connect(folder / "run.db")
    pairs = [(round, client) for round in range(2, rounds + 1) for client in range(clients)]
    database.executemany("INSERT INTO participants VALUES (1, ?, ?, 100, 200)", pairs)
    phases = ("pre_fit", "post_fit")
    values = ((r, c, phase, "accuracy", run.accuracy(0, 1, c, r)) for r, c in pairs for phase in phases)
    database.executemany("INSERT INTO client_metrics VALUES (1, ?, ?, ?, 'test', ?, ?, 10)", values)
    database.executemany(
        "INSERT INTO rounds VALUES (1, ?, 0.5, ?, 1, 100, 200)", [(r, clients) for r in range(2, rounds + 1)]
    )
    database.execute("UPDATE cells SET rounds_done = ?", (rounds,))
    database.commit()
    database.close()
    run.done = rounds
    return run
